"""ReadPlan: the strategies that read the rows of all stores, and how they are chosen.

Windows and ragged rows consist of items; they are read by the strategies of their items.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.buffers import BufferedReadahead, BufferedRows, PageCacheReadahead
from pinfeed.readahead.resident_file import CopyInSecondEpoch, InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import (
    FreeMemory,
    Reads,
    reads_of_items,
    reads_of_rows,
    windows_of_items,
    windows_of_views,
)
from pinfeed.readahead.strategy import (
    AnyBatch,
    ChunkReads,
    ChunkRows,
    DirectReads,
    OpenBatch,
    ReadStrategy,
    UnreadRows,
)
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Places
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import Gather, StoreRows, run_gather
from pinfeed.stores.local_file import LocalFileStore, MappedStore
from pinfeed.stores.ragged import RaggedParts, RaggedStore
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore

OpenRaggedBatch = Callable[[int, int], Callable[[Rows, Places | None], RaggedParts]]
"""Takes the position of a batch and its number of rows, as ``OpenBatch``; returns its parts."""

_NO_ROWS = np.empty(0, np.int64)

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


class AxisWindowReads(ReadStrategy):
    """Strategy that gathers windows as runs of items.

    Several stores may have windows of the same items. The first one opens the strategy of the
    items, and the others read through it, so that items are read once for all of them.

    Args:
        store: The windows.
        views: All stores with windows of the same items, this one included.
        items: Strategy of the items, or the first of the stores, which is opened before this one.
    """

    _store: WindowStore

    def __init__(
        self, store: WindowStore, views: tuple[WindowStore, ...], items: ReadStrategy
    ) -> None:
        super().__init__(store)
        self._views = views
        # The store that opens and closes the strategy of the items for this one.
        self._first = items if isinstance(items, AxisWindowReads) else None
        self.item_strategy: ReadStrategy = (
            items if self._first is None else self._first.item_strategy
        )
        self.items = items.items if self._first is None else ()
        # Opens batches of the items during an epoch.
        self._open_items: OpenBatch | None = None

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        if self._first is not None:
            assert self._first._open_items is not None
            yield self._of_items(self._first._open_items)
            return
        of_items = None if windows is None else windows_of_views(windows, self._views)
        with self.item_strategy.open_epoch(of_items, start, stop) as open_items:
            self._open_items = open_items
            try:
                yield self._of_items(open_items)
            finally:
                # The function keeps buffers in memory. The next epoch may have been opened early.
                if self._open_items is open_items:
                    self._open_items = None

    def memory_rows(self) -> MemoryRows | None:
        return self._store.memory_rows_in(self.item_strategy.memory_rows())

    def memory_rows_when_loaded(self) -> MemoryRows | None:
        return self._store.memory_rows_in(self.item_strategy.memory_rows_when_loaded())

    @property
    def may_open_ahead(self) -> bool:
        return self.item_strategy.may_open_ahead

    def close(self) -> None:
        if self._first is None:
            self.item_strategy.close()

    def _of_items(self, open_items: OpenBatch) -> OpenBatch:
        """Return the function that opens batches of windows, given that of their items."""
        if isinstance(open_items, AnyBatch):
            return AnyBatch(self._maker(open_items.make))
        return lambda position, n: self._maker(open_items(position, n))

    def _maker(self, make: Callable[[Rows], UnreadRows]) -> Callable[[Rows], UnreadRows]:
        """Return a function that makes the windows of a batch, given one that makes its items."""
        store = self._store
        items = make(_NO_ROWS)
        if isinstance(items, ChunkRows):
            return items.windows(store)
        assert isinstance(items, StoreRows)
        gather: Gather = functools.partial(store.gather_items, run_gather(items.store))
        if isinstance(items.store, (ArrayStore, MappedStore)):
            # All items are in memory.
            memory_rows = store.memory_rows_in(items.store.memory_rows)
            gather = gather if memory_rows is None else memory_rows.gather
        return functools.partial(StoreRows, store, gather=gather)


class RaggedReads:
    """Method of reading ragged rows: the strategies of the parts of their items, in terms of rows.

    Args:
        store: The ragged rows.
        parts: Strategy of each part.
    """

    def __init__(self, store: RaggedStore, parts: Sequence[ReadStrategy]) -> None:
        self.store = store
        self.items: tuple[Allocation, ...] = tuple(
            itertools.chain.from_iterable(part.items for part in parts)
        )
        self._parts = parts
        self._gathers = [part.run_gather() for part in parts]

    @property
    def may_open_ahead(self) -> bool:
        """Whether the next epoch may be opened early, like ``ReadStrategy.may_open_ahead``."""
        return all(part.may_open_ahead for part in self._parts)

    @contextlib.contextmanager
    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> Iterator[OpenRaggedBatch]:
        """Serve the positions [start, stop) of an epoch, like ``ReadStrategy.open_epoch``."""
        if windows is not None:
            windows = windows_of_items(windows, self.store)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(part.open_epoch(windows, start, stop)) for part in self._parts
            ]

            def open_ragged(position: int, n: int) -> Callable[[Rows, Places | None], RaggedParts]:
                # This begins to fill the next buffer.
                opened = [serve(position, n) for serve in serving]
                gathers = [
                    one.gather_runs if isinstance(one, BufferedRows) else gather
                    for one, gather in zip(opened, self._gathers, strict=True)
                ]
                return functools.partial(self.store.batch_parts, gathers)

            yield open_ragged

    def close(self) -> None:
        """Free the memory of the strategies."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)
