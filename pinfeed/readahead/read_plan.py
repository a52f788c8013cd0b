"""ReadPlan: the strategies that read the rows of all stores, and how they are chosen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.buffers import BufferedReadahead, PageCacheReadahead
from pinfeed.readahead.item_reads import AxisWindowReads, RaggedReads
from pinfeed.readahead.resident_file import CopyInSecondEpoch, InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import (
    FreeMemory,
    Reads,
    reads_of_items,
    reads_of_rows,
)
from pinfeed.readahead.strategy import ChunkReads, DirectReads, ReadStrategy
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore

STRATEGIES: tuple[type[ReadStrategy], ...] = (
    MappedFile,
    CopyInSecondEpoch,
    InMemoryCopy,
    BufferedReadahead,
    PageCacheReadahead,
    ChunkReads,
    DirectReads,
)
"""Strategies for the rows of a file; the first one whose ``plan`` returns one reads them."""

# Sources that are read alike have one note each if they are at most this many.
_MOST_NOTES = 4
_N_NAMED = 3


@dataclass(frozen=True)
class ReadPlan:
    """Read strategies of all stores."""

    strategies: Sequence[ReadStrategy]
    notes: tuple[str, ...]
    """Sentences with the strategy for each file, and the reason for it; see ``notes_of``."""
    ragged: Sequence[RaggedReads] = ()
    """Method of reading the rows of each ragged store."""
    resident: tuple[Allocation, ...] = ()
    """Memory of the stores in addition to their rows, if it is not counted elsewhere."""

    @property
    def items(self) -> tuple[Allocation, ...]:
        """Most memory that the strategies use."""
        found = [one.items for one in self._all]
        return self.resident + tuple(itertools.chain.from_iterable(found))

    @property
    def closes(self) -> list[Callable[[], None]]:
        """Functions that free the memory of each strategy."""
        return [one.close for one in self._all]

    @property
    def _all(self) -> list[ReadStrategy | RaggedReads]:
        return [*self.strategies, *self.ragged]


def plan_reads(
    stores: Sequence[Store],
    order: Any,
    n_batch_rows: int,
    free: FreeMemory,
    ragged: Sequence[RaggedStore] = (),
) -> ReadPlan:
    """Choose a strategy for each store.

    Args:
        stores: Stores with the same number of rows.
        order: An order, or any other iterable of row indices or batches.
        n_batch_rows: Rows of all batches that are read at the same time.
        free: Memory that may be used for rows of files.
        ragged: Stores of ragged rows.
    """
    row_reads = [reads_of_rows(store, stores, order, n_batch_rows) for store in stores]
    # Rows are sorted or packed within windows, which follow each other as in the order.
    order = order.order if isinstance(order, LengthBatches) else order
    item_reads = [
        [reads_of_items(one, part, order, n_batch_rows) for part in one.parts] for one in ragged
    ]
    planner = _FilePlanner(free, [*row_reads, *itertools.chain.from_iterable(item_reads)])
    strategies = [
        planner.strategy(store, reads) for store, reads in zip(stores, row_reads, strict=True)
    ]
    of_ragged = [
        RaggedReads(one, list(map(planner.strategy, one.parts, of_parts)))
        for one, of_parts in zip(ragged, item_reads, strict=True)
    ]
    return ReadPlan(strategies, notes_of(planner.notes), of_ragged)


class _FilePlanner:
    """Chooses a strategy for one file after the other, each of which leaves memory to the others.

    Args:
        free: Memory for all files.
        reads: The reads of each file; None for rows that are not in files.
    """

    def __init__(self, free: FreeMemory, reads: Iterable[Reads | None]) -> None:
        self.notes: list[ReadNote] = []
        self._free = free
        self._needed = {id(one.file): one.least_memory for one in reads if one is not None}
        if sum(self._needed.values()) > free.memory:
            self._needed.clear()
        # The first store of windows of the items of each file.
        self._views: dict[int, tuple[AxisWindowReads, str]] = {}

    def strategy(self, store: Store, reads: Reads | None) -> ReadStrategy:
        """Return the strategy of a store, and note the reason and the memory that it takes."""
        if reads is None:
            return DirectReads(store)
        file = reads.file
        if not isinstance(store, WindowStore):
            strategy, reason = self._plan(reads)
        elif id(file) in self._views:
            first, reason = self._views[id(file)]
            strategy = AxisWindowReads(store, reads.views, first)
        else:
            of_items, reason = self._plan(reads)
            strategy = first = AxisWindowReads(store, reads.views, of_items)
            self._views[id(file)] = first, reason
        self.notes.append(ReadNote(file.label, file.nbytes, reason))
        return strategy

    def _plan(self, reads: Reads) -> tuple[ReadStrategy, str]:
        self._needed.pop(id(reads.file), None)
        left = self._free.memory - sum(self._needed.values())
        reads.free = self._free._replace(memory=left)
        strategy, reason = next(filter(None, (kind.plan(reads) for kind in STRATEGIES)))
        self._free = self._free.without(strategy.items)
        if isinstance(strategy, MappedFile) and isinstance(reads.file, LocalFileStore):
            self._free = self._free._replace(mapped=(*self._free.mapped, reads.file))
        return strategy, "ragged rows, " * reads.are_items + reason


def readahead_memory(stores: Sequence[Store], order: Any) -> Callable[[int], list[Allocation]]:
    """Return a function from the rows of all batches in memory to the buffers of each file.

    Only files whose rows can be read ahead into buffers count.
    """
    found = [
        reads
        for store in stores
        if (reads := reads_of_rows(store, stores, order, 0)) is not None
        and not reads.file.writable
        # All windows of one file are read together.
        and (not reads.views or reads.views[0] is store)
    ]

    def buffers(n_batch_rows: int) -> list[Allocation]:
        given = (dataclasses.replace(reads, n_batch_rows=n_batch_rows) for reads in found)
        return [reads.buffers for reads in given if reads.buffers is not None]

    return buffers


class ReadNote(NamedTuple):
    """Reason for the way in which the rows of a source are read."""

    label: str
    nbytes: int
    reason: str


def notes_of(reads: Iterable[ReadNote]) -> tuple[str, ...]:
    """Return a note for each source, and one note for many sources that are read alike."""
    alike: dict[str, list[ReadNote]] = {}
    for read in reads:
        alike.setdefault(read.reason, []).append(read)
    return tuple(
        f"{sources}: {reason}" for reason, group in alike.items() for sources in _sources(group)
    )


def _sources(group: Sequence[ReadNote]) -> list[str]:
    """Return the names and sizes of the sources of each note."""
    if len(group) <= _MOST_NOTES:
        return [f"{label}, {human(nbytes)}" for label, nbytes, _ in group]
    named = ", ".join(read.label for read in group[:_N_NAMED])
    sizes = {read.nbytes for read in group}
    size = "up to " * (len(sizes) > 1) + human(max(sizes))
    return [f"{named} and {len(group) - _N_NAMED} more, {size} each"]
