"""Reads: facts about the reads of one file, which decide the strategy that reads its rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pinfeed.memory.pages import block_nbytes
from pinfeed.memory.plan import Allocation
from pinfeed.memory.units import human
from pinfeed.rows.orders import Order, Sequential, known
from pinfeed.rows.ranks import PerRank
from pinfeed.rows.row_lengths import most_in_blocks
from pinfeed.rows.windows import Interval, Windows, rows_of, usual_run
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore

# Bytes that a disk reads in sequence in the time of one random read. Measured disks gave 20,000 to
# 60,000 random reads per second, and 1.2 to 2.5 GB/s in sequence.
_SEEK_BYTES = 64 << 10


class FreeMemory(NamedTuple):
    """Host memory that may be used for rows of files, in bytes."""

    memory: int
    """Memory of the process."""
    page_cache: int
    """Page cache, which belongs to the kernel, and which all processes of a machine share."""
    origin: str = "the free memory"
    """Name of the page cache's bound, for the plan."""
    mapped: tuple[LocalFileStore, ...] = ()
    """Stores whose files are mapped, and so are already in the page cache."""

    def without(self, items: Iterable[Allocation]) -> FreeMemory:
        """Return the memory that remains after allocations."""
        memory, page_cache, *_ = self
        for item in items:
            memory -= item.total * (item.place in ("host", "pinned"))
            page_cache -= item.total * (item.place != "device")
        return self._replace(memory=memory, page_cache=page_cache)


_NOTHING = FreeMemory(0, 0)


@dataclass(eq=False)
class Reads:
    """Facts about the reads of one file."""

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
    views: tuple[WindowStore, ...] = ()
    """All windows that are read; the rows of the file are their items."""
    are_items: bool = False
    """Whether the rows are items of ragged rows, which the order does not count."""
    free: FreeMemory = _NOTHING
    """Memory for this file; it is known when all files have been seen, before a strategy asks."""

    @functools.cached_property
    def in_sequence(self) -> bool:
        """Whether the rows of a batch are consecutive.

        With ``Ranks``, each rank reads whole batches of a sequential order, not every n-th row.
        """
        order = self.order
        if isinstance(order, PerRank):
            return isinstance(order.order, Sequential) and order.hand != 1
        return isinstance(order, Sequential)

    @property
    def wants_whole_file(self) -> bool:
        """Whether reading the whole file in sequence is faster than its rows in random order."""
        n_rows = min((view.run_length for view in self.views), default=1)
        return self.share * _SEEK_BYTES >= n_rows * self.file.row_nbytes

    @functools.cached_property
    def page_cache_problem(self) -> str:
        """Remark that a local file does not fit in the page cache; empty if it does."""
        file = self.file
        if not isinstance(file, LocalFileStore):
            return ""
        is_large = file.nbytes_beside(self.free.mapped) > self.free.page_cache
        return f" (the file does not fit in {self.free.origin})" * is_large

    @functools.cached_property
    def buffers(self) -> Allocation | None:
        """Memory of the buffers for rows that are read ahead; None if no windows are worth it."""
        if self.windows is None:
            return None
        return buffer_allocation(self.windows, self.file.row_nbytes, self.n_batch_rows)

    @functools.cached_property
    def buffer_problem(self) -> str:
        """Reason why rows cannot be read ahead into buffers; empty if they can, or without windows.

        The kernel may still read them ahead into the page cache.
        """
        if self.buffers is None:
            return ""
        if self.file.writable:
            return "the file is open for writing"
        left = max(0, self.free.memory)
        if self.buffers.total <= left:
            return ""
        return f"read-ahead buffers need {human(self.buffers.total)}, but {human(left)} remain"

    @property
    def buffer_advice(self) -> str:
        """Advice for windows that do not fit in buffers; empty if they do, or without windows."""
        advice = "a larger limit or a smaller window_blocks allows read-ahead"
        return self.buffer_problem and f"{self.buffer_problem}; {advice}"

    @property
    def least_memory(self) -> int:
        """Memory with which rows that are slow to read are read about once in an epoch.

        It is 0 if the rows need none.
        """
        if isinstance(self.file, LocalFileStore) or self.in_sequence:
            return 0
        found = [copy_allocation(self.file)] if self.share > 0.5 else []
        found += [self.buffers] if self.buffers is not None else []
        return min((item.total for item in found), default=0)


def copy_allocation(file: FileStore) -> Allocation:
    """Return the memory of a copy of all rows."""
    return Allocation("rows of a file", "host", 1, block_nbytes(file.n_rows * file.row_nbytes))


def buffer_allocation(windows: Windows, row_nbytes: int, n_batch_rows: int) -> Allocation:
    """Return the memory of the buffers for the windows of a file.

    The ``n_batch_rows`` rows of the batches in memory are in some, and others are read ahead.
    """
    count = windows.most(n_batch_rows) + windows.n_ahead
    nbytes = block_nbytes(windows.window_rows * row_nbytes)
    return Allocation("read-ahead buffers", "host", count, nbytes)


def file_of(store: Store) -> FileStore | None:
    """Return the store that reads the rows of a store from files; None if they are not in files.

    For windows, it is the store of their items.
    """
    if isinstance(store, WindowStore):
        return file_of(store.items)
    if isinstance(store, ChunkedStore):
        return store.native or store
    return store if isinstance(store, FileStore) else None


def reads_of_rows(
    store: Store, stores: Sequence[Store], order: Any, n_batch_rows: int
) -> Reads | None:
    """Return the reads of the rows of one of the stores; None if they are not in files."""
    views = _views(store, stores)
    # All windows of one file are read together, also if the file was opened for each of them.
    file = file_of((views or (store,))[0])
    if file is None or not file.row_nbytes:
        return None
    row_nbytes = sum(view.row_nbytes for view in views) or file.row_nbytes
    # The ends of files, which are in no window, do not count, unless they are most of a file: a map
    # or a copy of it would then be mostly unused.
    covered = max((view.nbytes for view in views), default=0)
    nbytes = covered if covered > file.nbytes // 2 else file.nbytes
    share = _share(order, store.n_rows, row_nbytes, nbytes)
    return Reads(file, order, share, _windows(file, order, views), n_batch_rows, views)


def reads_of_items(store: RaggedStore, part: Store, order: Any, n_batch_rows: int) -> Reads | None:
    """Return the reads of one part of the items of ragged rows; None if it is not in files."""
    # Windows are other rows than those of their file.
    file = None if isinstance(part, WindowStore) else file_of(part)
    if file is None or not file.row_nbytes:
        return None
    mean = store.row_lengths.mean * file.row_nbytes
    share = _share(order, store.n_rows, mean, store.n_items * file.row_nbytes)
    of_items = None
    if (found := known(order).windows(store.n_rows, 0)) is not None:
        most = most_ragged_items(found, store)
        of_items = replace(windows_of_items(found, store), window_rows=most)
    return Reads(file, order, share, of_items, n_batch_rows, are_items=True)


def _views(store: Store, stores: Iterable[Store]) -> tuple[WindowStore, ...]:
    """Return the stores whose windows are read together with those of a store, and this one."""
    file = file_of(store)
    if file is None or not isinstance(store, WindowStore):
        return ()
    others = (other for other in stores if isinstance(other, WindowStore))
    return tuple(other for other in others if file.has_rows_of(file_of(other)))


def _share(order: Any, n_rows: int, row_nbytes: float, nbytes: int) -> float:
    return min(1.0, order.length(n_rows) * row_nbytes / nbytes) if isinstance(order, Order) else 1.0


def _windows(file: FileStore, order: Any, views: tuple[WindowStore, ...]) -> Windows | None:
    """Return the windows of an order, if its blocks are large enough to be worth a seek.

    Decoding a chunk takes longer than a seek, so windows of any size are worth it for chunks.
    """
    found = known(order).windows(views[0].n_rows if views else file.n_rows, 0)
    if found is not None and views:
        of_items = windows_of_views(found, views)
        most = most_view_items(found, views)
        found = replace(of_items, window_rows=most, block_rows=usual_run(of_items))
    if found is None or isinstance(file, ChunkedStore):
        return found
    return found if found.block_rows * file.nbytes >= _SEEK_BYTES * file.n_rows else None


def windows_of_items(windows: Windows, store: RaggedStore) -> Windows:
    """Return windows of the items of ragged rows; windows without items are left out."""
    offsets = store.offsets

    def runs_of_items(runs: Sequence[Interval]) -> list[Interval]:
        found = [(offsets.item(a), offsets.item(b)) for a, b in runs]
        return [(a, b) for a, b in found if a < b]

    return windows.with_runs(runs_of_items)


def most_ragged_items(windows: Windows, store: RaggedStore) -> int:
    """Return the most items of a window: those of its longest rows or blocks."""
    most = store.row_lengths.most_elements(windows.window_rows)
    if windows.n_blocks:
        most = min(most, most_in_blocks(store.offsets, windows.n_blocks, windows.block_rows))
    return most


def windows_of_views(windows: Windows, views: tuple[WindowStore, ...]) -> Windows:
    """Return windows of the items of stores, given those of their rows, which are read together."""
    return windows.with_runs(lambda runs: _item_runs(views, runs))


def most_view_items(windows: Windows, views: tuple[WindowStore, ...]) -> int:
    """Return the most items of a window of rows that stores of the same items have."""
    first = views[0]
    most = sum(_most_items(windows, view, view.extent) for view in views)
    if all(view.has_steps_of(first) for view in views):
        # Rows are at the same distance from each other in all stores.
        begins = [view.first_items(np.zeros(1, np.int64)).item(0) for view in views]
        ends = [begin + one.extent for begin, one in zip(begins, views, strict=True)]
        most = min(most, _most_items(windows, first, max(ends) - min(begins)))
    for window in itertools.islice(windows.needed(0, 1), 1):
        # Short runs of a selection may be so close together that their windows overlap. The
        # first window stands for all, and others may have half as many overlaps. The items that
        # memory cannot hold are read with their batches.
        n_items = _n_rows(_item_runs(views, window.runs))
        most = min(most, 2 * n_items * windows.window_rows // _n_rows(window.runs))
    return min(first.items.n_rows, most)


def _item_runs(views: Sequence[WindowStore], runs: Sequence[Interval]) -> list[Interval]:
    """Return the items of rows as runs [start, stop), in ascending order."""
    rows = rows_of(runs)
    starts = np.concatenate([view.first_items(rows) for view in views])
    stops = starts + np.repeat([view.extent for view in views], len(rows))
    order = np.argsort(starts)
    starts = starts[order]
    stops = np.maximum.accumulate(stops[order])
    is_first = np.concatenate(([True], starts[1:] > stops[:-1]))
    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(starts)) - 1
    return list(zip(starts[begins].tolist(), stops[ends].tolist(), strict=True))


def _most_items(windows: Windows, store: WindowStore, extent: int) -> int:
    """Return the most items of a window, if no run of rows is shorter than usual.

    Args:
        windows: Windows of the rows.
        store: Store of the rows.
        extent: Items from the first one of a row to the last one, both included.
    """
    n_rows = windows.window_rows
    has_windows = store.counts.all(axis=1)
    sizes = [math.prod(store.shapes[i]) for i in np.flatnonzero(has_windows).tolist()]
    most = min(n_rows * extent, max(sizes) * len(sizes))
    if len(store.axes) == 1:
        # Consecutive rows overlap, up to the end of the axis, or of a run. A run may begin and
        # end within the axis, and so has one piece more than whole axes.
        (axis,) = store.axes.values()
        n_along = int(store.counts[has_windows, -1].min())
        n_runs = n_rows // max(1, windows.block_rows) + 2
        n_pieces = 2 * n_runs + n_rows // n_along
        most = min(most, n_rows * axis.step + n_pieces * extent)
    return most


def _n_rows(runs: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in runs)
