"""An engine that moves rows to a device equals the synchronous loop, whatever the schedule."""

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import runner_of
from support.schedules import next_stream, randomly, stalling, switch
from support.sim_engine import SimEngineDevice

import pinfeed
from pinfeed import ClosedError, Feeder
from pinfeed.native import library as native
from pinfeed.native.engine import Engine, Staged
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.engine_loop import EngineLoop
from pinfeed.testing import SimDevice, favour, lazy

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

N = 25
ACTORS = ("compute", "read", "engine")
# Rows of a few bytes, which the loop gathers at once, and rows of several pieces.
WIDTHS = {"tiny": 2, "several pieces": 9000}
CORNERS: dict[str, Callable[[], Any]] = {"lazy": lambda: lazy}
CORNERS |= {
    f"fast {'+'.join(names)}": lambda names=names: favour(*names)
    for n in (1, 2, 3)
    for names in itertools.combinations(ACTORS, n)
}
CORNERS |= {
    f"{name} stalls after {moves}": lambda name=name, moves=moves: stalling(name, moves, ())
    for name in ACTORS
    for moves in (3, 7, 12, 20)
}


class Device(SimEngineDevice):
    """A device with an engine, which may read some stores itself.

    Args:
        reached: ``"nothing"``, ``"short"`` rows of 2 bytes, the ``"others"``, or ``"all"`` rows.
    """

    def __init__(self, choose: Any, reached: str = "nothing", **options: Any) -> None:
        super().__init__(choose, has_engine=True, **options)
        self._reached = reached

    def reaches(self, source: Any) -> bool:
        return self._reached == "all" or (
            self._reached == ("short" if source.dtype.itemsize == 2 else "others")
        )


class Run:
    """Two epochs over rows on a device, and what their training steps have read.

    Args:
        device: The device.
        width: Floats of a row.
        stop_after: Number of batches after which the second epoch is left.
        switch_after: Number of batches after which the loop changes its stream after each batch.
    """

    def __init__(
        self,
        device: SimDevice,
        width: int,
        *,
        stop_after: int | None = None,
        switch_after: int | None = None,
        **options: Any,
    ) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        x = np.arange(N * width, dtype=np.float32).reshape(N, width)
        source = {"x": x, "y": np.arange(N, dtype=np.int16)}
        with Feeder(source, device=device, **{"shuffle": True} | options) as feeder:
            for epoch in range(2):
                for i, batch in enumerate(feeder):
                    device.launch(self.read, batch["x"], batch["y"])
                    # A model has memory of its own.
                    for nbytes in (4, 8, 24):
                        device.launch(lambda a: a.fill(0xCD), device.array((nbytes,), np.uint8))
                    if (name := next_stream(i, switch_after, None)) is not None:
                        switch(device, name)
                    del batch
                    if epoch and i + 1 == stop_after:
                        break
            self.is_moved_by_engine = isinstance(runner_of(feeder)._last_loop, EngineLoop)
        del feeder
        gc.collect(0)
        # The loop has ended, so later work may take all memory that it has freed.
        free = [
            (device.stream(name), block) for name in device._free for block in device._free[name]
        ]
        for stream, block in free:
            stream._enqueue(functools.partial(block.fill, 0xAB))
        device.drain()
        self.is_memory_untouched = all((block == 0xAB).all() for _, block in free)

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        self.seen.append((x.copy(), y.copy()))

    def equals(self, other: "Run") -> bool:
        return len(self.seen) == len(other.seen) and all(
            np.array_equal(a, c) and np.array_equal(b, d)
            for (a, b), (c, d) in zip(self.seen, other.seen, strict=True)
        )


def expected(width: int, **options: Any) -> Run:
    run = Run(SimDevice(), width, **options | {"depth": 0})
    assert not run.is_moved_by_engine
    return run


LOOPS = [
    {"width": width, "depth": depth, "batch_size": batch_size, **end}
    for width, depth, batch_size, end in itertools.product(
        WIDTHS.values(), (0, 1, 2, None), (1, 3), ({}, {"stop_after": 2}, {"switch_after": 1})
    )
]
REACHED = ("nothing", "short", "others", "all")


@pytest.mark.sweep(13)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("options", LOOPS, ids=str)
def test_batches_equal_those_of_the_synchronous_loop(options: dict[str, Any], reached: str) -> None:
    want = expected(**options)
    for name, corner in CORNERS.items():
        run = Run(Device(corner(), reached), **options)
        assert run.is_moved_by_engine
        assert run.equals(want), name
        assert run.is_memory_untouched, name


@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 2, 700, 9000]),
    depth=st.sampled_from([0, 1, 2, 3, 5, None]),
    batch_size=st.integers(1, 9),
    stop_after=st.one_of(st.none(), st.integers(1, 4)),
    switch_after=st.one_of(st.none(), st.integers(1, 4)),
    shuffle=st.booleans(),
    reached=st.sampled_from(REACHED),
)
def test_a_random_schedule_changes_nothing(
    seed: int, width: int, reached: str, **options: Any
) -> None:
    run = Run(Device(randomly(seed), reached), width, **options)
    assert run.is_moved_by_engine
    assert run.equals(expected(width, **options))
    assert run.is_memory_untouched


@pytest.mark.parametrize("reached", ["nothing", "all"])
@pytest.mark.parametrize("hazard", [1, 2, 4])
def test_each_wait_is_needed(hazard: int, reached: str) -> None:
    for options, corner in itertools.product(LOOPS, CORNERS.values()):
        device = Device(corner(), reached, deaf_to=("engine.c", hazard))
        try:
            run = Run(device, **options)
        except AssertionError:
            return
        if not run.equals(expected(**options)) or not run.is_memory_untouched:
            return
    pytest.fail(f"no schedule notices that the waits of hazard ({hazard}) are missing")


@pytest.mark.parametrize("n_done", range(16))
def test_row_indices_are_kept_for_the_stream_that_waits_for_them(n_done: int) -> None:
    device = Device(favour("compute"), "others")
    # No part is small enough to share memory with the row indices.
    x = np.arange(40 * 9000.0).reshape(40, 9000)
    source = {"x": x, "y": np.zeros((40, 9000), np.int16)}
    seen: list[np.ndarray] = []
    with Feeder(source, batch_size=4, shuffle=True, depth=2, device=device) as feeder:
        batches = iter(feeder)
        next(batches)
        # The program works in two streams that it does not order.
        device.switch("another")
        for _ in range(3):
            batch = next(batches)
            device.launch(lambda x: seen.append(x.copy()), batch["x"])
        device.switch("compute")
        for _ in range(n_done):
            device.stream("read")._advance()
        own = [device.array((32,), np.uint8) for _ in range(8)]
        for array in own:
            device.launch(lambda a: a.fill(0), array)
        device.drain()
    order = pinfeed.rows.shuffled().bind(40, 0)(np.arange(40))
    assert np.array_equal(np.concatenate(seen), x[order[4:16]])


@pytest.mark.parametrize("is_deaf", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_no_copy_writes_after_the_engine_was_shut_down(is_late: bool, is_deaf: bool) -> None:
    device = SimEngineDevice(lazy, has_engine=True, deaf_to=("engine.c", 9) if is_deaf else None)
    array = np.ones((50, 100))
    rows = np.arange(50)
    source = MemoryRows.of_array(array)
    assert source is not None
    assert device.engine_driver is not None
    memory = device.empty(array.nbytes, device.current_stream())
    slots = [device.staging(array.nbytes) for _ in range(2)]
    staged = Staged(
        device.engine_driver, device.stream("read").handle, [s.ctypes.data for s in slots], 1, slots
    )
    engine = Engine([source], n_threads=1, n_jobs=2, ring_at=1, bypass=False, staged=staged)
    compute = device.current_stream().handle
    addresses = [memory.contents.ctypes.data]
    job = engine.submit(rows.ctypes.data, 50, [0], memory, addresses, compute)
    if is_late:
        # As if another thread shut the engine down now.
        engine.shutdown()
    engine.gather(job)
    engine.shutdown()
    # Nobody has waited for the job, so the program may use its memory for something else.
    memory.contents.fill(0xAB)
    device.drain()
    assert (memory.contents == 0xAB).all() != is_deaf


def test_an_engine_that_is_shut_down_meanwhile_takes_no_job() -> None:
    source = MemoryRows.of_array(np.ones((5, 2)))
    assert source is not None
    engine = Engine([source], n_threads=1, n_jobs=2, ring_at=1, bypass=False)
    rows, out = np.arange(5), np.empty((5, 2))

    def outs() -> Iterator[int]:
        engine.shutdown()
        yield out.ctypes.data

    with pytest.raises(ClosedError):
        engine.submit(rows.ctypes.data, 5, outs(), out)
