"""CacheHint: which tables of a loop would gain from a cache on the device, and of which size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinfeed.memory.units import human
from pinfeed.pipeline.sources.base import RowGroup
from pinfeed.stores import ArrayStore, Store
from pinfeed.stores.base import row_nbytes
from pinfeed.training.embeddings.reuse_sketch import CacheSize, ReuseSketch

# The hint names the tables for which a cache saves most.
_MOST_TABLES = 2


class CacheHint:
    """The look-ups of tables that have no cache, and a hint at the caches that would serve them.

    Reader threads note look-ups; the training thread asks for the hint.

    Args:
        tables: Name and stores of each table, in the order of the groups of a batch; None for a
            table that needs no hint.
    """

    def __init__(self, tables: Iterable[tuple[str, Sequence[Store]] | None] = ()) -> None:
        self._tables = [table and _TableReuse.of(*table) for table in tables]

    def begin_epoch(self) -> None:
        """Note that an epoch begins, at whose start every cache is empty."""
        for table in filter(None, self._tables):
            table.sketch.begin_epoch()

    def add(self, groups: Iterable[RowGroup]) -> None:
        """Note the rows that a batch looks up, one group for each table."""
        for table, group in zip(self._tables, groups, strict=False):
            if table is not None:
                table.sketch.add(group.rows)

    def text(self) -> str:
        """Return sentences that say which caches would help; empty if none would."""
        sizes = [(table, table.sketch.best_size()) for table in filter(None, self._tables)]
        useful = [(table, size) for table, size in sizes if size is not None]
        useful.sort(key=lambda pair: pair[0].saved_bytes(pair[1]), reverse=True)
        return " ".join(table.sentence(size) for table, size in useful[:_MOST_TABLES])


def gains_from_cache(stores: Iterable[Store], *, is_unified: bool) -> bool:
    """Tell whether a cache on the device can be faster than the stores of a table.

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
        """Return a table none of whose look-ups were seen."""
        return cls(name, stores, ReuseSketch(stores[0].n_rows))

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with its state."""
        return sum(map(row_nbytes, self.stores))

    def saved_bytes(self, size: CacheSize) -> float:
        """Return the bytes of a batch that a cache would serve."""
        return size.hit_rate * self.sketch.rows_per_batch * self.row_nbytes

    def sentence(self, size: CacheSize) -> str:
        """Say how large the cache is, and what it serves."""
        nbytes = human(size.share * self.stores[0].n_rows * self.row_nbytes)
        state = " with their state" if len(self.stores) > 1 else ""
        return (
            f"{size.share:.0%} of the rows of {self.name} ({nbytes}{state}) would serve "
            f"{size.hit_rate:.0%} of its look-ups from the device: give "
            f"HostEmbedding(device_cache={size.share:g})."
        )
