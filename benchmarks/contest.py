"""A contest of streaming: cells, files, and runs of contestants in processes of their own."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ceilings, peers
from benchmarks.rowfile import KINDS, Kind, create

ROOT = Path(__file__).parent.parent
ORDERS = ("sequential", "shuffled", "block-shuffled")
# Seconds of a run of contestants that are measured once.
_SLOW_CAP_S = 1.5
_TIMEOUT_S = 90

Results = dict[str, dict[str, list[dict[str, Any]]]]
"""The runs of each contestant in each cell."""


@dataclass(frozen=True)
class Cell:
    """A setting in which every contestant is timed."""

    kind: Kind
    order: str
    cold: bool
    compute: bool

    def __str__(self) -> str:
        state = "cold" if self.cold else "warm"
        return f"{self.kind.name}, {state}, {self.order}{' + step' * self.compute}"

    def ceiling(self, measured: list[dict[str, Any]]) -> float:
        """Return the ceiling in GB/s, the median of the repeats."""
        return statistics.median(self._ceiling(rates) for rates in measured)

    def _ceiling(self, rates: dict[str, Any]) -> float:
        reached = rates[f"gather, {self.order}"]
        if self.order == "sequential":
            reached = max(reached, rates["sequential, warm"])
        if self.cold:
            reached = min(reached, rates["sequential, cold"])
        if self.compute:
            batch_nbytes = self.kind.batch_size * self.kind.row_nbytes
            reached = min(reached, batch_nbytes / rates["step_s"] / 1e9)
        return float(reached)


def all_cells() -> list[Cell]:
    """Return all cells.

    Images are as large as blocks, so that block-shuffled is the same as shuffled. A training step
    is measured with the order that suits a cold or a warm file.
    """
    cells = []
    for kind, cold in itertools.product(KINDS.values(), (False, True)):
        orders = ORDERS if kind.row_nbytes < 1 << 18 else ORDERS[:2]
        cells += [Cell(kind, order, cold, compute=False) for order in orders]
        cells.append(Cell(kind, orders[-1] if cold else "shuffled", cold, compute=True))
    return cells


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
        self.n_products = {
            name: ceilings.Compute.lasting(kind.step_s).n_products
            for name, kind in self.kinds.items()
        }

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
                if name == "pinfeed":
                    raise
                print(f"{name} is left out: {error}", flush=True)
                self.names.remove(name)
        print(f"equal data: {', '.join(self.names)}", flush=True)

    def takes_part(self, name: str, cell: Cell, repeat: int) -> bool:
        """Return whether a contestant is measured in a cell."""
        contestant = peers.CONTESTANTS[name]
        if contestant.orders is not None and cell.order not in contestant.orders:
            return False
        is_measured_once = not contestant.every and not self.quick
        return not is_measured_once or (repeat == 0 and not cell.compute)

    def repeat(self, number: int) -> None:
        """Measure every cell and every ceiling once."""
        for kind in self.kinds.values():
            job = {"folder": str(self.files.folder), "kind": kind.name}
            cells = [cell for cell in self.cells if cell.kind is kind]
            orders = sorted({cell.order for cell in cells})
            self.ceilings[kind.name].append(
                in_process("ceilings", orders=orders, n_products=self.n_products[kind.name], **job)
            )
            for cell in cells:
                # Each repeat begins with another contestant.
                for name in self.names[number:] + self.names[:number]:
                    if self.takes_part(name, cell, number):
                        self._run(name, cell, job)

    def _run(self, name: str, cell: Cell, job: dict[str, Any]) -> None:
        cap_s = 4 if peers.CONTESTANTS[name].every else _SLOW_CAP_S
        if cell.compute or self.quick:
            cap_s /= 2
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
