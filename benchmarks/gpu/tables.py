"""Training rows of host tables with Adam: the time of a step by pinfeed and in other ways."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import rowsteps
from benchmarks.gpu.bench import require_host_memory
from benchmarks.gpu.ceilings import DIRECTIONS
from benchmarks.gpu.conditions import clocks
from benchmarks.gpu.processes import last_lines, run_program
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped
from benchmarks.rowcells import Body, RowCell
from benchmarks.rows import BIG_ROWS, N_WARM, as_long_as_the_transfer, to_and_from
from benchmarks.rowsteps import STEP_ALONE

_TO_AND_FROM = "SpeedTorch's table, to and from, ms"
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
        link: GB/s of the link by direction; empty if it was not measured.
    """

    cell: RowCell
    device: str
    n_steps: int
    cap_s: float
    n_warm: int = N_WARM
    n_compared: int = 4
    cached: Mapping[str, rowsteps.Run] = field(default_factory=dict)
    link: Mapping[str, float] = field(default_factory=dict)
    small_ms: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def ids(self) -> list[torch.Tensor]:
        return self.cell.batches(self.n_warm + self.n_steps)

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        return self._losses(rowsteps.prefetched)

    def small(self, name: str) -> Fields:
        """Compare the losses of some steps, then time steps of a model that takes little time."""
        if self.device != "cpu":
            # The initial values stay in memory, and Adam's state is twice as large as the weights.
            require_host_memory(4 * self.cell.table_bytes)
        run = self._run(name)
        losses = "none" if name == STEP_ALONE else self._compared(name, run)
        found = self._timed(name, run, 0)
        self.small_ms[name] = found["step_ms"]
        return {"losses": losses, **found}

    def large(self, name: str) -> Fields:
        """Time steps of a model that takes about as long as the transfer."""
        found = self._timed(name, self._run(name), self.n_products)
        return {**found, "n_products": self.n_products}

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

    def _timed(self, name: str, run: rowsteps.Run, n_products: int) -> Fields:
        """Return milliseconds of a step; for pinfeed also its route, and what a step moves."""
        stats: list[Any] = []
        routes: list[str] = []
        if name in ("prefetch", "synchronous", *self.cached):
            run = _watched(run, self.n_warm, stats, routes)
        body = Body(self.cell, self.device, n_products)
        step_s = rowsteps.step_s(run, self.cell, body, self.ids, self.n_warm, self.cap_s)
        found: Fields = {"step_ms": round(step_s * 1e3, 4), "conditions": clocks()}
        if stats:
            found |= {"route": routes[0], **_per_step(stats[1] - stats[0], self.link)}
        return found


def _watched(run: rowsteps.Run, n_warm: int, stats: list[Any], routes: list[str]) -> rowsteps.Run:
    """Return the same contestant, which appends its loop's stats twice, and its route.

    It appends the stats after ``n_warm`` steps, and when its steps are no longer wanted.
    """

    def steps(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        loops: list[Any] = []
        train: Any = run
        # This name keeps the loop open until its stats are taken: its end writes all cached rows.
        losses = train(cell, body, ids, loops=loops)
        try:
            for i, loss in enumerate(losses):
                if i == n_warm - 1:
                    stats.append(loops[0].stats)
                yield loss
        finally:
            # A contestant that fails to begin has no loop.
            for loop in loops:
                stats.append(loop.stats)
                routes.append(loop.plan.route)

    return steps


def _per_step(stats: Any, link: Mapping[str, float]) -> Fields:
    """Return the rows that a step moves, the time of the threads, and the time of the link.

    The link copies in both directions at the same time. The times of reader threads are sums over
    the threads.
    """
    n = max(1, stats.batches)
    times = ("read_s", "source_s", "copy_wait_s", "write_s", "wait_s", "write_wait_s")
    found: Fields = {
        name.removesuffix("_s") + "_ms": _ms(getattr(stats, name), n) for name in times
    }
    found["n_readers"] = stats.n_readers
    nbytes = [stats.bytes, stats.bytes]
    if stats.cache_lookups:
        nbytes = [stats.cache_bytes_read, stats.cache_bytes_written]
        found["hit_rate"] = round(stats.cache_hit_rate, 4)
        found["rows_read"] = round((stats.cache_lookups - stats.cache_hits) / n, 1)
        found["rows_written"] = round(stats.cache_rows_written / n, 1)
    found["mb_read"], found["mb_written"] = (round(one / n / 1e6, 3) for one in nbytes)
    if link:
        ways = zip(nbytes, DIRECTIONS, strict=False)
        found["link_ms"] = _ms(max(one / link[way] / 1e9 for one, way in ways), n)
    return found


def _ms(seconds: float, n: int) -> float:
    return round(seconds / n * 1e3, 4)


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
        Cell({"what": _TO_AND_FROM}, lambda: to_and_from(run.device)),
        Cell({"what": "memory of a large table"}, lambda: _big_table(run)),
    ]
    return [*first, *single, *(cell for cells in others for cell in cells)]


def decisive_tables(run: Run) -> list[Cell]:
    """Return the cells of ``tables`` that decide whether prefetching is worth it."""
    found = tables(run)
    names = (STEP_ALONE, "prefetch", "synchronous", "UVA gathers", "SpeedTorch's")
    wanted = [
        cell
        for cell in found
        if cell.key["what"] == _TO_AND_FROM or cell.key.get("contestant") in names
    ]
    # SpeedTorch's own case is short, and comes first.
    return sorted(wanted, key=lambda cell: cell.key["what"] != _TO_AND_FROM)


def contest_cells(
    contest: Contest, names: Sequence[str], models: Sequence[str] = ("small", "large")
) -> list[Cell]:
    """Return a cell for each contestant, with a small model and then with a large one."""
    cells = []
    for model in models:
        measure = {"small": contest.small, "large": contest.large}[model]
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
