"""Batches of a .npy file, by pinfeed and by others, against what the machine can do.

Three kinds of rows (512 B, 4 KiB, images), three orders, a file in the page cache or not, a step of
computation beside the loop or not. Everybody yields equal owning tensors in equal order, which is
checked first. Each run is a process of its own; repeats go round over all contestants and over the
ceilings, because machines and disks change their minds. Run it from the root of the repository:

    python -m benchmarks.streaming            (all of it, up to 25 minutes; for the peers, pip install -c constraints.txt --group bench)
    python -m benchmarks.streaming --quick    (3 minutes)

"To ceiling" is the share of the best that was seen without a loader: for a warm file, gathering
from a populated memory map into buffers that are used again; for a cold one, reading it in
sequence, which brings in all rows of any order; with a step, no faster than the step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pinfeed
from benchmarks import ceilings, onerun, peers, report
from benchmarks.environment import RESULTS, environment, machine, save
from benchmarks.rowfile import KINDS, Kind, create

ROOT = Path(__file__).parent.parent
ORDERS = ("sequential", "shuffled", "block-shuffled")
# For those that run once.
_SLOW_CAP_S = 1.5
_TIMEOUT_S = 90

# Of each cell and contestant, the runs.
Results = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class Cell:
    """One setting in which everybody is timed."""

    kind: Kind
    order: str
    cold: bool
    compute: bool

    def __str__(self) -> str:
        return f"{self.kind.name}, {'cold' if self.cold else 'warm'}, {self.order}{' + step' * self.compute}"

    def ceiling(self, measured: list[dict[str, Any]]) -> float:
        """GB/s: the median of the repeats."""
        return statistics.median(self._ceiling(rates) for rates in measured)

    def _ceiling(self, rates: dict[str, Any]) -> float:
        reached = rates[f"gather, {self.order}"]
        if self.order == "sequential":
            reached = max(reached, rates["sequential, warm"])
        if self.cold:
            reached = min(reached, rates["sequential, cold"])
        if self.compute:
            reached = min(
                reached, self.kind.batch_size * self.kind.row_nbytes / rates["step_s"] / 1e9
            )
        return float(reached)


def all_cells() -> list[Cell]:
    """Images need no blocks: one is a block.

    A step stands beside the order that suits the place of the file.
    """
    cells = []
    for kind, cold in itertools.product(KINDS.values(), (False, True)):
        orders = ORDERS if kind.row_nbytes < 1 << 18 else ORDERS[:2]
        cells += [Cell(kind, order, cold, compute=False) for order in orders]
        cells.append(Cell(kind, orders[-1] if cold else "shuffled", cold, compute=True))
    return cells


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


@dataclass(frozen=True)
class Files:
    """The files of a measurement."""

    folder: Path

    def of(self, kind: Kind) -> Path:
        return self.folder / f"{kind.name.replace(' ', '-')}.npy"

    @property
    def tiny(self) -> Path:
        return self.folder / "tiny.npy"

    def create(self, kinds: set[Kind], nbytes: int) -> None:
        np.save(self.tiny, np.arange(16, dtype=np.float32).reshape(16, 1))
        for kind in kinds:
            create(self.of(kind), kind, nbytes)


def in_process(call: str, **arguments: Any) -> Any:
    """The result of ``one`` in a process of its own.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.streaming",
        "--one",
        json.dumps({"call": call, **arguments}),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def one(job: dict[str, Any]) -> Any:
    """What a process of its own does."""
    call, files = job.pop("call"), Files(Path(job.pop("folder")))
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


class Contest:
    """The measurement: who takes part, where, and what was found."""

    def __init__(self, files: Files, cells: list[Cell], *, quick: bool) -> None:
        self.files = files
        self.cells = cells
        self.quick = quick
        self.kinds = {cell.kind.name: cell.kind for cell in cells}
        self.runs: Results = {str(cell): {} for cell in cells}
        self.ceilings: dict[str, list[dict[str, Any]]] = {name: [] for name in self.kinds}
        self.names = [
            name for name, contestant in peers.CONTESTANTS.items() if contestant.quick or not quick
        ]
        self.n_products = {
            name: ceilings.Compute.lasting(kind.step_s).n_products
            for name, kind in self.kinds.items()
        }

    def admit(self) -> None:
        """Leave out who is not installed or gives other data; pinfeed may not."""
        for name in self.names[:]:
            contestant = peers.CONTESTANTS[name]
            settings = sorted(
                {
                    (cell.kind.name, cell.order)
                    for cell in self.cells
                    if self.takes_part(name, cell, 0)
                }
            )
            try:
                if not contestant.installed:
                    raise RuntimeError(
                        "it is not installed (pip install -c constraints.txt --group bench)"
                    )
                if name == "litdata":
                    in_process("prepare litdata", folder=str(self.files.folder))
                in_process("check", folder=str(self.files.folder), name=name, settings=settings)
            except RuntimeError as error:
                if name == "pinfeed":
                    raise
                print(f"{name} is left out: {error}", flush=True)
                self.names.remove(name)
        print(f"equal data: {', '.join(self.names)}", flush=True)

    def takes_part(self, name: str, cell: Cell, repeat: int) -> bool:
        contestant = peers.CONTESTANTS[name]
        once = not contestant.every and not self.quick
        return (contestant.orders is None or cell.order in contestant.orders) and not (
            once and (repeat > 0 or cell.compute)
        )

    def repeat(self, number: int) -> None:
        """Every cell and every ceiling once."""
        for kind in self.kinds.values():
            job = {"folder": str(self.files.folder), "kind": kind.name}
            cells = [cell for cell in self.cells if cell.kind is kind]
            orders = sorted({cell.order for cell in cells})
            self.ceilings[kind.name].append(
                in_process("ceilings", orders=orders, n_products=self.n_products[kind.name], **job)
            )
            for cell in cells:
                for name in self.names[number:] + self.names[:number]:
                    # Nobody is always the first.
                    if self.takes_part(name, cell, number):
                        self._run(name, cell, job)

    def _run(self, name: str, cell: Cell, job: dict[str, Any]) -> None:
        cap_s = (4 if peers.CONTESTANTS[name].every else _SLOW_CAP_S) / (
            2 if cell.compute or self.quick else 1
        )
        n_products = self.n_products[cell.kind.name] if cell.compute else 0
        try:
            run = in_process(
                "run",
                name=name,
                order=cell.order,
                cold=cell.cold,
                n_products=n_products,
                cap_s=cap_s,
                **job,
            )
        except RuntimeError as error:
            print(f"{cell}: {name} failed: {error}", flush=True)
            return
        self.runs[str(cell)].setdefault(name, []).append(run)
        print(
            f"{cell}: {name}: {' '.join(f'{rate:.2f}' for rate in run['gb_per_s'])} GB/s",
            flush=True,
        )


def rate(runs: list[dict[str, Any]]) -> float:
    """GB/s of a contestant in a cell: the median of the epochs after the first, or of the first where there is no other."""
    return statistics.median(
        statistics.median(run["gb_per_s"][1:] or run["gb_per_s"]) for run in runs
    )


def first_rate(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["gb_per_s"][0] for run in runs)


def growth(runs: list[dict[str, Any]]) -> float:
    """MiB by which the peak of resident memory grew: the median."""
    return statistics.median(run["peak_growth"] for run in runs) / (1 << 20)


def summary(contest: Contest) -> list[dict[str, Any]]:
    """One record for each cell."""
    records = []
    for cell in contest.cells:
        runs, ceiling = contest.runs[str(cell)], cell.ceiling(contest.ceilings[cell.kind.name])
        rates = {name: rate(of_name) for name, of_name in runs.items()}
        record: dict[str, Any] = {
            "cell": str(cell),
            "ceiling": ceiling,
            "rates": rates,
            "first": {name: first_rate(of_name) for name, of_name in runs.items()},
        }
        others = {name: value for name, value in rates.items() if name != "pinfeed"}
        record["best"] = max(others, key=others.__getitem__, default=None)
        record["dataloader"] = max(
            (value for name, value in others.items() if name.startswith("DataLoader")), default=None
        )
        record["growth_mib"] = {name: growth(of_name) for name, of_name in runs.items()}
        record["plan_mib"] = (
            runs["pinfeed"][0]["plan_bytes"] / (1 << 20) if "pinfeed" in runs else None
        )
        records.append(record)
    return records


@contextlib.contextmanager
def folder_in(given: Path | None) -> Iterator[Path]:
    """A folder for the files that is gone afterwards. /tmp may be in memory, so the default is beside the code."""
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
    # How it calls itself.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.one is not None:
        print(json.dumps(one(arguments.one)), flush=True)
        # A peer may hang or abort when the interpreter ends after an early break.
        os._exit(0)
    print(environment(), flush=True)
    cells = [
        cell
        for cell in all_cells()
        if arguments.only in str(cell) and (not arguments.quick or str(cell) in QUICK)
    ]
    if not cells:
        sys.exit(
            f"--only {arguments.only!r}: there is no such cell; there are\n"
            + "\n".join(map(str, all_cells()))
        )
    with folder_in(arguments.dir) as folder:
        files = Files(folder)
        files.create(
            {cell.kind for cell in cells},
            pinfeed.GiB(arguments.size or (0.5 if arguments.quick else 1)),
        )
        contest = Contest(files, cells, quick=arguments.quick)
        contest.admit()
        for number in range(arguments.repeats or (1 if arguments.quick else 3)):
            contest.repeat(number)
    records = summary(contest)
    print(report.table(records, contest.ceilings))
    if not (arguments.quick or arguments.only):
        print(
            save(
                "streaming", {"cells": records, "ceilings": contest.ceilings, "runs": contest.runs}
            )
        )
        picture = RESULTS / f"streaming-{machine()}.png"
        report.picture(records, picture, environment())
        print(picture)


if __name__ == "__main__":
    main()
