"""CacheHint: names tables of a loop that would be faster with a device cache, and its size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinfeed.memory.units import human
from pinfeed.pipeline.sources.base import RowGroup
from pinfeed.stores import ArrayStore, Store
from pinfeed.stores.store import row_nbytes
from pinfeed.training.embeddings.reuse_sketch import CacheSize, ReuseSketch

# The hint names the tables for which a cache saves most.
_MOST_TABLES = 2


class CacheHint:
    """Records lookups of tables without a cache, and recommends caches for these tables.

    Reader threads record lookups. The consumer thread requests the hint.

    Args:
        tables: Name and stores of each table, in the order of the groups of a batch, or None for a
            table that needs no hint.
    """

    def __init__(self, tables: Iterable[tuple[str, Sequence[Store]] | None] = ()) -> None:
        self._tables = [table and _TableReuse.of(*table) for table in tables]

    def begin_epoch(self) -> None:
        """Note that an epoch begins. Every cache is empty at its start."""
        for table in filter(None, self._tables):
            table.sketch.begin_epoch()

    def add(self, groups: Iterable[RowGroup]) -> None:
        """Record the rows that a batch looks up, with one group for each table."""
        for table, group in zip(self._tables, groups, strict=False):
            if table is not None:
                table.sketch.add(group.rows)

    def text(self) -> str:
        """Return sentences that name useful caches; empty if no cache would help."""
        sizes = [(table, table.sketch.best_size()) for table in filter(None, self._tables)]
        useful = [(table, size) for table, size in sizes if size is not None]
        useful.sort(key=lambda pair: pair[0].saved_bytes(pair[1]), reverse=True)
        return " ".join(table.sentence(size) for table, size in useful[:_MOST_TABLES])


def gains_from_cache(stores: Iterable[Store], *, is_unified: bool) -> bool:
    """Return whether a cache on the device can be faster than the stores of a table.

    Args:
        stores: Stores of the weights and their state.
        is_unified: Whether the device is the CPU, which reads rows in memory as fast as a cache.
    """
    return not (is_unified and all(isinstance(store, ArrayStore) for store in stores))


class _TableReuse(NamedTuple):
    name: str
    stores: Sequence[Store]
    sketch: ReuseSketch

    @classmethod
    def of(cls, name: str, stores: Sequence[Store]) -> _TableReuse:
        """Return a table without recorded lookups."""
        return cls(name, stores, ReuseSketch(stores[0].n_rows))

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with its state."""
        return sum(map(row_nbytes, self.stores))

    def saved_bytes(self, size: CacheSize) -> float:
        """Return the bytes of a batch that a cache would serve."""
        return size.hit_rate * self.sketch.rows_per_batch * self.row_nbytes

    def sentence(self, size: CacheSize) -> str:
        """Return a sentence with the size of the cache and its hit rate."""
        nbytes = human(size.share * self.stores[0].n_rows * self.row_nbytes)
        state = " with their state" if len(self.stores) > 1 else ""
        return (
            f"A device cache with {size.share:.0%} of the rows of {self.name} ({nbytes}{state}) "
            f"would serve {size.hit_rate:.0%} of its lookups: use "
            f"HostEmbedding(device_cache={size.share:g})."
        )
