"""Reads: facts about the reads of a file, which decide its strategy, and the memory for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.read_plan import RaggedWindows
from pinfeed.readahead.resident_file import copy_allocation
from pinfeed.readahead.strategy import FreeMemory
from pinfeed.readahead.window_reads import ItemWindows
from pinfeed.readahead.windows import window_allocation
from pinfeed.rows.orders import Order, PerRank, Sequential, windows
from pinfeed.rows.windows import Windows
from pinfeed.stores.axis_windows import WindowStore
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.matrix import MatrixStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.sharded_file import ShardedStore
from pinfeed.stores.store import Store

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
    file = file_of(store)
    if file is None or not file.row_nbytes:
        return None
    views = _views(file, stores) if isinstance(store, WindowStore) else ()
    row_nbytes = sum(view.row_nbytes for view in views) or file.row_nbytes
    share = _share(order, store.n_rows, row_nbytes, file.nbytes)
    found = _windows(file, order, views)
    return Reads(file, order, share, found, n_batch_rows, mapped, views)


def reads_of_items(
    store: RaggedStore, part: Store, order: Any, n_batch_rows: int, mapped: Sequence[ShardedStore]
) -> Reads | None:
    """Return the reads of one part of the items of ragged rows; None if it is not in files."""
    items = file_of(part)
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
        views = _views(file, stores) if isinstance(store, WindowStore) and file else ()
        # All windows of one file are read together.
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
    return not (store.writable or (isinstance(store, ShardedStore) and store.overlaps))


def _views(file: FileStore, stores: Iterable[Store]) -> tuple[WindowStore, ...]:
    """Return the stores of windows of the items of a file."""
    windows_of_items = (store for store in stores if isinstance(store, WindowStore))
    return tuple(store for store in windows_of_items if file_of(store) is file)


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
