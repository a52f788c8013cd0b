"""Rows in a cache reach their stores, whatever ends the loop."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
from support.cached_rows import CachedRun, N
from support.schedules import SLOTS, STREAMS

from pinfeed import ArrayStore
from pinfeed.errors import BudgetError, ClosedError
from pinfeed.pipeline import cache_transfer
from pinfeed.testing import SimDevice, favour, lazy

BATCHES = [[0, 1, 2], [3, 4, 5], [1, 2], [8, 9], [0, 2, 9], [], [1], [10, 11], [1, 8, 9]]
DEVICES = {"late": lambda: SimDevice(lazy), "at once": lambda: SimDevice(favour(*STREAMS, *SLOTS))}


def after(n: int, **kwargs: Any) -> list[np.ndarray]:
    """Return the arrays after ``n`` batches of the synchronous loop."""
    return CachedRun(BATCHES, stop_after=n, **kwargs).synchronous().arrays


def assert_equal(run: CachedRun, n: int) -> None:
    for array, expected in zip(run.arrays, after(n), strict=True):
        np.testing.assert_array_equal(array, expected)


class Stop(Exception):
    """An error in a training step."""


@pytest.mark.parametrize("kind", ["error", "interrupt", "close", "dropped"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_in_the_stores_when_a_loop_is_left(device: str, depth: int, kind: str) -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1)
    sim = DEVICES[device]()
    runner = run.runner(sim, depth)
    batches = runner.run(lambda lent: lent)
    for i in range(6):
        lent = next(batches)
        run.step(sim, runner, i, lent)
        del lent
    if kind == "close":
        runner.close()
    elif kind == "dropped":
        del batches
    else:
        error = Stop() if kind == "error" else KeyboardInterrupt()
        with pytest.raises(type(error)):
            batches.throw(error)
    assert_equal(run, 6)
    assert not runner.source.cache.tensors
    runner.close()
    sim.drain()


def test_another_thread_closes_the_loop() -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1)
    sim = SimDevice(favour(*STREAMS, *SLOTS))
    runner = run.runner(sim, 2)
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    thread = threading.Thread(target=runner.close)
    thread.start()
    thread.join()
    assert_equal(run, 4)
    with pytest.raises(ClosedError, match="closed by another thread"):
        next(batches)
    assert_equal(run, 4)


class Full(SimDevice):
    """A device that has no memory of a size."""

    refused = -1

    def empty(self, nbytes: int, stream: Any) -> Any:
        if nbytes == self.refused:
            raise MemoryError("the device is full")
        return super().empty(nbytes, stream)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("refused", [11 * 16, 11 * 4], ids=["the first", "the second"])
def test_a_cache_that_has_no_memory(refused: int, depth: int) -> None:
    """The error says what to lower, nothing is left over, and the next loop works."""
    run = CachedRun(BATCHES, capacity=11, policy=1)
    device = Full(lazy)
    device.refused = refused
    runner = run.runner(device, depth)
    match = "device_cache of rows: sim has no memory for 11 rows .* give a smaller device_cache"
    with pytest.raises(BudgetError, match=match):
        next(runner.run(lambda lent: lent))
    gc.collect()
    device.drain()
    assert device.allocated_bytes == 0
    assert_equal(run, 0)
    device.refused = -1
    for i, lent in enumerate(runner.run(lambda lent: lent)):
        run.step(device, runner, i, lent)
        del lent
    assert_equal(run, len(BATCHES))
    runner.close()
    gc.collect()
    device.drain()
    assert device.allocated_bytes == 0


class Failing(ArrayStore):
    """Rows of which one write fails."""

    n_left = 3

    def scatter(self, rows: Any, values: Any) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise OSError("the disk is full")
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("n_left", [1, 2, 3, 5])
def test_rows_in_the_cache_are_written_after_a_write_has_failed(n_left: int, depth: int) -> None:
    """Lost are the rows of the write that failed, and those that left the cache after it."""
    run = CachedRun(BATCHES, capacity=8, policy=1)
    sim = SimDevice(favour(*STREAMS, *SLOTS))
    runner = run.runner(sim, depth, Failing)
    runner.source._stores[0].n_left = n_left
    n_done = 0
    cached: set[int] = set()
    with pytest.raises(OSError, match="the disk is full"):
        for i, lent in enumerate(runner.run(lambda lent: lent)):
            run.step(sim, runner, i, lent)
            n_done = i + 1
            cached = set(runner.source.cache.decisions.changed_rows()[0].tolist())
            del lent
    assert 0 < n_done < len(BATCHES)
    for array, expected in zip(run.arrays[:2], after(n_done), strict=False):
        for row in cached:
            np.testing.assert_array_equal(array[row], expected[row])
    runner.close()


@pytest.mark.parametrize("choose", [lazy, favour("compute"), favour(*SLOTS)], ids=["", "c", "s"])
def test_a_flush_whose_first_part_fails(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory that queued copies read is freed with the parts after it."""
    monkeypatch.setattr(cache_transfer, "_FLUSH_BYTES", 40)
    run = CachedRun(BATCHES, capacity=N, policy=1)
    sim = SimDevice(choose)
    runner = run.runner(sim, 2, Failing)
    runner.source._stores[0].n_left = 1000
    with pytest.raises(OSError, match="the disk is full"):
        for i, lent in enumerate(runner.run(lambda lent: lent)):
            run.step(sim, runner, i, lent)
            del lent
            if i == 5:
                runner.source._stores[0].n_left = 1
                runner.drain()
    runner.close()
    sim.drain()
