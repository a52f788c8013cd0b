"""A prefetching feeder equals the synchronous loop, whatever the device's schedule."""

import gc
import itertools
import linecache
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import mover_of, runner_of
from support.schedules import (
    SLOTS,
    STREAMS,
    corners,
    next_stream,
    randomly,
    sharing_function,
    switch,
)

from pinfeed import ArrayStore, Feeder
from pinfeed.devices import layout
from pinfeed.errors import ClosedError
from pinfeed.testing import SimDevice, favour, lazy

N, D = 12, 2
FIXED = [
    np.array(r)
    for r in ([0, 2, 1], [3, 5, 4, 6, 7], [2, 1], [9, 8], [9, 2, 0], [1], [10, 11], [9, 8, 1])
]
GROWING = [np.array(r) for r in ([0], [1], [0], [1], [3], [3, 4, 5, 6, 7], [2, 1], [8, 9, 5, 4, 0])]
# The parts of the largest batch, and the memory that they share with positions and row indices.
BUFFERS: list[tuple[tuple[int, ...], str]] = [
    ((5, D), "f8"),
    ((5,), "i4"),
    *(((nbytes,), "u1") for nbytes in (1024, 1536, 2048)),
]
CORNERS = corners(dict.fromkeys(("compute", "read"), (5, 9, 14, 20, 27, 35)))


class Run:
    """One loop that changes its rows, as a synchronous loop or on a feeder.

    Args:
        batches: Rows of each batch.
        stop_after: Number of batches after which the loop is left.
        switch_after: Number of batches after which the loop changes its stream after each batch.
        switch_once: Number of batches after which the loop changes its stream for good.
        switch_in: Number of the batch in which the loop changes its stream for good, after it has
            computed new values and before it writes them back.
        timeline: Whether the feeder has a timeline.
    """

    def __init__(
        self,
        batches: list[np.ndarray],
        stop_after: int | None = None,
        switch_after: int | None = None,
        switch_once: int | None = None,
        switch_in: int | None = None,
        timeline: bool = False,
    ) -> None:
        self.batches = batches
        self.stop_after = stop_after
        self.switch_after = switch_after
        self.switch_once = switch_once
        self.switch_in = switch_in
        self.timeline = timeline
        self.x = np.arange(N * D, dtype=np.float64).reshape(N, D)
        self.y = np.arange(N, dtype=np.int32)
        self.seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def synchronous(self) -> "Run":
        for i, rows in enumerate(self.batches[: self.stop_after]):
            self.seen[i] = self.x[rows], self.y[rows]
            if i % 5 != 4:
                self.x[rows] = self.x[rows] * 2 + 1
            if i % 3:
                self.y[rows] += 1
        return self

    def fed(self, device: SimDevice, depth: int, known: bool = True) -> "Run":
        """Run the loop on a feeder; with ``known=False`` it cannot know the sizes of batches."""
        rows: Any = self.batches if known else Unsized(self.batches)
        stores = (ArrayStore(self.x), {"y": ArrayStore(self.y)})
        with Feeder(
            stores, rows=rows, depth=depth, device=device, timeline=self.timeline
        ) as feeder:
            for i, batch in enumerate(feeder.batches()):
                self.step(device, i, batch)
                if i + 1 == self.stop_after:
                    break
                if name := next_stream(i, self.switch_after, self.switch_once):
                    device.switch(name)
                # The batch is not held while the next one is made, so its memory can be reused.
                del batch
                if self.switch_after is not None:
                    # Also in the stream for which it was allocated.
                    self.use_memory(device)
        # The user reads this right after the loop.
        self.x, self.y = self.x.copy(), self.y.copy()
        del feeder, stores
        later = [device.array(shape, dtype) for shape, dtype in BUFFERS for _ in range(8)]
        for array in later:
            # The user computes this next, in memory that the loop has freed.
            device.launch(lambda a: a.fill(7), array)
        device.drain()
        assert all((array._array == 7).all() for array in later), (
            "memory written after the loop had ended"
        )
        return self

    def step(self, device: SimDevice, i: int, batch: Any) -> None:
        x, y = batch.data[0], batch.data[1]["y"]
        device.launch(lambda x, y: self.seen.__setitem__(i, (x.copy(), y.copy())), x, y)
        new_x = new_y = None
        if i % 5 != 4:
            # In place, or a new array.
            new_x = x if i % 2 else device.array(x.shape, x.dtype)
            device.launch(lambda x, new: np.copyto(new, x * 2 + 1), x, new_x)
        if i % 3:
            new_y = y
            device.launch(lambda y: np.copyto(y, y + 1), y)
        if i == self.switch_in:
            switch(device, "another")
        if new_x is not None or new_y is not None:
            batch.write_back((new_x, {"y": new_y}))
        for array in (new_x, new_y):
            if array is not None:
                # Values were copied: the user may change them at once.
                device.launch(lambda a: a.fill(-1), array)
        if i == self.switch_in:
            del x, y, new_x, new_y, array
            # The program goes on in the earlier stream, too.
            device.switch("compute")
            self.use_memory(device)
            device.switch("another")
        self.use_memory(device)

    def use_memory(self, device: SimDevice) -> None:
        """Use as much memory as the largest batch, as a model does in between."""
        for array in (device.array(shape, dtype) for shape, dtype in BUFFERS):
            device.launch(lambda a: a.fill(2), array)


class Unsized:
    """Batches whose sizes, and number, are not known in advance."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


def check(
    device: SimDevice,
    depth: int,
    batches: list[np.ndarray] | None = None,
    *,
    known: bool = True,
    **kwargs: Any,
) -> None:
    if batches is None:
        batches = FIXED if known else GROWING
    want, got = (
        Run(batches, **kwargs).synchronous(),
        Run(batches, **kwargs).fed(device, depth, known),
    )
    assert want.seen.keys() == got.seen.keys()
    for i, (x, y) in want.seen.items():
        np.testing.assert_array_equal(got.seen[i][0], x)
        np.testing.assert_array_equal(got.seen[i][1], y)
    np.testing.assert_array_equal(got.x, want.x)
    np.testing.assert_array_equal(got.y, want.y)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("stop_after", [None, 3])
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str, stop_after: int | None, direct: bool) -> None:
    # A loop that is left early is the same for all depths except 0 and those that it fills.
    for depth in (1, 2, 4) if stop_after is None else (0, 2):
        device = SimDevice(CORNERS[corner](), direct=direct)
        check(device, depth, stop_after=stop_after)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(200))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    batches = [np.array(rng.sample(range(N), rng.randint(1, 5))) for _ in range(8)]
    device = SimDevice(randomly(seed), direct=rng.random() < 0.5)
    known, switch_after = rng.random() < 0.5, rng.choice([None, 1, 3])
    check(
        device,
        rng.randint(0, 4),
        batches,
        known=known,
        switch_after=switch_after,
        switch_once=rng.choice([None, 1, 2]),
        switch_in=rng.choice([None, 1, 3]),
        timeline=rng.random() < 0.3,
    )


row_batches = st.lists(
    st.lists(st.integers(0, N - 1), min_size=1, max_size=5, unique=True).map(np.array),
    min_size=1,
    max_size=8,
)


@given(
    st.lists(st.integers(0, 5), max_size=300),
    row_batches,
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=100)
def test_any_schedule(
    moves: list[int], batches: list[np.ndarray], depth: int, direct: bool, known: bool
) -> None:
    coming = iter(moves)

    def choose(ready: Any) -> str | None:
        return next(iter([None, *ready][next(coming, 0) :]), None)

    check(SimDevice(choose, direct=direct), depth, batches, known=known)


VARIANTS: list[tuple[bool, dict[str, Any]]] = [
    (direct, kwargs)
    for direct in (False, True)
    for kwargs in (
        {},
        {"stop_after": 3},
        {"known": False},
        {"switch_after": 2},
        {"switch_once": 1},
    )
]


def synchronisations() -> list[tuple[str, int]]:
    """Return every call site of wait and sync."""
    sites: set[tuple[str, int]] = set()
    for direct, kwargs in VARIANTS:
        device = SimDevice(lazy, direct=direct)
        check(device, 2, **kwargs)
        sites |= device.sites
    return sorted(sites)


def test_a_timeline_waits_for_nothing() -> None:
    """The calls of wait and sync are the same with and without a timeline."""
    sites = []
    for timeline in (False, True):
        device = SimDevice(lazy)
        check(device, 2, timeline=timeline)
        sites.append(device.sites)
    assert sites[0] == sites[1]


@pytest.mark.parametrize(
    "site", synchronisations(), ids=lambda s: linecache.getline(*s).split("#")[0].strip()
)
def test_every_synchronisation_is_needed(site: tuple[str, int]) -> None:
    """A device that ignores one of them gives wrong results or uses freed memory in a schedule."""
    known = ("transfer.py", "batch_copies.py")
    assert site[0].endswith(known), f"a wait or sync outside of {known}"
    devices = (
        (SimDevice(choose(), direct=direct, deaf_to=site), kwargs)
        for choose in CORNERS.values()
        for direct, kwargs in VARIANTS
    )
    assert any(fails(device, kwargs) for device, kwargs in devices)


@pytest.mark.parametrize(
    ("caller", "kwargs"),
    [
        ("lend", [{"switch_after": 1}, {"switch_after": 2}]),
        ("capture_values", [{"switch_in": 0}, {"switch_in": 6, "known": False}]),
    ],
    ids=["a batch", "new values"],
)
def test_memory_used_in_another_stream_must_be_shared_with_it(
    caller: str, kwargs: list[dict[str, Any]]
) -> None:
    """The allocator does not know the streams a consumer switches to, and would free too early."""

    class Forgetful(SimDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            if sharing_function() != caller:
                super().share(tensor, stream)

    # The copies of a batch are queued up to three requests before, and streams alternate.
    every = itertools.product(CORNERS.values(), kwargs)
    assert any(fails(Forgetful(choose()), options, depth=3) for choose, options in every)


def fails(device: SimDevice, kwargs: dict[str, Any], depth: int = 2) -> bool:
    try:
        check(device, depth, **kwargs)
    except AssertionError:
        return True
    return False


def test_a_write_back_that_fails_half_way_leaves_nothing_queued() -> None:
    """Memory for the second store is refused while the copy of the first one is queued.

    The staging memory of that copy is freed with the feeder.
    """

    class Full(SimDevice):
        refuse = 8

        def staging(self, nbytes: int) -> Any:
            self.refuse -= 1
            if self.refuse == 0:
                raise MemoryError
            return super().staging(nbytes)

    # Three slots of two stores take six, and the write-back two more.
    device = Full(lazy)
    run = Run(FIXED)
    with pytest.raises(MemoryError):
        run.fed(device, 2)
    del run
    gc.collect()
    device.drain()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_loop_that_drops_its_batches_stays_within_the_plan(depth: int) -> None:
    device = SimDevice(favour(*STREAMS, *SLOTS))
    x = np.zeros((64, 16))
    with Feeder(ArrayStore(x), batch_size=4, depth=depth, device=device) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
            del batch
        assert device.peak_bytes <= feeder.plan.device_bytes
    x.flags.writeable = False
    device = SimDevice(favour(*STREAMS, *SLOTS))
    with Feeder(ArrayStore(x), batch_size=4, depth=depth, device=device) as feeder:
        for _ in feeder:
            pass
    assert device.peak_bytes <= (depth + 2) * 4 * 16 * 8 <= feeder.plan.device_bytes


@pytest.mark.parametrize("corner", CORNERS)
def test_copies_end_before_memory_of_a_failed_slot_is_freed(
    corner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device refuses the second of two copies of a slot.

    Memory of the first one may be the user's next array otherwise.
    """

    # Each part has memory of its own.
    monkeypatch.setattr(layout, "SMALL_NBYTES", 64)

    class Refusing(SimDevice):
        def copy(self, src: Any, dst: Any, stream: Any) -> None:
            if isinstance(src, np.ndarray) and 0xFF in src.view(np.uint8):
                raise RuntimeError("the copy is refused")
            super().copy(src, dst, stream)

    device = Refusing(CORNERS[corner]())
    size = 4
    n_good = 8
    x, y = np.arange(64 * size, dtype=np.float64), np.zeros(64 * size, np.int32)
    y[11 * size] = -1
    seen: dict[int, np.ndarray] = {}
    own: list[Any] = []
    with Feeder((ArrayStore(x), ArrayStore(y)), batch_size=size, device=device) as feeder:
        # Each of eight batches; the rows of the second one are refused.
        assert runner_of(feeder)._schedule.n_slots == 4
        sizes = [n * size * 8 for n in (1, 3, 8)]
        with pytest.raises(RuntimeError, match="the copy is refused"):
            for i, (batch, _) in enumerate(feeder):
                device.launch(lambda x, i=i: seen.__setitem__(i, x.copy()), batch)
                del batch, _
                for nbytes in sizes:
                    own.append(device.array((nbytes,), "u1"))
                    device.launch(lambda a: a.fill(7), own[-1])
    device.drain()
    assert sorted(seen) == list(range(n_good))
    assert all((seen[i] == x[i * size : (i + 1) * size]).all() for i in seen)
    assert all((array._array == 7).all() for array in own), "memory written after it was freed"


@pytest.mark.parametrize("writes", [False, True])
def test_copies_queued_while_another_thread_ends_the_loop(writes: bool) -> None:
    """The memory of these copies is freed as soon as the loop learns that it has ended."""

    class Ending(SimDevice):
        end: Any = None

        def copy(self, src: Any, dst: Any, stream: Any) -> None:
            if self.end is not None and stream.name == ("write" if writes else "read"):
                end, self.end = self.end, None
                end()
            super().copy(src, dst, stream)

    device = Ending(lazy)
    feeder = Feeder(ArrayStore(np.zeros((N, 2))), rows=FIXED, depth=2, device=device)
    loop = iter(feeder.batches())

    def end() -> None:
        runner_of(feeder)._last_loop.end()
        mover_of(feeder).close()

    with pytest.raises(ClosedError):
        for i in range(3):
            batch = next(loop)
            if i == 1:
                device.end = end
            if writes:
                batch.write_back(batch.data)
            del batch
    del loop
    feeder.close()
    gc.collect()
    # Queued copies of freed host memory are an error.
    device.drain()
