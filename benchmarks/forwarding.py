"""The cost of write-backs per batch, on the training thread and on the other threads.

A loop prefetches four batches and writes each one back. The table and the device do nothing. So
only pinfeed's own work remains: it draws row indices, checks them, and finds the rows of a batch
that earlier batches write. Whenever the loop receives a batch, a given number of write-backs is
pending (not completed). The batch was gathered four batches earlier, so its rows may be older than
the pending write-backs and four more. The column "no write" is a loop that writes nothing back.

The training thread is measured twice. First, the CPU's caches hold the code of the loop, because a
loop over small batches runs just before. Then it is measured after a pause for the reader threads,
in which other programs may use the caches. A pause of 4 ms makes the same work several times slower
at any number of rows, so only the first measurement shows how the work grows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from benchmarks.earlier import Earlier
from benchmarks.idledevice import IdleDevice
from pinfeed import Feeder

DEPTH = 4
N_TABLE_ROWS = 1 << 24
SIZES = (1024, 8192, 65_536, 1 << 20)
GOAL_ROWS = 65_536
GOAL_TRAINING_US = 100
GOAL_BACKGROUND_US = 3000
CAP_S = 0.2
"""Seconds after which a measurement ends."""

_ROW_SHAPE = (128,)
# Batches are made of pieces of distinct rows, each half a batch.
_N_PIECES = 32
_N_WARM = 2 * DEPTH + 2
_MAX_BATCHES = 200
_SMALL_ROWS = 64


@dataclass(frozen=True)
class ForwardingCell:
    """A loop and its batches.

    Args:
        n_rows: Rows of a batch.
        is_sorted: Whether the row indices of a batch ascend.
        is_shared: Whether half of the rows are also in the previous batch. Otherwise a row is
            repeated after 16 batches.
        n_pending: Write-backs that are not completed when the loop receives a batch; None for a
            loop that writes nothing back.
        direct: Whether the device reads and writes the rows of the table itself.
    """

    n_rows: int
    is_sorted: bool
    is_shared: bool
    n_pending: int | None
    direct: bool = True

    def __str__(self) -> str:
        order = "sorted" if self.is_sorted else "unsorted"
        return f"{self.n_rows:,} {order} rows, {'half' if self.is_shared else 'none'} in common"


def cells(sizes: Sequence[int]) -> list[ForwardingCell]:
    """Return the cells with these numbers of rows in a batch."""
    return [
        ForwardingCell(n_rows, is_sorted, is_shared, n_pending)
        for n_rows in sizes
        for is_sorted in (True, False)
        for is_shared in (False, True)
        for n_pending in (None, *range(DEPTH + 1))
    ]


def measure(
    sizes: Sequence[int] = SIZES, earlier: Earlier | None = None, *, direct: bool = True
) -> list[dict[str, Any]]:
    """Return the measurements of all cells, by this pinfeed and by an earlier one.

    Args:
        sizes: Rows of a batch.
        earlier: The earlier pinfeed; None measures this one only.
        direct: Whether the device reads and writes the rows of the table itself.
    """
    results = []
    for cell in cells(sizes):
        given = dataclasses.asdict(dataclasses.replace(cell, direct=direct))
        result = given | {"after": one_cell(given)}
        if earlier is not None:
            result["before"] = earlier.call("benchmarks.forwarding:one_cell", given)
        results.append(result)
    return results


def one_cell(given: dict[str, Any]) -> dict[str, Any]:
    """Measure a cell, whose fields are given as plain values."""
    cell = ForwardingCell(**given)
    found = times(cell)
    if cell.n_pending == DEPTH:
        found |= memory(cell)
    return found


def times(cell: ForwardingCell) -> dict[str, Any]:
    """Return microseconds per batch.

    Returns:
        Percentiles of times, and the number of batches. The times are the training thread's CPU
        time and wall time while the caches hold its code, its CPU time after a pause, and the CPU
        time of all other threads.
    """
    small = dataclasses.replace(cell, n_rows=_SMALL_ROWS)
    with _running(cell) as loop:
        for _ in range(_N_WARM):
            loop.step()
        paused = _measured(loop)
        with _running(small) as small_loop:
            for _ in range(_N_WARM):
                small_loop.step()
            warm = _measured(loop, small_loop)
    return {
        "training_us": _percentiles([step.next_s + step.write_s for step in warm]),
        "training_wall_us": _percentiles([step.wall_s for step in warm]),
        "next_us": _percentiles([step.next_s for step in warm]),
        "write_back_us": _percentiles([step.write_s for step in warm]),
        "paused_us": _percentiles([step.next_s + step.write_s for step in paused]),
        "background_us": _percentiles([step.background_s for step in paused]),
        "batches": [len(warm), len(paused)],
    }


def memory(cell: ForwardingCell) -> dict[str, Any]:
    """Return the peak allocation of a loop, and the index in its plan, in bytes.

    The allocations include the row indices of prefetched batches, but not the device's memory.
    """
    row_indices(cell.n_rows, cell.is_sorted, cell.is_shared)
    tracemalloc.start()
    try:
        with _running(cell) as loop:
            for _ in range(_N_WARM):
                loop.step()
            peak = tracemalloc.get_traced_memory()[1]
            items = loop.feeder.plan.items
    finally:
        tracemalloc.stop()
    index = [item for item in items if "index" in item.what or "shared" in item.what]
    return {
        "peak_bytes": peak,
        "row_indices_bytes": 8 * cell.n_rows,
        "index_bytes": {item.what: item.total for item in index},
        "table_bytes": VirtualTable().nbytes,
    }


class StepTimes(NamedTuple):
    """Seconds of one batch."""

    next_s: float
    """CPU time in which the training thread takes the batch."""
    write_s: float
    """CPU time in which the training thread writes it back."""
    wall_s: float
    """Wall time of both."""
    background_s: float
    """CPU time of all other threads, until they have done their work for the batch."""


class VirtualTable:
    """A writable store without contents: nothing is read and nothing is written."""

    n_rows = N_TABLE_ROWS
    row_shape = _ROW_SHAPE
    dtype = np.dtype(np.float32)
    writable = True
    resident_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.dtype.itemsize * int(np.prod(self.row_shape))

    def gather(self, rows: Any, out: Any) -> None:
        pass

    def scatter(self, rows: Any, values: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class RepeatedBatches:
    """Batches of row indices, again and again.

    Args:
        batches: Row indices of each batch.
    """

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = batches
        # A Feeder reads the size of the largest batch here.
        self.batch_size = len(batches[0])

    def __iter__(self) -> Iterator[np.ndarray]:
        return itertools.cycle(self._batches)


class WriteLoop:
    """A loop that writes its batches back.

    Every slot is filled before a batch is taken, and the queue has room for a write-back. So the
    training thread never waits for another thread.

    Args:
        feeder: Feeder of the batches.
        device: Device of the feeder.
        n_pending: Write-backs that are not completed when the loop receives a batch; None for a
            loop that writes nothing back.
    """

    def __init__(self, feeder: Feeder, device: IdleDevice, n_pending: int | None) -> None:
        self.feeder = feeder
        self._device = device
        self._n_left = n_pending or 0
        self._writes = n_pending is not None
        self._batches = feeder.batches()

    def prepare_take(self) -> None:
        self._device.complete_writes(self._n_left)

    def take(self) -> None:
        self._batch = next(self._batches)

    def prepare_write(self) -> None:
        self._device.complete_writes(min(self._n_left, DEPTH - 1))

    def write(self) -> None:
        if self._writes:
            self._batch.write_back(self._batch.data)

    def step(self) -> None:
        self.prepare_take()
        self.take()
        self.prepare_write()
        self.write()


@contextlib.contextmanager
def _running(cell: ForwardingCell) -> Iterator[WriteLoop]:
    rows = RepeatedBatches(row_indices(cell.n_rows, cell.is_sorted, cell.is_shared))
    device = IdleDevice(direct=cell.direct)
    with Feeder(VirtualTable(), rows=rows, depth=DEPTH, device=device) as feeder:
        yield WriteLoop(feeder, device, cell.n_pending)


def _measured(loop: WriteLoop, small_loop: WriteLoop | None = None) -> list[StepTimes]:
    """Return the times of batches, at least three.

    Args:
        loop: Loop to measure.
        small_loop: Loop that runs the same code just before.
    """
    found: list[StepTimes] = []
    end_s = time.perf_counter() + CAP_S
    loop.prepare_take()
    while len(found) < 3 or (len(found) < _MAX_BATCHES and time.perf_counter() < end_s):
        background_s = _background_s()
        if small_loop is not None:
            small_loop.step()
        next_s, next_wall_s = _timed(loop.take)
        loop.prepare_write()
        if small_loop is not None:
            small_loop.step()
        write_s, write_wall_s = _timed(loop.write)
        # All other threads are idle after this.
        loop.prepare_take()
        background_s = _background_s() - background_s
        found.append(StepTimes(next_s, write_s, next_wall_s + write_wall_s, background_s))
    return found


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the CPU seconds of this thread and the wall seconds in which it does the work."""
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    work()
    return time.thread_time() - cpu_s, time.perf_counter() - wall_s


@functools.lru_cache(maxsize=4)
def row_indices(n_rows: int, is_sorted: bool, is_shared: bool) -> list[np.ndarray]:
    """Return the row indices of batches, to be repeated."""
    pieces = _distinct_rows(_N_PIECES * n_rows // 2).reshape(_N_PIECES, -1)
    firsts = range(0, _N_PIECES, 1 if is_shared else 2)
    batches = [np.concatenate([pieces[i], pieces[(i + 1) % _N_PIECES]]) for i in firsts]
    return [np.sort(batch) for batch in batches] if is_sorted else batches


@functools.lru_cache(maxsize=1)
def _distinct_rows(n: int) -> np.ndarray:
    return np.random.default_rng(0).choice(N_TABLE_ROWS, n, replace=False)


def _background_s() -> float:
    """Return the CPU seconds of all threads except this one."""
    return time.process_time() - time.thread_time()


def _percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p90 = np.percentile(seconds, [50, 90]) * 1e6
    return {"p50": round(float(p50), 1), "p90": round(float(p90), 1)}


def report(results: list[dict[str, Any]]) -> str:
    """Return the measurements as tables, with the goals."""
    versions = [version for version in ("before", "after") if version in results[0]]
    return "\n\n".join(part for version in versions for part in _report(results, version))


def _report(results: list[dict[str, Any]], version: str) -> list[str]:
    """Return the tables of this pinfeed, ``"after"``, or of the earlier one, ``"before"``."""
    titles = {
        "training_us": "CPU time of the training thread, us per batch: median (90 %)",
        "training_wall_us": "wall time of the training thread, us per batch: median (90 %)",
        "paused_us": "CPU time of the training thread after a pause, us per batch: median (90 %)",
        "background_us": "CPU time of all other threads, us per batch: median (90 %)",
    }
    tables = [f"{version}: {titles[key]}\n{_table(results, version, key)}" for key in titles]
    lines = [_memory_line(result, version) for result in results if "peak_bytes" in result[version]]
    memory = f"{version}: allocated, with {DEPTH} pending write-backs"
    return [*tables, "\n".join([memory, *lines]), f"{version}: {_goals(results, version)}"]


def _table(results: list[dict[str, Any]], version: str, key: str) -> str:
    rows: dict[str, list[str]] = {}
    for result in results:
        us = result[version][key]
        rows.setdefault(_name(result), []).append(f"{us['p50']:,.0f} ({us['p90']:,.0f})")
    headers = ["", "no write", *(f"{n} pending" for n in range(DEPTH + 1))]
    body = [[name, *values] for name, values in rows.items()]
    align = ("left", *["right"] * (DEPTH + 2))
    return tabulate(body, headers, disable_numparse=True, colalign=align)


def _name(result: dict[str, Any]) -> str:
    fields = dataclasses.fields(ForwardingCell)
    return str(ForwardingCell(**{field.name: result[field.name] for field in fields}))


def _memory_line(result: dict[str, Any], version: str) -> str:
    found = result[version]
    peak = found["peak_bytes"]
    ratio = peak / found["row_indices_bytes"]
    text = f"  {_name(result)}: {peak / 1e6:.1f} MB, {ratio:.1f} times a batch's row indices"
    for what, nbytes in found["index_bytes"].items():
        share = nbytes / found["table_bytes"]
        text += f"; planned for {what}: {nbytes / 1e6:.1f} MB, {share:.2%} of the table"
    return text


def _goals(results: list[dict[str, Any]], version: str) -> str:
    """Compare the slowest cell of a size with the goals."""
    found = [result[version] for result in results if result["n_rows"] == GOAL_ROWS]
    if not found:
        return f"the goals are for {GOAL_ROWS:,} rows, which were not measured"
    training_us = max(times["training_us"]["p50"] for times in found)
    paused_us = max(times["paused_us"]["p50"] for times in found)
    background_us = max(times["background_us"]["p50"] for times in found)
    return (
        f"at {GOAL_ROWS:,} rows the training thread takes up to {training_us:,.0f} us per batch "
        f"(goal: {GOAL_TRAINING_US}; {paused_us:,.0f} after a pause), and all other threads up to "
        f"{background_us:,.0f} us (goal: {GOAL_BACKGROUND_US:,})"
    )
