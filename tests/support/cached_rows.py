"""Loops over rows with a cache on a simulated device."""

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from support.random_policy import random_policy
from support.schedules import next_stream, switch

from pinfeed import ArrayStore
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch, RowGroup, Source
from pinfeed.stores.host_rows import StoreRows
from pinfeed.testing import SimDevice

N, D = 12, 2
# The parts of the largest batch, and the buffer that they share.
BUFFERS: list[tuple[tuple[int, ...], str]] = [((5, D), "f8"), ((5,), "i4"), ((1024,), "u1")]


class CachedSource(Source):
    """Batches of rows of two stores with a cache, and of one store without.

    Args:
        batches: Distinct rows of each batch, ascending.
        stores: The three stores.
        cache: Cache of the first two.
        trained_stores: The stores, if the loop may run in a window; otherwise none.
    """

    fingerprint: Mapping[str, Any] = MappingProxyType({})
    trained_stores: Sequence[Any] = ()

    def __init__(
        self,
        batches: Sequence[np.ndarray],
        stores: Sequence[Any],
        cache: RowCache,
        trained_stores: Sequence[Any],
    ) -> None:
        self._batches = batches
        self._stores = stores
        self.cache = cache
        self.trained_stores = trained_stores

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int, *args: int) -> Generator[Any, None, None]:
        self.cache.begin()
        for rows in self._batches[start:]:
            yield partial(self._batch, rows, self.cache.decide(rows))

    def _batch(self, rows: np.ndarray, cached: Any) -> HostBatch:
        cached.part = 0
        gathered = cached.moves.gathered
        parts: list[Any] = [*map(ArrayPart, (cached.moves.positions, gathered, rows))]
        n = len(parts)
        parts += [StoreRows(store, gathered) for store in self._stores[:2]]
        parts.append(StoreRows(self._stores[2], rows))
        groups = [
            RowGroup(gathered, n, self._stores[:2], cached=cached, ids_part=1),
            RowGroup(rows, n + 2, self._stores[2:], ids_part=2),
        ]
        return HostBatch(parts, lambda tensors: list(tensors)[n:], [(len(rows), 0)], groups)


class CachedRun:
    """One loop that changes its rows, as a synchronous loop or with a cache.

    Args:
        batches: Distinct rows of each batch, ascending.
        capacity: Rows of the cache.
        policy: Seed of random decisions; None for those of the real policy.
        stop_after: Number of batches after which the loop is left.
        switch_after: Number of batches after which the loop changes its stream after each batch.
        switch_once: Number of batches after which the loop changes its stream for good.
        switch_in: Number of the batch in which the loop changes its stream for good, after it has
            computed new values and before it writes them back.
        switches_within: Whether each step changes its stream and then works with the batch.
        flushes: Whether some steps flush all rows.
        frozen: Whether the rows that are cached stay as they are.
        window: Whether the device reads and writes all rows itself, in a window.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        *,
        capacity: int = 5,
        policy: int | None = 0,
        stop_after: int | None = None,
        switch_after: int | None = None,
        switch_once: int | None = None,
        switch_in: int | None = None,
        switches_within: bool = False,
        flushes: bool = False,
        frozen: bool = False,
        window: bool = False,
    ) -> None:
        self.batches = [np.array(rows, np.int64) for rows in batches]
        self.capacity = capacity
        self.policy = policy
        self.stop_after = stop_after
        self.switch_after = switch_after
        self.switch_once = switch_once
        self.switch_in = switch_in
        self.switches_within = switches_within
        self.flushes = flushes
        self.frozen = frozen
        self.window = window
        self.arrays = [
            np.arange(N * D, dtype=np.float64).reshape(N, D),
            np.arange(N, dtype=np.int32),
            -np.arange(N * D, dtype=np.float64).reshape(N, D),
        ]
        self.seen: dict[Any, np.ndarray] = {}

    def changes(self, i: int) -> list[bool]:
        """Return for each store whether batch ``i`` changes it."""
        is_trained = not self.frozen and i % 7 != 5
        return [is_trained and i % 5 != 4, is_trained and i % 3 > 0, i % 4 > 0]

    def synchronous(self) -> "CachedRun":
        for i, rows in enumerate(self.batches[: self.stop_after]):
            for s, (array, changes) in enumerate(zip(self.arrays, self.changes(i), strict=True)):
                self.seen[i, s] = array[rows]
                if changes:
                    array[rows] = array[rows] * 2 + 1
                if self.flushes and i % 4 == 2:
                    # All rows are read in the middle of the step, which then continues.
                    self.seen[i, s, "flushed"] = array.copy()
                    if changes:
                        array[rows] = array[rows] * 2 + 1
        return self

    def runner(self, device: Any, depth: int, make: Any = ArrayStore) -> EpochRunner:
        stores = list(map(make, self.arrays))
        with random_policy(self.policy):
            cache = RowCache("rows", stores[:2], self.capacity, device)
        trained = stores if self.window else ()
        source = CachedSource(self.batches, stores, cache, trained)
        schedule = PrefetchSchedule(depth, n_readers=1 + depth % 2, writes=True)
        return EpochRunner(
            source,
            device,
            schedule=schedule,
            capacity=(),
            progress=False,
            timeline=False,
        )

    def fed(self, device: SimDevice, depth: int) -> "CachedRun":
        runner = self.runner(device, depth)
        self.loop(device, runner)
        # The user reads this right after the loop.
        self.arrays = [array.copy() for array in self.arrays]
        assert not runner.source.cache.tensors
        runner.close()
        del runner
        later = [device.array(shape, dtype) for shape, dtype in BUFFERS for _ in range(8)]
        for array in later:
            # The user computes this next, in memory that the loop has freed.
            device.launch(lambda a: a.fill(7), array)
        device.drain()
        assert all((array._array == 7).all() for array in later), (
            "memory written after the loop had ended"
        )
        return self

    def loop(self, device: SimDevice, runner: EpochRunner) -> None:
        for i, lent in enumerate(runner.run(lambda lent: lent)):
            self.step(device, runner, i, lent)
            if name := next_stream(i, self.switch_after, self.switch_once):
                # Only a window needs that the new stream waits, as torch requires of programs.
                (switch if self.window else SimDevice.switch)(device, name)
            if i + 1 == self.stop_after:
                break
            # Not held while the next one is made: its memory can be given out again.
            del lent

    def step(self, device: SimDevice, runner: EpochRunner, i: int, lent: Any) -> None:
        tensors = lent.take()
        if self.switches_within:
            self.switch(device, ("another", "compute")[i % 2], tensors)
            if self.flushes:
                # Then the cache has worked in this stream before it gets the batch's values.
                runner.drain()
        for s, tensor in enumerate(tensors):
            device.launch(lambda t, s=s: self.seen.__setitem__((i, s), t.copy()), tensor)
        self.change(device, i, lent, tensors)
        if self.flushes and i % 4 == 2:
            runner.drain()
            for s, array in enumerate(self.arrays):
                self.seen[i, s, "flushed"] = array.copy()
            self.change(device, i, lent, tensors)
        for tensor in () if self.window else tensors:
            # Values were copied: the user may change them at once.
            device.launch(lambda t: t.fill(-1), tensor)
        self.work(device)

    def work(self, device: SimDevice) -> None:
        """Use memory as a model does, as much as the largest batch."""
        for array in [device.array(shape, dtype) for shape, dtype in BUFFERS]:
            device.launch(lambda a: a.fill(2), array)

    def switch(self, device: SimDevice, name: str, tensors: list[Any]) -> None:
        """Change the stream as a model does: only work with the batch waits."""
        lent = device.current_stream().record()
        device.switch(name)
        self.work(device)
        device.current_stream().wait(lent)
        for tensor in tensors:
            device.share(tensor, device.current_stream())

    def change(self, device: SimDevice, i: int, lent: Any, tensors: list[Any]) -> None:
        """Change the rows of some stores in place, and write them back."""
        x, y, z = (
            tensor if changes else None
            for tensor, changes in zip(tensors, self.changes(i), strict=True)
        )
        for tensor in (x, y, z):
            if tensor is not None:
                device.launch(lambda t: np.copyto(t, t * 2 + 1), tensor)
        if i == self.switch_in:
            switch(device, "another")
            for tensor, changes in zip(tensors, self.changes(i), strict=True):
                if not changes:
                    # torch requires this of programs; pinfeed does it for values to write.
                    device.share(tensor, device.current_stream())
        if any(self.changes(i)):
            cached = None if x is None and y is None else [x, y]
            lent.write([cached, None if z is None else [z]])


def check_cached(device: SimDevice, depth: int, batches: Sequence[Any], **kwargs: Any) -> None:
    """Compare a loop with a cache with the synchronous loop without one."""
    want = CachedRun(batches, **kwargs).synchronous()
    got = CachedRun(batches, **kwargs).fed(device, depth)
    assert want.seen.keys() == got.seen.keys()
    for key, expected in want.seen.items():
        np.testing.assert_array_equal(got.seen[key], expected, str(key))
    for array, expected in zip(got.arrays, want.arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
