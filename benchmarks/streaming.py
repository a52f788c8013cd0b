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
    # 3 minutes, and one table to send to others
    python -m benchmarks.streaming --quick
    # files larger than the memory of the machine
    python -m benchmarks.streaming --larger

First and later epochs are reported apart, because loaders prepare themselves during the first one.
A cold file has one epoch. The ceiling is the best rate without a loader. For a warm file, that is
gathering from a populated memory map into reused buffers, with a thread for each core. For a cold
file, it is reading in sequence, which reads all rows of any order. With a training step, it is no
faster than the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tabulate import tabulate

import pinfeed
from benchmarks import ceilings, onerun
from benchmarks.environment import environment, save
from benchmarks.peers import CONTESTANTS
from benchmarks.processes import ROOT, in_process
from benchmarks.rowfile import KINDS, Kind, create

OURS = "pinfeed"
ORDERS = ("sequential", "shuffled", "block-shuffled")
# Other loaders in the order of tables.
ORDER = ("DataLoader", "torchdata.nodes", "grain", "loop", "SPDL", "DataLoader, 2 workers")
# Seconds of a run; a file that is larger than memory is read for longer.
_CAP_S = 6.0
_CAP_LARGER_S = 12.0
# Size of such a file, as a multiple of the memory of the machine.
_LARGER = 1.15
QUICK = {
    "512 B, warm, shuffled",
    "4 KiB, warm, sequential",
    "4 KiB, warm, shuffled",
    "4 KiB, warm, shuffled + step",
    "4 KiB, warm, shuffled, 2 processes",
    "4 KiB, cold, shuffled",
    "image, warm, shuffled",
}

LARGER = {"4 KiB, cold, block-shuffled", "image, cold, shuffled"}

Record = dict[str, Any]
Cells = list[Record]


@dataclass(frozen=True)
class Cell:
    """A setting in which every contestant is timed.

    Attributes:
        kind: Kind of the rows.
        order: Name of the order.
        cold: Whether the file is not in the page cache.
        computes: Whether the loop has a training step.
        n_processes: Processes that read the whole file at the same time, each in its own order.
    """

    kind: Kind
    order: str
    cold: bool = False
    computes: bool = False
    n_processes: int = 1

    def __str__(self) -> str:
        processes = f", {self.n_processes} processes" if self.n_processes > 1 else ""
        return f"{self.kind.name}, {self.state}, {self.order}{' + step' * self.computes}{processes}"

    @property
    def state(self) -> str:
        return "cold" if self.cold else "warm"

    def has(self, name: str) -> bool:
        """Return whether a contestant is measured in the cell."""
        traits = {"cold": self.cold, "step": self.computes, "processes": self.n_processes > 1}
        contestant = CONTESTANTS[name]
        return {trait for trait, is_so in traits.items() if is_so} <= contestant.traits and (
            contestant.kinds is None or self.kind.name in contestant.kinds
        )

    def ceiling(self, rates: Record) -> float:
        """Return the ceiling in GB/s of a repeat."""
        reached = rates[f"gather, {self.order}"]
        if self.cold:
            reached = min(reached, rates["sequential, cold"])
        if self.computes:
            batch_nbytes = self.kind.batch_size * self.kind.row_nbytes
            reached = min(reached, batch_nbytes / rates["step_s"] / 1e9)
        return float(reached)


def all_cells() -> list[Cell]:
    """Return all cells.

    Rows of 4 KiB are measured in every way. The others are measured if their size can matter.
    """
    small, middle, images = KINDS.values()
    cells = [Cell(kind, order) for kind in (small, images) for order in ORDERS[:2]]
    cells += [Cell(middle, order, cold) for cold in (False, True) for order in ORDERS]
    cells += [Cell(kind, "shuffled", cold=True) for kind in (small, images)]
    cells += [Cell(kind, "shuffled", computes=True) for kind in KINDS.values()]
    cells += [
        Cell(middle, "shuffled", cold=True, computes=True),
        Cell(middle, "shuffled", n_processes=2),
    ]
    return sorted(cells, key=lambda cell: (list(KINDS).index(cell.kind.name), cell.cold))


def run_job(call: str, folder: str, kind: str, **job: Any) -> Any:
    """Run a job on the file of a kind of rows, in a process of its own."""
    path = Path(folder) / f"{kind.replace(' ', '-')}.npy"
    if "name" in job:
        onerun.load(CONTESTANTS[job["name"]])
    if call == "check":
        for order in job["orders"]:
            onerun.check(path, KINDS[kind], order, job["name"])
        return None
    if call == "ceilings":
        return ceilings.measure(path, KINDS[kind], **job)
    meeting = onerun.Meeting(Path(job.pop("meeting")), job.pop("rank"), job.pop("n_processes"))
    return onerun.run(path, path.with_name("tiny.npy"), KINDS[kind], meeting=meeting, **job)


class Contest:
    """A measurement: its contestants, cells and results."""

    def __init__(
        self, folder: Path, cells: list[Cell], names: list[str], cap_s: float = _CAP_S
    ) -> None:
        self.folder = folder
        self.cells = cells
        self.names = names
        self.cap_s = cap_s
        self.kinds = list(dict.fromkeys(cell.kind.name for cell in cells))
        self.runs: dict[str, dict[str, list[Cells]]] = {str(cell): {} for cell in cells}
        self.ceilings: dict[str, Cells] = {kind: [] for kind in self.kinds}
        self._begin = time.perf_counter()

    def create(self, nbytes: int) -> None:
        """Write the files."""
        np.save(self.folder / "tiny.npy", np.arange(16, dtype=np.float32).reshape(16, 1))
        for kind in self.kinds:
            create(self.folder / f"{kind.replace(' ', '-')}.npy", KINDS[kind], nbytes)

    def admit(self) -> None:
        """Leave out contestants that are not installed or yield other data.

        Raises:
            RuntimeError: If pinfeed yields other data.
        """
        for name in self.names[:]:
            try:
                if not CONTESTANTS[name].installed:
                    raise RuntimeError("it is not installed; make .venv/peers installs it")
                for kind in self.kinds:
                    cells = [cell for cell in self.cells if cell.kind.name == kind]
                    orders = sorted({cell.order for cell in cells if cell.has(name)})
                    self._call("check", kind, name=name, orders=orders)
            except RuntimeError as error:
                if name.startswith(OURS):
                    raise
                self._say(f"{name} is left out: {error}")
                self.names.remove(name)
        self._say(f"equal data: {', '.join(self.names)}")

    def repeat(self, number: int, *, has_ceilings: bool = True) -> None:
        """Measure every cell once, and every ceiling unless the files do not fit in memory."""
        for kind in self.kinds:
            cells = [cell for cell in self.cells if cell.kind.name == kind]
            orders = sorted({cell.order for cell in cells})
            if has_ceilings:
                self.ceilings[kind].append(self._call("ceilings", kind, orders=orders))
            for cell in cells:
                # Each repeat begins with another contestant.
                for name in self.names[number:] + self.names[:number]:
                    if cell.has(name):
                        self._run(name, cell)

    def _run(self, name: str, cell: Cell) -> None:
        job = {
            "name": name,
            "order": cell.order,
            "cold": cell.cold,
            "computes": cell.computes,
            "cap_s": self.cap_s,
            "n_processes": cell.n_processes,
        }
        with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(cell.n_processes) as pool:
            futures = [
                pool.submit(self._call, "run", cell.kind.name, **job, meeting=meeting, rank=rank)
                for rank in range(cell.n_processes)
            ]
        try:
            run = [future.result() for future in futures]
        except RuntimeError as error:
            self._say(f"{cell}: {name} failed: {error}")
            return
        self.runs[str(cell)].setdefault(name, []).append(run)
        epochs = [epoch for process in run for epoch in process["epochs"]]
        shown = " ".join(f"{epoch['gb_per_s']:.2f} ({epoch['waited']:.0%})" for epoch in epochs)
        self._say(f"{cell}: {name}: {shown}")

    def _call(self, call: str, kind: str, **job: Any) -> Any:
        job |= {"call": call, "folder": str(self.folder), "kind": kind}
        # Memory is touched before a run, which takes long for a large file.
        return in_process("benchmarks.streaming", job, timeout_s=60 + 20 * self.cap_s)

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._begin:5.0f} s  {text}", flush=True)

    def results(self) -> Record:
        """Return a record for each cell, with the medians of the repeats, and the ceilings."""
        cells = [
            {
                "cell": str(cell),
                "kind": cell.kind.name,
                "state": cell.state,
                "order": cell.order,
                "step": cell.computes,
                "processes": cell.n_processes,
                "ceiling": _median(map(cell.ceiling, self.ceilings[cell.kind.name])),
                "contestants": {name: medians(runs) for name, runs in self.runs[str(cell)].items()},
            }
            for cell in self.cells
        ]
        return {"cells": cells, "ceilings": self.ceilings}


def compared(results: Record) -> list[tuple[str, str, dict[str, float | None]]]:
    """Compare the rates of later epochs, or of the only epoch of a cold file.

    Returns:
        For each cell its name, the rate of pinfeed in GB/s, and the ratio to that of each other
        loader, the most capable ones first.
    """
    others = [name for name in ORDER if any(name in one["contestants"] for one in results["cells"])]
    lines = []
    for cell in results["cells"]:
        rates = {name: one["later"] or one["first"] for name, one in cell["contestants"].items()}
        ours = rates[OURS]
        ratios = {name: ours / rates[name] if rates.get(name) else None for name in others}
        lines.append((cell["cell"], _text(ours), ratios))
    return lines


def times_as_fast(results: Record) -> str:
    """Return one table: how many times as fast as each other loader pinfeed is in each cell."""
    lines = compared(results)
    heads = ["rows, file, order", "pinfeed, GB/s", *lines[0][2]]
    shown = [[name, rate, *map(_text, ratios.values())] for name, rate, ratios in lines]
    return _table(heads, shown)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def medians(runs: list[Cells]) -> Record:
    """Return the medians of runs: rates, shares of time waited, and growth of memory.

    The rates and the memory of processes that ran at the same time are added.
    """
    found: Record = {}
    for epoch, part in (("first", slice(0, 1)), ("later", slice(1, None))):
        for key, name in (("gb_per_s", epoch), ("waited", f"waited_{epoch}")):
            sums = []
            for run in runs:
                of_processes = [[one[key] for one in process["epochs"][part]] for process in run]
                if all(of_processes):
                    sums.append(sum(map(statistics.median, of_processes)))
            value = statistics.median(sums) if sums else None
            mean = len(runs[0]) if key == "waited" else 1
            found[name] = value and value / mean
    for kind in runs[0][0]["growth"]:
        nbytes = [sum(process["growth"][kind] for process in run) for run in runs]
        found[f"{kind}_mib"] = statistics.median(nbytes) / (1 << 20)
    return found


def tables(results: Record) -> str:
    """Return all tables in Markdown: rates, shares of time waited, memory, ceilings."""
    plain = [cell for cell in results["cells"] if not cell["step"]]
    stepping = [cell for cell in results["cells"] if cell["step"]]
    names = [name for name in CONTESTANTS if any(name in cell["contestants"] for cell in plain)]
    parts = {"Rates of whole epochs, in GB/s; those of two processes are added:": rates(plain)}
    if stepping:
        title = (
            "Share of the time that a loop with a training step waits, first epoch / later epochs:"
        )
        parts[title] = _table(
            ["cell", "ceiling, GB/s", *names],
            [
                [cell["cell"], _text(cell["ceiling"]), *(_waited(cell, name) for name in names)]
                for cell in stepping
            ],
        )
    parts["Growth of memory in MiB, own / mapped pages of the file:"] = _table(
        ["cell", *names],
        [[cell["cell"], *(_memory(cell, name) for name in names)] for cell in plain],
    )
    if any(results["ceilings"].values()):
        keys = [*(f"gather, {order}" for order in ORDERS), "sequential, cold"]
        reached = []
        for kind, repeats in results["ceilings"].items():
            shown = [_text(_median_of(repeats, key)) for key in keys]
            reached.append([kind, *shown, f"{(_median_of(repeats, 'step_s') or 0.0) * 1e3:.1f}"])
        parts["Rates without a loader, in GB/s:"] = _table(["rows", *keys, "step, ms"], reached)
    return "\n\n".join(f"{title}\n\n{part}" for title, part in parts.items())


def rates(cells: Cells) -> str:
    """Return the rates of pinfeed and of the fastest other in each cell."""
    heads = ["cell", "ceiling"]
    for epoch in ("first", "later"):
        heads += [f"pinfeed, {epoch}", "fastest other", "ratio"]
    lines = []
    for cell in cells:
        line = [cell["cell"], _text(cell["ceiling"])]
        ours = cell["contestants"].get(OURS, {})
        for epoch in ("first", "later"):
            others = {
                name: found[epoch]
                for name, found in cell["contestants"].items()
                if not name.startswith(OURS) and found[epoch] is not None
            }
            name = max(others, key=others.__getitem__, default="")
            shown = f"{_text(others[name])} ({name})" if name else ""
            line += [_text(ours.get(epoch)), shown, _ratio(ours.get(epoch), others.get(name))]
        lines.append([*line, _ratio(ours.get("later") or ours.get("first"), cell["ceiling"])])
    return _table([*heads, "pinfeed / ceiling"], lines)


def _table(heads: list[str], lines: list[list[str]]) -> str:
    return tabulate(lines, heads, tablefmt="github", disable_numparse=True)


def _waited(cell: Record, name: str) -> str:
    found = cell["contestants"].get(name, {})
    shares = [found.get(key) for key in ("waited_first", "waited_later")]
    return " / ".join(f"{share:.0%}" for share in shares if share is not None)


def _memory(cell: Record, name: str) -> str:
    found = cell["contestants"].get(name)
    return f"{found['anonymous_mib']:.0f} / {found['file_mib']:.0f}" if found else ""


def _median_of(repeats: Cells, key: str) -> float | None:
    return statistics.median(rates[key] for rates in repeats) if key in repeats[0] else None


def _ratio(a: float | None, b: float | None) -> str:
    return _text(a / b if a is not None and b else None)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def measure(cells: list[Cell], names: list[str], folder: Path, arguments: Any) -> Record:
    """Write the files, measure all cells, and return the results."""
    quick, larger = arguments.quick, arguments.larger
    nbytes = int(_LARGER * psutil.virtual_memory().total) if larger else pinfeed.GiB(1)
    if arguments.size or quick:
        nbytes = pinfeed.GiB(arguments.size or 0.5)
    contest = Contest(folder, cells, names, _CAP_LARGER_S if larger else _CAP_S)
    contest.create(nbytes)
    contest.admit()
    for number in range(arguments.repeats or (1 if quick else 3)):
        contest.repeat(number, has_ceilings=not larger)
    return contest.results() | {"file_gib": nbytes / pinfeed.GiB(1)}


def chosen_cells(arguments: Any) -> list[list[Cell]]:
    """Return the cells to measure, in groups whose files are on the disk at the same time."""
    cells = [cell for cell in all_cells() if arguments.only in str(cell)]
    if arguments.quick or arguments.larger:
        names = QUICK if arguments.quick else LARGER
        cells = [cell for cell in cells if str(cell) in names]
    if not cells:
        sys.exit(f"--only {arguments.only!r}: no cell has this in its name")
    if not arguments.larger:
        return [cells]
    # One of these files takes more than the memory of the machine.
    return [[cell for cell in cells if cell.kind == kind] for kind in KINDS.values()]


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three minutes and one table: fewer cells and contestants; saves nothing",
    )
    parser.add_argument(
        "--larger", action="store_true", help="files larger than the memory of this machine"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cells whose name contains this; saves nothing"
    )
    parser.add_argument("--size", type=float, metavar="GIB", help="size of a file")
    parser.add_argument("--repeats", type=int, help="repeats of everything")
    parser.add_argument(
        "--dir", type=Path, help="folder of the files during the run (default: $TMPDIR, or demo/)"
    )
    # The benchmark starts its own processes with it.
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.one is not None:
        print(json.dumps(run_job(**arguments.one)), flush=True)
        # A peer may hang or abort when the interpreter ends after an early break.
        os._exit(0)
    begin = time.perf_counter()
    quick, larger = arguments.quick, arguments.larger
    groups = chosen_cells(arguments)
    names = [name for name, one in CONTESTANTS.items() if one.quick or not (quick or larger)]
    # /tmp may be in memory.
    parent = arguments.dir or Path(os.environ.get("TMPDIR", ROOT / "demo"))
    parent.mkdir(parents=True, exist_ok=True)
    results: Record = {"cells": [], "ceilings": {}}
    for cells in filter(None, groups):
        with tempfile.TemporaryDirectory(prefix="streaming-", dir=parent) as folder:
            found = measure(cells, list(names), Path(folder), arguments)
        results["cells"] += found.pop("cells")
        results["ceilings"] |= found.pop("ceilings")
        results |= found
    if not quick:
        print(tables(results))
    seconds = time.perf_counter() - begin
    about = (
        "How many times as fast as other loaders pinfeed reads a .npy file of "
        f"{results['file_gib']:.2g} GiB (above 1 faster, below 1 slower), in {seconds:.0f} s: "
        f"{environment()}."
    )
    print(f"\n{textwrap.fill(about, 100)}\n\n{times_as_fast(results)}")
    if not (quick or arguments.only):
        path = save("streaming-larger" if larger else "streaming", results)
        path.with_suffix(".md").write_text(tables(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
