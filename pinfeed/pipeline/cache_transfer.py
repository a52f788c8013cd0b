"""CacheTransfer: moves rows between batches and the caches of their tables, in the right order.

The consumer thread queues all work on a cache in its current stream. So each batch sees the rows as
the earlier batches have left them, without any wait. One wait is needed if the user changes the
current stream between two batches:

    (10) work on the cache may not be done yet, in another stream

Evicted rows, and the rows that a flush writes, are copied first. ``transfer.py`` writes the copies
back like other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from pinfeed.devices.device import Device, Stream, Tensor
from pinfeed.pipeline.forwarding import Positions
from pinfeed.pipeline.row_cache.cache import RowCache
from pinfeed.pipeline.row_cache.decisions import CachedRows
from pinfeed.pipeline.sources.source import RowGroup
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.timeline import CacheCounts
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import row_nbytes

# Bytes of each write when the rows of a cache are written back. Several threads share a write.
_FLUSH_BYTES = 16 << 20


class ChangedRows(NamedTuple):
    """Some rows of a cache that may differ from their stores."""

    batch: int
    """Number of the last batch that was lent."""
    rows: Rows
    values: list[Tensor | None]
    """Values of the rows for each store; None for a store that the loop has not changed."""
    staged: npt.NDArray[Any] | None = None
    """Staging memory that the device may read until the values are computed."""


class CacheTransfer:
    """Moves rows into and out of caches, for one loop at a time; the consumer thread calls it.

    Args:
        device: Device of the caches.
        counters: Counters of the rows that are found, read and written.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self._device = device
        self._counters = counters
        self.caches: list[RowCache] = []
        """Caches from which the running loop has lent rows."""
        self._batch = 0

    def lend(
        self,
        group: RowGroup,
        cached: CachedRows,
        tensors: list[Tensor],
        batch: int,
        compute: Stream,
    ) -> None:
        """Replace the gathered rows of a group by all rows of the batch.

        Args:
            group: The group.
            cached: Its rows in the cache.
            tensors: Tensors of all parts of the batch; those of the group are replaced.
            batch: Number of the batch.
            compute: Stream of the consumer thread.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        cache = cached.cache
        if cache not in self.caches:
            self.caches.append(cache)
        self._batch = batch
        cached.positions = tensors[cached.part]
        parts = slice(group.first, group.first + len(group.stores))
        with cache.moving:
            cache.require_open()
            self._follow(cache, compute)
            cached.stream = compute
            tensors[parts] = cache.lend(cached, tensors[parts])

    def put(
        self, cached: CachedRows, values: Sequence[Tensor | None] | None, compute: Stream
    ) -> list[Tensor | None]:
        """Put the values of a batch into its cache.

        Args:
            cached: The rows of the batch.
            values: Their values for each store; None leaves one store, or all stores, unchanged.
            compute: Stream of the consumer thread.

        Returns:
            Values of ``cached.written`` for each store; None for a store that is not changed.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        cache = cached.cache
        is_first = not cached.has_moved
        with cache.moving:
            cache.require_open()
            self._follow(cache, compute)
            if compute != cached.stream:
                for tensor in cached.tensors:
                    self._device.share(tensor, compute)
                cached.stream = compute
            written = cache.put(cached, values)
        if is_first:
            self._counters.count_cache(
                CacheCounts(
                    cache.name,
                    self._batch,
                    len(cached.rows),
                    len(cached.moves.hits),
                    cached.n_evicted,
                    cached.n_gathered * cache.row_nbytes,
                )
            )
        self._count_written(cache, cached.n_bypassed + cached.n_evicted, written)
        return written

    def all_changed_rows(self, *, is_last: bool) -> Iterator[tuple[RowGroup, ChangedRows]]:
        """Yield the chunks of ``changed_rows`` of all caches, each with the group to write."""
        for cache in self.caches:
            for chunk in self.changed_rows(cache, is_last=is_last):
                yield RowGroup(chunk.rows, 0, cache.stores), chunk

    def changed_rows(self, cache: RowCache, *, is_last: bool) -> Iterator[ChangedRows]:
        """Yield copies of all rows in a cache that may differ from their stores, in chunks.

        Args:
            cache: The cache.
            is_last: Whether the loop is ending, after which no row may change.
        """
        if is_last:
            cache.seal()
        if not cache.has_changed:
            return
        leaving = cache.leaving
        if leaving is not None and leaving.evicted_values and leaving.n_evicted:
            yield self._evicted(cache, leaving)
        rows, slots = cache.decisions.changed_rows()
        step = max(1, _FLUSH_BYTES // cache.row_nbytes)
        begin = 0
        while begin < len(rows):
            chunk = slice(begin, begin + step)
            try:
                copied = self._copied(cache, rows[chunk], slots[chunk])
            except (MemoryError, RuntimeError):
                # A loop that ends because memory is exhausted leaves little for the copies.
                if step == 1:
                    raise
                step //= 2
                continue
            begin += step
            yield copied

    def note_flushed(self) -> None:
        """Note that all changed rows of the caches were written."""
        for cache in self.caches:
            cache.note_flushed()

    def close(self) -> None:
        """Free the caches, because the loop has ended."""
        for cache in self.caches:
            cache.close()
        self.caches = []

    def _evicted(self, cache: RowCache, leaving: CachedRows) -> ChangedRows:
        """Return the last evicted rows, which may not have been queued for writing."""
        with cache.moving:
            self._follow(cache, self._device.current_stream())
        values = cache.evicted_values(leaving)
        self._count_written(cache, leaving.n_evicted, values)
        return ChangedRows(self._batch, leaving.moves.evicted_rows, values)

    def _copied(self, cache: RowCache, rows: Rows, slots: Positions) -> ChangedRows:
        """Return a copy of some rows of a cache."""
        device = self._device
        compute = device.current_stream()
        with cache.moving:
            self._follow(cache, compute)
            staged = device.staging(slots.nbytes).view(slots.dtype)
            staged[...] = slots
            memory = device.empty(slots.nbytes, compute)
            on_device = device.tensor(memory, slots.shape, slots.dtype)
            device.copy(staged, on_device, compute)
            values = cache.values(on_device, len(rows))
        self._count_written(cache, len(rows), values)
        return ChangedRows(self._batch, rows, values, staged)

    def _follow(self, cache: RowCache, compute: Stream) -> None:
        """Queue further work on a cache in ``compute``, after the work in its previous stream."""
        if cache.stream is not None and compute != cache.stream:
            compute.wait(cache.stream.record())  # work on the cache may not be done yet
            for tensor in cache.tensors:
                self._device.share(tensor, compute)
        cache.stream = compute

    def _count_written(self, cache: RowCache, n_rows: int, values: Sequence[Tensor | None]) -> None:
        """Count rows that are written to the stores that have values."""
        pairs = zip(cache.stores, values, strict=True)
        nbytes = [row_nbytes(store) for store, tensor in pairs if tensor is not None]
        if nbytes:
            self._counters.count_cache_write(n_rows, n_rows * sum(nbytes))
