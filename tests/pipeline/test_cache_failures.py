"""Rows in a cache reach their stores, whatever ends the loop."""

import contextlib
import gc
import itertools
import linecache
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cached_rows import CachedRun, D, N
from support.schedules import SLOTS, STREAMS

from pinfeed import ArrayStore
from pinfeed.errors import BudgetError, ClosedError
from pinfeed.native import library as native
from pinfeed.pipeline import row_cache
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.threads.exit import exit_hook

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

BATCHES = [[0, 1, 2], [3, 4, 5], [1, 2], [8, 9], [0, 2, 9], [], [1], [10, 11], [1, 8, 9]]
DEVICES: dict[str, Any] = {"late": lazy, "at once": favour(*STREAMS, *SLOTS)}
# Whether rows are staged, or the device reads and writes them itself, in a window.
WAYS = pytest.mark.parametrize("window", [False, True], ids=["staged", "window"])


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
@WAYS
def test_rows_are_in_the_stores_when_a_loop_is_left(
    window: bool, device: str, depth: int, kind: str
) -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1, window=window)
    sim = SimDevice(DEVICES[device], direct=window)
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


@WAYS
def test_another_thread_closes_the_loop(window: bool) -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1, window=window)
    sim = SimDevice(favour(*STREAMS, *SLOTS), direct=window)
    runner = run.runner(sim, 2)
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    thread = threading.Thread(target=runner.close)
    thread.start()
    thread.join()
    assert_equal(run, 4)
    with pytest.raises(ClosedError, match="another thread closed"):
        next(batches)
    assert_equal(run, 4)


@pytest.mark.parametrize("depth", [0, 2])
@WAYS
def test_the_program_ends_while_a_loop_is_suspended(window: bool, depth: int) -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1, window=window)
    sim = SimDevice(favour(*STREAMS, *SLOTS), direct=window)
    runner = run.runner(sim, depth)
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    # Python calls this before it waits for threads, while the stores are open.
    exit_hook._save()
    sim.drain()
    assert_equal(run, 4)
    runner.close()


class Full(SimDevice):
    """A device that has no memory of a size."""

    refused = -1

    def empty(self, nbytes: int, stream: Any) -> Any:
        if nbytes == self.refused:
            raise MemoryError("the device is full")
        return super().empty(nbytes, stream)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("refused", [11 * 16, 11 * 4], ids=["the first", "the second"])
@WAYS
def test_a_cache_that_has_no_memory(window: bool, refused: int, depth: int) -> None:
    """The error says what to lower, nothing remains, and the next loop works."""
    run = CachedRun(BATCHES, capacity=11, policy=1, window=window)
    device = Full(lazy, direct=window)
    device.refused = refused
    runner = run.runner(device, depth)
    match = "device_cache of rows needs 220 B for 11 rows .* give a smaller device_cache"
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
    """Rows in memory that fail in one write."""

    n_left = -1

    def scatter(self, rows: Any, values: Any) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise OSError("the disk is full")
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("n_left", [2, 3, 4])
@WAYS
def test_rows_in_the_cache_are_written_after_a_write_has_failed(
    window: bool, n_left: int, depth: int
) -> None:
    """Only the rows of the failed write are lost."""
    run = CachedRun(BATCHES, capacity=4, policy=2, window=window)
    sim = SimDevice(favour(*STREAMS, *SLOTS), direct=window)
    runner = run.runner(sim, depth, Failing)
    runner.source._stores[0].n_left = n_left
    n_done = 0
    cached: set[int] = set()
    with pytest.raises(OSError, match="the disk is full"):
        for i, lent in enumerate(runner.run(lambda lent: lent)):
            run.step(sim, runner, i, lent)
            n_done = i + 1
            cached = set(runner.source.cache.policy.changed_rows()[0].tolist())
            del lent
    assert 0 < n_done < len(BATCHES)
    assert cached
    for array, expected in zip(run.arrays[:2], after(n_done), strict=False):
        for row in cached:
            np.testing.assert_array_equal(array[row], expected[row])
    runner.close()


@pytest.mark.parametrize("choose", [lazy, favour("compute"), favour(*SLOTS)])
@WAYS
def test_a_flush_whose_first_part_fails(
    window: bool, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that queued copies read is not freed with the part that fails."""
    monkeypatch.setattr(row_cache, "_FLUSH_BYTES", 40)
    run = CachedRun(BATCHES, capacity=N, policy=None, window=window)
    sim = SimDevice(choose, direct=window)
    runner = run.runner(sim, 2, Failing)
    failing = runner.source._stores[0]
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    failing.n_left = 1
    with contextlib.suppress(OSError):
        runner.drain()
    assert failing.n_left <= 0
    gc.collect()
    sim.drain()
    runner.close()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
@WAYS
def test_a_flush_takes_the_memory_of_a_few_parts(
    window: bool, device: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "_FLUSH_BYTES", 40)
    run = CachedRun(BATCHES, capacity=N, policy=None, window=window)
    sim = SimDevice(DEVICES[device], direct=window)
    runner = run.runner(sim, depth)
    for i, lent in enumerate(runner.run(lambda lent: lent)):
        run.step(sim, runner, i, lent)
        del lent
        if i == 7:
            before = sim.peak_bytes = sim.allocated_bytes
            runner.drain()
            # A part has two rows of 20 bytes, and their slots.
            assert 0 < sim.peak_bytes - before <= 3 * (2 * 20 + 2 * 4)
    runner.close()


class Small(SimDevice):
    """A device that has little memory left."""

    most = 1 << 20

    def empty(self, nbytes: int, stream: Any) -> Any:
        if nbytes > self.most:
            raise MemoryError("no memory")
        return super().empty(nbytes, stream)


@pytest.mark.parametrize("depth", [0, 2])
@WAYS
def test_a_loop_that_ends_because_memory_is_missing(window: bool, depth: int) -> None:
    run = CachedRun(BATCHES, capacity=8, policy=1, window=window)
    sim = Small(favour(*STREAMS, *SLOTS), direct=window)
    runner = run.runner(sim, depth)
    batches = runner.run(lambda lent: lent)
    for i in range(6):
        run.step(sim, runner, i, next(batches))
    sim.most = 2 * D * 8
    runner.close()
    assert_equal(run, 6)


@WAYS
def test_a_flush_for_whose_values_no_memory_is_left(window: bool) -> None:
    """No staging memory is freed while the device copies from it."""
    rows = [[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 2
    expected = CachedRun(rows).synchronous().arrays
    run = CachedRun(rows, capacity=N, policy=None, window=window)
    # The stream of the steps is late.
    sim = Small(favour("read", "pinfeed-read"), direct=window)
    runner = run.runner(sim, 2)
    batches = runner.run(lambda lent: lent)
    for i in range(6):
        run.step(sim, runner, i, next(batches))
    # The slots fit, and the values only in several parts.
    sim.most = 48
    runner.close()
    for found, wanted in zip(run.arrays, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupt_before_a_write_is_queued(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes after it do not use staging memory that earlier rows are scattered from."""
    monkeypatch.setattr(row_cache, "_FLUSH_BYTES", 60)
    run = CachedRun(BATCHES, capacity=4, policy=seed)
    sim = SimDevice(favour("compute", "read", "write", "pinfeed-read", "pinfeed-write"))
    runner = run.runner(sim, 2)
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    lent = next(batches)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner._last_loop.writes, "add", interrupted)
        run.step(sim, runner, 4, lent)
    del lent
    runner.close()
    for array, before, behind in zip(run.arrays, after(4), after(5), strict=True):
        is_one = (array == before) | (array == behind)
        assert is_one.reshape(N, -1).all(axis=1).all()


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("depth", [0, 2])
@WAYS
def test_an_interrupt_of_the_last_flush(
    window: bool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impatient user loses nothing, because the loop begins the flush again."""
    n_left = 2
    copied = RowCache._copied

    def interrupted(self: RowCache, *args: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            raise KeyboardInterrupt
        return copied(self, *args)

    monkeypatch.setattr(row_cache, "_FLUSH_BYTES", 40)
    monkeypatch.setattr(RowCache, "_copied", interrupted)
    run = CachedRun(BATCHES, capacity=N, policy=None, window=window)
    sim = SimDevice(favour(*STREAMS, *SLOTS), direct=window)
    runner = run.runner(sim, depth)
    with pytest.raises(KeyboardInterrupt):
        run.loop(sim, runner)
    assert_equal(run, len(BATCHES))
    runner.close()


@WAYS
def test_an_interrupt_after_slots_are_copied(window: bool) -> None:
    """Their staging memory is kept until the device has read it."""

    class Interrupted(SimDevice):
        is_armed = False

        def copy(self, source: Any, target: Any, stream: Any) -> None:
            super().copy(source, target, stream)
            if self.is_armed and source.dtype == np.int32:
                self.is_armed = False
                raise KeyboardInterrupt

    run = CachedRun(BATCHES, capacity=N, policy=None, window=window)
    sim = Interrupted(favour("read", "pinfeed-read", "write"), direct=window)
    runner = run.runner(sim, 2)
    batches = runner.run(lambda lent: lent)
    for i in range(4):
        run.step(sim, runner, i, next(batches))
    sim.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        runner.drain()
    # The stream of the steps is late, so no other copy has waited for this one.
    runner.source.cache.close()
    gc.collect()
    sim.drain()
    runner.close()


class Interrupt:
    """Raises KeyboardInterrupt before a line of the cache is executed, once.

    Args:
        at: Number of the line among all that are executed.
    """

    files = (
        "row_cache.py",
        "cache_transfer.py",
        "row_window.py",
        "lent_batch.py",
    )

    def __init__(self, at: int) -> None:
        self.n_left = at

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *args: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        return self._line if path.name in self.files and "pinfeed" in path.parts else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # An interrupt cannot occur between the end of a block and the release of its lock.
        if event == "line" and not line.lstrip().startswith("with "):
            self.n_left -= 1
            if self.n_left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("every", [331, pytest.param(7, marks=pytest.mark.stress)])
@WAYS
def test_interrupts_leave_each_row_as_before_or_after_the_step(
    window: bool, every: int, depth: int
) -> None:
    for at in itertools.count(1, every):
        run = CachedRun(BATCHES, capacity=4, policy=1, window=window)
        sim = SimDevice(favour(*STREAMS, *SLOTS), direct=window)
        runner = run.runner(sim, depth)
        n_begun = 0
        interrupt = Interrupt(at)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            for i, lent in enumerate(runner.run(lambda lent: lent)):
                n_begun = i + 1
                run.step(sim, runner, i, lent)
        runner.close()
        states = after(max(0, n_begun - 1)), after(n_begun)
        for array, *possible in zip(run.arrays, *states, strict=True):
            is_one = np.zeros(N, bool)
            for expected in possible:
                is_one |= (array == expected).reshape(N, -1).all(axis=1)
            assert is_one.all(), f"line {at}: {np.flatnonzero(~is_one)}"
        if interrupt.n_left > 0:
            break
