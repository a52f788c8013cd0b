"""CacheTransfer: moves rows between the batches of a loop and the caches of their tables.

The consumer thread calls it. It registers the caches of a loop, and counts the rows that are found,
read and written.
"""

from __future__ import annotations

from collections.abc import Iterator

from pinfeed.devices.device import Stream, Tensor
from pinfeed.pipeline.row_cache import CachedRows, ChangedRows, RowCache, Values
from pinfeed.pipeline.sources.source import HostBatch, RowGroup
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.spans import CacheCounts
from pinfeed.stores.store import row_nbytes


class CacheTransfer:
    """Moves rows into and out of caches, for one loop at a time.

    Args:
        counters: Counters of the loop.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.caches: list[RowCache] = []
        """Caches from which the running loop has lent rows."""
        self.batch = 0
        """Number of the last batch that was lent."""

    def lend(self, batch: HostBatch, tensors: list[Tensor], number: int, compute: Stream) -> None:
        """Replace the gathered rows of groups with a cache by all rows of the batch.

        Args:
            batch: The batch.
            tensors: Tensors of all its parts; those of the groups are replaced.
            number: Number of the batch.
            compute: Stream of the consumer thread.

        Raises:
            ClosedError: If another thread closes the loop.
        """
        self.batch = number
        for g, group in enumerate(batch.groups):
            if (cached := group.cached) is None:
                continue
            if cached.cache not in self.caches:
                self.caches.append(cached.cache)
            cached.positions = tensors[cached.part]
            unread = None if batch.shared is None else batch.shared.unread[g]
            cached.n_read = len(group.rows) if unread is None else unread.n_rows
            parts = slice(group.first, group.first + len(group.stores))
            tensors[parts] = cached.cache.lend(cached, tensors[parts], compute)

    def put(self, cached: CachedRows, values: Values | None, compute: Stream) -> Values:
        """Put the values of a batch into its cache, as ``RowCache.put`` does."""
        cache = cached.cache
        is_first = not cached.has_moved
        written = cache.put(cached, values, compute)
        if is_first:
            self._counters.count_cache(
                CacheCounts(
                    cache.name,
                    self.batch,
                    len(cached.rows),
                    cached.moves.n_hits,
                    cached.n_read * cache.row_nbytes,
                )
            )
        self._count_written(cache, cached.moves.n_bypassed, written)
        return written

    def changed_rows(self, *, is_last: bool) -> Iterator[tuple[RowGroup, ChangedRows]]:
        """Yield the chunks of all caches that may differ from their stores, with their groups."""
        for cache in self.caches:
            for chunk in cache.changed_rows(is_last=is_last):
                self._count_written(cache, len(chunk.rows), chunk.values)
                yield RowGroup(chunk.rows, 0, cache.stores), chunk

    def note_flushed(self) -> None:
        """Note that all changed rows of the caches were written."""
        for cache in self.caches:
            cache.note_flushed()

    def close(self) -> None:
        """Free the caches, because the loop has ended."""
        for cache in self.caches:
            cache.close()
        self.caches = []

    def _count_written(self, cache: RowCache, n_rows: int, values: Values) -> None:
        """Count rows that are written to the stores that have values."""
        pairs = zip(cache.stores, values, strict=True)
        nbytes = [row_nbytes(store) for store, tensor in pairs if tensor is not None]
        if nbytes:
            self._counters.count_cache_write(n_rows, n_rows * sum(nbytes))
