"""A contest of streaming: cells, files, and runs of contestants in processes of their own."""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, processes
from benchmarks.rowfile import KINDS, Kind, create

ORDERS = ("sequential", "shuffled", "block-shuffled")
# Seconds of a run: of contestants that take part in every repeat, and of those measured once.
_CAP_S = 6.0
_SLOW_CAP_S = 1.5

Results = dict[str, dict[str, list[list[dict[str, Any]]]]]
"""The runs of each contestant in each cell; a run has a result for each of its processes."""


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

    @property
    def traits(self) -> frozenset[str]:
        """The traits that a contestant must have to take part."""
        traits = {"cold": self.cold, "step": self.computes, "processes": self.n_processes > 1}
        return frozenset(name for name, is_so in traits.items() if is_so)

    def ceiling(self, measured: list[dict[str, Any]]) -> float:
        """Return the ceiling in GB/s, the median of the repeats."""
        return statistics.median(self._ceiling(rates) for rates in measured)

    def _ceiling(self, rates: dict[str, Any]) -> float:
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
    """Return the result of ``run_job`` in a process of its own.

    Raises:
        RuntimeError: If it fails or takes too long.
    """
    return processes.in_process("benchmarks.streaming", {"call": call, **arguments})


def together(call: str, n_processes: int, **arguments: Any) -> list[Any]:
    """Return the results of ``run_job`` in several processes at the same time.

    Raises:
        RuntimeError: If one of them fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(n_processes) as executor:
        place = {"meeting": folder, "n_processes": n_processes}
        futures = [
            executor.submit(in_process, call, **arguments, **place, rank=rank)
            for rank in range(n_processes)
        ]
        return [future.result() for future in futures]


class Contest:
    """A measurement: its contestants, files, cells and results."""

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
        self._begin = time.perf_counter()

    def admit(self) -> None:
        """Leave out contestants that are not installed or yield other data.

        Raises:
            RuntimeError: If pinfeed yields other data.
        """
        for name in self.names[:]:
            contestant = peers.CONTESTANTS[name]
            cells = [cell for cell in self.cells if self.takes_part(name, cell, 0)]
            settings = sorted({(cell.kind.name, cell.order) for cell in cells})
            try:
                if not contestant.installed:
                    raise RuntimeError(
                        "it is not installed (pip install -c constraints.txt --group bench)"
                    )
                if name == "litdata":
                    in_process("prepare litdata", folder=str(self.files.folder))
                in_process("check", folder=str(self.files.folder), name=name, settings=settings)
            except RuntimeError as error:
                if name.startswith("pinfeed"):
                    raise
                self._say(f"{name} is left out: {error}")
                self.names.remove(name)
        self._say(f"equal data: {', '.join(self.names)}")

    def takes_part(self, name: str, cell: Cell, repeat: int) -> bool:
        """Return whether a contestant is measured in a cell."""
        contestant = peers.CONTESTANTS[name]
        return (
            cell.traits <= contestant.traits
            and (contestant.kinds is None or cell.kind.name in contestant.kinds)
            and (contestant.orders is None or cell.order in contestant.orders)
            and (contestant.every or self.quick or repeat == 0)
        )

    def repeat(self, number: int) -> None:
        """Measure every cell and every ceiling once."""
        for kind in self.kinds.values():
            cells = [cell for cell in self.cells if cell.kind is kind]
            orders = sorted({cell.order for cell in cells})
            folder = str(self.files.folder)
            self.ceilings[kind.name].append(
                in_process("ceilings", folder=folder, kind=kind.name, orders=orders)
            )
            for cell in cells:
                # Each repeat begins with another contestant.
                for name in self.names[number:] + self.names[:number]:
                    if self.takes_part(name, cell, number):
                        self._run(name, cell)

    def _run(self, name: str, cell: Cell) -> None:
        job = {
            "folder": str(self.files.folder),
            "name": name,
            "kind": cell.kind.name,
            "order": cell.order,
            "cold": cell.cold,
            "computes": cell.computes,
            "cap_s": _CAP_S if peers.CONTESTANTS[name].every else _SLOW_CAP_S,
        }
        try:
            run = together("run", cell.n_processes, **job)
        except RuntimeError as error:
            self._say(f"{cell}: {name} failed: {error}")
            return
        self.runs[str(cell)].setdefault(name, []).append(run)
        epochs = [epoch for process in run for epoch in process["epochs"]]
        shown = " ".join(f"{epoch['gb_per_s']:.2f} ({epoch['waited']:.0%})" for epoch in epochs)
        self._say(f"{cell}: {name}: {shown}")

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._begin:5.0f} s  {text}", flush=True)
