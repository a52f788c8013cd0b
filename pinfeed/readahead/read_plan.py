"""Reads: facts about the reads of a file, which decide its strategy; ReadPlan: the decisions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.readahead.resident_file import copy_allocation
from pinfeed.readahead.strategy import DirectReads, FreeMemory, ReadStrategy
from pinfeed.readahead.window_reads import ItemWindows
from pinfeed.readahead.windows import WindowBatch, window_allocation
from pinfeed.rows.length_batches import most_in_blocks
from pinfeed.rows.orders import Order, PerRank, Rows, Sequential, windows
from pinfeed.rows.packing import Places
from pinfeed.rows.windows import Window, Windows, WrappedWindows
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import RunGather, run_gather
from pinfeed.stores.matrix import MatrixStore
from pinfeed.stores.ragged import RaggedParts, RaggedStore
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.sharded_file import ShardedStore
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore

# Sources that are read alike have one note each if they are at most this many.
_MOST_NOTES = 4
_N_NAMED = 3

OpenRaggedBatch = Callable[[int, int], Callable[[Rows, Places | None], RaggedParts]]
"""Takes the position of a batch and its number of rows, as ``OpenBatch``; returns its parts."""


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
        found = [one.items for one in self.strategies] + [one.items for one in self.ragged]
        return self.resident + tuple(itertools.chain.from_iterable(found))

    @property
    def closes(self) -> list[Callable[[], None]]:
        """Functions that free the memory of each strategy."""
        return [one.close for one in self.strategies] + [one.close for one in self.ragged]


class PartReads(NamedTuple):
    """Method of reading one part of the items of ragged rows."""

    strategy: ReadStrategy
    gather: RunGather
    """Gathers runs of the items, unless the strategy has windows for a batch."""


class RaggedReads:
    """Method of reading ragged rows: the strategies of the parts of their items, in terms of rows.

    Args:
        store: The ragged rows.
        parts: Method of reading each part.
    """

    def __init__(self, store: RaggedStore, parts: Sequence[PartReads]) -> None:
        self.store = store
        self.items: tuple[Allocation, ...] = tuple(
            itertools.chain.from_iterable(part.strategy.items for part in parts)
        )
        self._parts = parts

    @classmethod
    def direct(cls, store: RaggedStore) -> RaggedReads:
        """Return the method that gathers all items straight from their stores."""
        return cls(store, [PartReads(DirectReads(one), run_gather(one)) for one in store.parts])

    @property
    def may_open_ahead(self) -> bool:
        """Whether the next epoch may be opened early, like ``ReadStrategy.may_open_ahead``."""
        return all(part.strategy.may_open_ahead for part in self._parts)

    @contextlib.contextmanager
    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> Iterator[OpenRaggedBatch]:
        """Serve the positions [start, stop) of an epoch, like ``ReadStrategy.open_epoch``."""
        if windows is not None:
            windows = RaggedWindows(windows, self.store)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(part.strategy.open_epoch(windows, start, stop))
                for part in self._parts
            ]

            def open_ragged(position: int, n: int) -> Callable[[Rows, Places | None], RaggedParts]:
                # This starts reading the next window.
                opened = [serve(position, n) for serve in serving]
                gathers = [
                    one.gather_runs if isinstance(one, WindowBatch) else part.gather
                    for one, part in zip(opened, self._parts, strict=True)
                ]
                return functools.partial(self.store.batch_parts, gathers)

            yield open_ragged

    def close(self) -> None:
        """Free the memory of the strategies."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.strategy.close)


@dataclass(frozen=True)
class RaggedWindows(WrappedWindows):
    """Windows whose runs are items of ragged rows; windows without items are left out."""

    store: RaggedStore

    @functools.cached_property
    def window_rows(self) -> int:
        """Most items of a window: those of its longest rows or blocks, if it had them all."""
        most = self.store.row_lengths.most_elements(self.windows.window_rows)
        if self.windows.n_blocks:
            blocks = self.windows.n_blocks, self.windows.block_rows
            most = min(most, most_in_blocks(self.store.offsets, *blocks))
        return most

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        offsets = self.store.offsets
        for window in self.windows.needed(start, stop):
            found = [(offsets.item(a), offsets.item(b)) for a, b in window.runs]
            runs = [(a, b) for a, b in found if a < b]
            if runs:
                yield window._replace(runs=runs)


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


SEEK_BYTES = 64 << 10
"""Bytes that a disk reads in sequence in the time of one random read.

Measured disks gave 20,000 to 60,000 random reads per second, and 1.2 to 2.5 GB/s in sequence.
"""


class Reads(NamedTuple):
    """Facts about the reads of one file, which decide their strategy."""

    file: FileStore
    order: Any
    """An order, or any other iterable of row indices."""
    share: float
    """Largest share of the file that an epoch reads, and 1 if unknown.

    Each row that an order repeats, and each byte of rows that overlap, counts as often as it is
    read.
    """
    windows: Windows | None
    """Windows of the order, as rows of the file; None if they are not worth reading."""
    n_batch_rows: int
    """Rows of all batches that are read at the same time."""
    mapped: Sequence[ShardedStore]
    """Stores whose files are mapped already."""
    views: tuple[WindowStore, ...] = ()
    """All windows along axes that are read; the rows of the file are their items."""
    free: FreeMemory = FreeMemory(0, 0)

    @property
    def least_memory(self) -> int:
        """Memory with which rows that are slow to read are read once in an epoch, or little more.

        It is 0 if the rows need none.
        """
        is_slow = isinstance(self.file, (ChunkedStore, MatrixStore, RemoteStore))
        if not is_slow or is_in_sequence(self.order):
            return 0
        found = [copy_allocation(self.file)] if self.share > 0.5 else []
        if self.windows is not None:
            found.append(window_allocation(self.windows, self.file.row_nbytes, self.n_batch_rows))
        return min((item.total for item in found), default=0)

    @property
    def run_nbytes(self) -> int:
        """Bytes that are at least read at once."""
        return self.file.row_nbytes * min((view.run_length for view in self.views), default=1)


class Budget:
    """Free memory, of which each file leaves the next ones what they need.

    Args:
        free: Memory for all files.
        reads: The reads of each file.
    """

    def __init__(self, free: FreeMemory, reads: Iterable[Reads]) -> None:
        self._free = free
        self._needed = {id(one.file): one.least_memory for one in reads}
        if sum(self._needed.values()) > free.memory:
            self._needed.clear()

    def with_free(self, reads: Reads) -> Reads:
        """Return reads with the memory that their file may use."""
        self._needed.pop(id(reads.file), None)
        left = self._free.memory - sum(self._needed.values())
        return reads._replace(free=self._free._replace(memory=left))

    def take(self, items: Iterable[Allocation]) -> None:
        """Note that the strategy of a file takes memory."""
        self._free = self._free.without(items)


def reads_of_rows(
    store: Store,
    stores: Sequence[Store],
    order: Any,
    n_batch_rows: int,
    mapped: Sequence[ShardedStore],
) -> Reads | None:
    """Return the reads of the rows of one of the stores; None if they are not in files."""
    views = _views(store, stores)
    # All windows of one file are read together, also if the file was opened for each of them.
    file = file_of((views or (store,))[0])
    if file is None or not file.row_nbytes:
        return None
    row_nbytes = sum(view.row_nbytes for view in views) or file.row_nbytes
    # The ends of files, which are in no window, do not count.
    covered = max((view.nbytes for view in views), default=0)
    nbytes = covered if covered > file.nbytes // 2 else file.nbytes
    share = _share(order, store.n_rows, row_nbytes, nbytes)
    found = _windows(file, order, views)
    return Reads(file, order, share, found, n_batch_rows, mapped, views)


def reads_of_items(
    store: RaggedStore, part: Store, order: Any, n_batch_rows: int, mapped: Sequence[ShardedStore]
) -> Reads | None:
    """Return the reads of one part of the items of ragged rows; None if it is not in files."""
    # Windows are other rows than those of their file.
    items = None if isinstance(part, WindowStore) else file_of(part)
    if items is None or not items.row_nbytes:
        return None
    mean = store.row_lengths.mean * items.row_nbytes
    share = _share(order, store.n_rows, mean, store.n_items * items.row_nbytes)
    found = windows(order, store.n_rows, 0) if isinstance(order, Order) else None
    of_items = None if found is None else RaggedWindows(found, store)
    return Reads(items, order, share, of_items, n_batch_rows, mapped)


def windows_ahead(stores: Sequence[Store], order: Any) -> Callable[[int], list[Allocation]]:
    """Return a function from the rows of all batches in memory to the windows of each file.

    Only files whose windows can be read ahead count.
    """
    found: list[tuple[Windows, int]] = []
    for store in stores:
        file = file_of(store)
        views = _views(store, stores)
        if file is not None and may_copy(file) and store is (views or (store,))[0]:
            of_file = _windows(file, order, views)
            if of_file is not None:
                found.append((of_file, file.row_nbytes))
    return lambda n_batch_rows: [
        window_allocation(windows, row_nbytes, n_batch_rows) for windows, row_nbytes in found
    ]


def file_of(store: Store) -> FileStore | None:
    """Return the store that reads the rows of a store from files; None if they are not in files.

    For windows along axes, it is the store of their items.
    """
    if isinstance(store, WindowStore):
        return file_of(store.items)
    if isinstance(store, ChunkedStore):
        return store.native or store
    return store if isinstance(store, FileStore) else None


def is_in_sequence(order: Any) -> bool:
    """Return whether the rows of a batch are consecutive.

    With ``Ranks``, each rank reads whole batches of a sequential order, not every n-th row.
    """
    if isinstance(order, PerRank):
        return isinstance(order.order, Sequential) and order.hand != 1
    return isinstance(order, Sequential)


def may_copy(store: FileStore) -> bool:
    """Return whether rows may be copied into memory before they are needed."""
    return not store.writable


def _views(store: Store, stores: Iterable[Store]) -> tuple[WindowStore, ...]:
    """Return the stores whose windows are read together with those of a store, and this one."""
    file = file_of(store)
    if file is None or not isinstance(store, WindowStore):
        return ()
    others = (other for other in stores if isinstance(other, WindowStore))
    return tuple(other for other in others if file.has_rows_of(file_of(other)))


def _share(order: Any, n_rows: int, row_nbytes: float, nbytes: int) -> float:
    return min(1.0, order.length(n_rows) * row_nbytes / nbytes) if isinstance(order, Order) else 1.0


def _windows(store: FileStore, order: Any, views: tuple[WindowStore, ...]) -> Windows | None:
    """Return the windows of an order, if its blocks are large enough to be worth a seek.

    Decoding a chunk takes longer than a seek, so windows of any size are worth it for chunks.
    """
    if not isinstance(order, Order):
        return None
    found = windows(order, views[0].n_rows if views else store.n_rows, 0)
    if found is not None and views:
        found = ItemWindows(found, views)
    if found is None or isinstance(store, ChunkedStore):
        return found
    return found if found.block_rows * store.nbytes >= SEEK_BYTES * store.n_rows else None
