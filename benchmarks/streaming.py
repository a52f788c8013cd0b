"""Batches of a .npy file, read by pinfeed and its peers, compared with ceilings of the machine.

There are three kinds of rows (512 B, 4 KiB, images) and three orders. The file is in the page cache
or not, and the loop has a training step or not. All contestants yield equal tensors with their own
memory in equal order, which is checked first. Each run is a process of its own. Repeats alternate
between all contestants and ceilings, because the speed of machines and disks varies over time. Run
it from the root of the repository:

    # the peers
    pip install -c constraints.txt --group bench
    # everything, up to 25 minutes
    python -m benchmarks.streaming
    # 3 minutes
    python -m benchmarks.streaming --quick

"To ceiling" is the share of the best rate without a loader. For a warm file, that is gathering from
a populated memory map into reused buffers. For a cold file, it is reading in sequence, which reads
all rows of any order. With a training step, it is no faster than the step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pinfeed
from benchmarks import ceilings, onerun, peers, report
from benchmarks.contest import ROOT, Contest, Files, all_cells
from benchmarks.environment import RESULTS, environment, machine, save
from benchmarks.rowfile import KINDS

QUICK = {
    "512 B, warm, shuffled",
    "512 B, cold, block-shuffled",
    "4 KiB, warm, shuffled",
    "4 KiB, warm, shuffled + step",
    "4 KiB, cold, sequential",
    "4 KiB, cold, block-shuffled",
    "image, warm, sequential",
    "image, cold, sequential",
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
    return onerun.run(files.of(kind), files.tiny, kind, **job)


def rate(runs: list[dict[str, Any]]) -> float:
    """Return GB/s of a contestant in a cell.

    It is the median of the epochs after the first one, or the first one of a single epoch.
    """
    return statistics.median(
        statistics.median(run["gb_per_s"][1:] or run["gb_per_s"]) for run in runs
    )


def first_rate(runs: list[dict[str, Any]]) -> float:
    """Return GB/s of first epochs, the median of the runs."""
    return statistics.median(run["gb_per_s"][0] for run in runs)


def growth(runs: list[dict[str, Any]]) -> float:
    """Return the growth of the peak of resident memory in MiB, the median of the runs."""
    return statistics.median(run["peak_growth"] for run in runs) / (1 << 20)


def summary(contest: Contest) -> list[dict[str, Any]]:
    """Return a record for each cell."""
    records = []
    for cell in contest.cells:
        runs = contest.runs[str(cell)]
        ceiling = cell.ceiling(contest.ceilings[cell.kind.name])
        rates = {name: rate(of_name) for name, of_name in runs.items()}
        record: dict[str, Any] = {
            "cell": str(cell),
            "ceiling": ceiling,
            "rates": rates,
            "first": {name: first_rate(of_name) for name, of_name in runs.items()},
        }
        others = {name: value for name, value in rates.items() if name != "pinfeed"}
        record["best"] = max(others, key=others.__getitem__, default=None)
        loaders = [value for name, value in others.items() if name.startswith("DataLoader")]
        record["dataloader"] = max(loaders, default=None)
        record["growth_mib"] = {name: growth(of_name) for name, of_name in runs.items()}
        record["plan_mib"] = (
            runs["pinfeed"][0]["plan_bytes"] / (1 << 20) if "pinfeed" in runs else None
        )
        records.append(record)
    return records


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
        help="only cells whose name has it, as '4 KiB, cold'; nothing is saved",
    )
    parser.add_argument(
        "--size", type=float, metavar="GIB", help="size of a file (default: 1, quick 0.5)"
    )
    parser.add_argument(
        "--repeats", type=int, help="how often everything is measured (default: 3, quick 1)"
    )
    parser.add_argument(
        "--dir", type=Path, help="where the files lie meanwhile (default: $TMPDIR, or demo/)"
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
    print(environment(), flush=True)
    cells = [cell for cell in all_cells() if arguments.only in str(cell)]
    if arguments.quick:
        cells = [cell for cell in cells if str(cell) in QUICK]
    if not cells:
        sys.exit(
            f"--only {arguments.only!r}: there is no such cell; there are\n"
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
    records = summary(contest)
    print(report.table(records, contest.ceilings))
    if not (arguments.quick or arguments.only):
        results = {"cells": records, "ceilings": contest.ceilings, "runs": contest.runs}
        print(save("streaming", results))
        picture = RESULTS / f"streaming-{machine()}.png"
        report.picture(records, picture, environment())
        print(picture)


if __name__ == "__main__":
    main()
