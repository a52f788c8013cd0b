"""Training rows of host tables with Adam: the time of a step by pinfeed and in other ways."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import rowsteps
from benchmarks.gpu.processes import last_lines, run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped
from benchmarks.rowcells import Body, RowCell
from benchmarks.rows import BIG_ROWS, N_WARM, as_long_as_the_transfer, to_and_from
from benchmarks.rowsteps import STEP_ALONE

_NAMES = (
    STEP_ALONE,
    "prefetch",
    "synchronous",
    "UVA gathers",
    "SpeedTorch's",
    "gather+copy",
    "whole table",
)


@dataclass
class Contest:
    """A table that all contestants train, and milliseconds of a step of a small model.

    Args:
        cell: The table.
        device: ``cuda`` or ``cpu``.
        n_steps: Steps that are timed.
        cap_s: Seconds after which they end.
        n_warm: Steps before them.
        n_compared: Steps whose losses are compared.
        cached: Contestants with a cache, by name.
    """

    cell: RowCell
    device: str
    n_steps: int
    cap_s: float
    n_warm: int = N_WARM
    n_compared: int = 4
    cached: Mapping[str, rowsteps.Run] = field(default_factory=dict)
    small_ms: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def ids(self) -> list[torch.Tensor]:
        return self.cell.batches(self.n_warm + self.n_steps)

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        return self._losses(rowsteps.prefetched)

    def small(self, name: str) -> Fields:
        """Compare the losses of some steps, then time steps of a model that takes little time."""
        run = self._run(name)
        losses = "none" if name == STEP_ALONE else self._compared(name, run)
        loops: list[Any] = []
        if name in self.cached:
            run = functools.partial(run, loops=loops)
        self.small_ms[name] = self._step_ms(run, 0)
        moved = _moved_rows(loops[0]) if loops else {}
        return {"losses": losses, "step_ms": self.small_ms[name], **moved}

    def large(self, name: str) -> Fields:
        """Time steps of a model that takes about as long as the transfer."""
        return {
            "step_ms": self._step_ms(self._run(name), self.n_products),
            "n_products": self.n_products,
        }

    @functools.cached_property
    def n_products(self) -> int:
        missing = [name for name in ("synchronous", STEP_ALONE) if name not in self.small_ms]
        if missing:
            raise Skipped(
                "the size of a large model follows from steps that were not measured: "
                + ", ".join(missing)
            )
        transfer_ms = self.small_ms["synchronous"] - self.small_ms[STEP_ALONE]
        return as_long_as_the_transfer(transfer_ms, self.cell, self.device)

    def _run(self, name: str) -> rowsteps.Run:
        if name == STEP_ALONE:
            return rowsteps.rows_there
        found = {**rowsteps.contestants(self.device), **self.cached}
        if name not in found:
            raise Skipped(f"{name} needs CuPy and a GPU; the device is {self.device}")
        return found[name]

    def _compared(self, name: str, run: rowsteps.Run) -> str:
        """Return whether the losses are equal. The time is recorded even if they differ."""
        try:
            rowsteps.compare(name, self._losses(run), self.expected)
        except AssertionError as error:
            return f"different: {error}"
        return "equal"

    def _losses(self, run: rowsteps.Run) -> torch.Tensor:
        return rowsteps.losses(run, self.cell, self.device, self.n_compared)

    def _step_ms(self, run: rowsteps.Run, n_products: int) -> float:
        body = Body(self.cell, self.device, n_products)
        step_s = rowsteps.step_s(run, self.cell, body, self.ids, self.n_warm, self.cap_s)
        return round(step_s * 1e3, 4)


def _moved_rows(loop: Any) -> Fields:
    """Return the hit rate of a loop's caches, and the rows moved per step, loop end included."""
    stats = loop.stats
    return {
        "hit_rate": round(stats.cache_hit_rate, 4),
        "rows_read": round((stats.cache_lookups - stats.cache_hits) / stats.batches, 1),
        "rows_written": round(stats.cache_rows_written / stats.batches, 1),
    }


def tables(run: Run) -> list[Cell]:
    """Return cells of steps on several tables, of SpeedTorch's table, and of a large table."""
    if run.cuda:
        contests = [
            Contest(RowCell(128, 32_768, 0.0), run.device, 150, 0.6),
            Contest(RowCell(128, 8192, 0.0), run.device, 200, 0.6),
            Contest(RowCell(128, 131_072, 0.0), run.device, 40, 0.6),
            Contest(RowCell(16, 8192, 0.5), run.device, 200, 0.6),
            Contest(RowCell(128, 8192, 0.0, 0.5), run.device, 200, 0.6),
        ]
    else:
        contests = [Contest(RowCell(16, 1024, 0.5, table_bytes=4 << 20), run.device, 50, 0.2)]
    first, *others = [contest_cells(contest, _NAMES) for contest in contests]
    single = [
        Cell({"what": "SpeedTorch's table, to and from, ms"}, lambda: to_and_from(run.device)),
        Cell({"what": "memory of a large table"}, lambda: _big_table(run)),
    ]
    return [*first, *single, *(cell for cells in others for cell in cells)]


def contest_cells(contest: Contest, names: Sequence[str]) -> list[Cell]:
    """Return a cell for each contestant, with a small model and then with a large one."""
    cells = []
    for model, measure in (("small", contest.small), ("large", contest.large)):
        for name in names:
            key = {"what": "step", "table": str(contest.cell), "model": model, "contestant": name}
            cells.append(Cell(key, functools.partial(measure, name)))
    return cells


def _big_table(run: Run) -> Fields:
    n_rows = BIG_ROWS if run.cuda else BIG_ROWS // 20
    command = (
        sys.executable,
        "-m",
        "benchmarks.rows",
        "--memory",
        str(n_rows),
        "--device",
        run.device,
    )
    status, output = run_program(command, min(90.0, max(1.0, run.left_s())))
    if status != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit status {status}: {last_lines(output)}"
        )
    found: Fields = json.loads(output.splitlines()[-1])
    return found
