"""Batches of a .npy file, read by pinfeed and its peers, compared with ceilings of the machine.

There are three kinds of rows (512 B, 4 KiB, images) and three orders. The file is in the page cache
or not. The loop has a training step or not. The step is the same number of matrix products for
every loader. All contestants yield equal tensors with their own memory in the same order, which is
checked first. While they are timed, the loop sums a value of every row. Each run is a new process,
which touches and frees memory immediately before its clock starts. Repeats alternate between all
contestants and ceilings, because the speed of machines and disks varies over time. Run it from the
root of the repository:

    # the peers
    pip install -c constraints.txt --group bench
    # everything, half an hour
    python -m benchmarks.streaming
    # 3 minutes
    python -m benchmarks.streaming --quick
    # write the tables and the picture again, from the results
    python -m benchmarks.streaming --report

First and later epochs are reported apart, because loaders prepare themselves during the first one.
A cold file has one epoch. The ceiling is the best rate without a loader. For a warm file, that is
gathering from a populated memory map into reused buffers, with a thread for each core. For a cold
file, it is reading in sequence, which reads all rows of any order. With a training step, it is no
faster than the step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pinfeed
from benchmarks import ceilings, onerun, peers, report
from benchmarks.contest import Cell, Contest, Files, all_cells
from benchmarks.environment import RESULTS, environment, machine, save
from benchmarks.processes import ROOT
from benchmarks.rowfile import KINDS

QUICK = {
    "512 B, warm, shuffled",
    "4 KiB, warm, sequential",
    "4 KiB, warm, shuffled",
    "4 KiB, warm, shuffled + step",
    "4 KiB, warm, shuffled, 2 processes",
    "4 KiB, cold, shuffled",
    "image, warm, shuffled",
}


def run_job(job: dict[str, Any]) -> Any:
    """Run a job, in a process of its own."""
    call = job.pop("call")
    files = Files(Path(job.pop("folder")))
    if "name" in job:
        onerun.load(peers.CONTESTANTS[job["name"]])
    if call == "prepare litdata":
        return [peers.prepare_litdata(path) for path in files.folder.glob("*.npy")]
    if call == "check":
        for kind, order in job["settings"]:
            onerun.check(files.of(KINDS[kind]), KINDS[kind], order, job["name"])
        return None
    kind = KINDS[job.pop("kind")]
    if call == "ceilings":
        return ceilings.measure(files.of(kind), kind, **job)
    meeting = onerun.Meeting(Path(job.pop("meeting")), job.pop("rank"), job.pop("n_processes"))
    return onerun.run(files.of(kind), files.tiny, kind, meeting=meeting, **job)


def summary(contest: Contest) -> list[dict[str, Any]]:
    """Return a record for each cell, with the medians of the runs of each contestant."""
    return [
        {
            "cell": str(cell),
            "kind": cell.kind.name,
            "state": cell.state,
            "order": cell.order,
            "step": cell.computes,
            "processes": cell.n_processes,
            "ceiling": cell.ceiling(contest.ceilings[cell.kind.name]),
            "contestants": {
                name: medians(runs, cell) for name, runs in contest.runs[str(cell)].items()
            },
        }
        for cell in contest.cells
    ]


def medians(runs: list[list[dict[str, Any]]], cell: Cell) -> dict[str, Any]:
    """Return the medians of runs: rates, shares of time waited, and growth of memory.

    The rates and the memory of processes that ran at the same time are added.
    """
    found: dict[str, Any] = {"runs": len(runs)}
    rates = [[_of_epochs(process, "gb_per_s") for process in run] for run in runs]
    waited = [[_of_epochs(process, "waited") for process in run] for run in runs]
    for key, which in (("first", 0), ("later", 1)):
        found[key] = _median([_sum(pair[which] for pair in run) for run in rates])
        total = _median([_sum(pair[which] for pair in run) for run in waited])
        found[f"waited_{key}"] = None if total is None else total / cell.n_processes
    kinds = runs[0][0]["growth"]
    for kind in kinds:
        nbytes = [sum(process["growth"][kind] for process in run) for run in runs]
        found[f"{kind}_mib"] = statistics.median(nbytes) / (1 << 20)
    for key in ("peak_growth", "plan_bytes"):
        if key in runs[0][0]:
            nbytes = [sum(process[key] for process in run) for run in runs]
            name = key.removesuffix("_growth").removesuffix("_bytes")
            found[f"{name}_mib"] = statistics.median(nbytes) / (1 << 20)
    grown = [max(process["page_cache_growth"] for process in run) for run in runs]
    found["page_cache_mib"] = statistics.median(grown) / (1 << 20)
    return found


def _of_epochs(process: dict[str, Any], key: str) -> tuple[float, float | None]:
    """Return a value of the first epoch, and the median of later ones if there are any."""
    values = [epoch[key] for epoch in process["epochs"]]
    return values[0], statistics.median(values[1:]) if values[1:] else None


def _sum(values: Iterable[float | None]) -> float | None:
    given = list(values)
    return None if None in given else sum(value for value in given if value is not None)


def _median(values: list[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return statistics.median(given) if given else None


@contextlib.contextmanager
def folder_in(given: Path | None) -> Iterator[Path]:
    """Create a temporary folder for the files.

    /tmp may be in memory, so the default is a folder of the source tree.
    """
    parent = given or Path(os.environ.get("TMPDIR", ROOT / "demo"))
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streaming-", dir=parent) as name:
        yield Path(name)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Batches of a .npy file, by pinfeed and by others."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three minutes: fewer cells and contestants, smaller files; nothing is saved",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="SUBSTRING",
        help="only cells whose name contains this, such as '4 KiB, cold'; nothing is saved",
    )
    parser.add_argument(
        "--size", type=float, metavar="GIB", help="size of a file (default: 1, quick 0.5)"
    )
    parser.add_argument(
        "--repeats", type=int, help="how often everything is measured (default: 3, quick 1)"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder of the files during the run (default: $TMPDIR, or demo/)"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing; write the tables and the picture again, from the saved results",
    )
    # The benchmark starts its own processes with it.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.one is not None:
        print(json.dumps(run_job(arguments.one)), flush=True)
        # A peer may hang or abort when the interpreter ends after an early break.
        os._exit(0)
    if arguments.report:
        saved = json.loads((RESULTS / f"streaming-{machine()}.json").read_text())
        write_report(saved["results"], saved["environment"])
        return
    print(environment(), flush=True)
    cells = [cell for cell in all_cells() if arguments.only in str(cell)]
    if arguments.quick:
        cells = [cell for cell in cells if str(cell) in QUICK]
    if not cells:
        sys.exit(
            f"--only {arguments.only!r}: no cell has this in its name; expected a part of one of\n"
            + "\n".join(map(str, all_cells()))
        )
    with folder_in(arguments.dir) as folder:
        files = Files(folder)
        size = arguments.size or (0.5 if arguments.quick else 1)
        files.create({cell.kind for cell in cells}, pinfeed.GiB(size))
        contest = Contest(files, cells, quick=arguments.quick)
        contest.admit()
        for number in range(arguments.repeats or (1 if arguments.quick else 3)):
            contest.repeat(number)
    results = {
        "cells": summary(contest),
        "ceilings": contest.ceilings,
        "runs": contest.runs,
    }
    print(report.tables(results))
    if not (arguments.quick or arguments.only):
        print(save("streaming", results))
        write_report(results, environment())


def write_report(results: dict[str, Any], environment: str) -> None:
    """Write the tables and the picture next to the JSON file of the results."""
    path = RESULTS / f"streaming-{machine()}"
    path.with_suffix(".md").write_text(report.tables(results) + "\n")
    report.save_picture(results, path.with_suffix(".png"), environment)


if __name__ == "__main__":
    main()
