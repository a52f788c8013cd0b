"""Windows along axes: their items as the windows of an order, and the strategy that reads them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.strategy import AnyBatch, OpenBatch, ReadStrategy, UnreadRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.ranks import Interval
from pinfeed.rows.windows import Window, Windows, WrappedWindows, usual_run
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import CheckStop, Gather, StoreRows, never, run_gather
from pinfeed.stores.mapped_store import MappedStore
from pinfeed.stores.store import Array
from pinfeed.stores.window_store import WindowStore

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class ItemWindows(WrappedWindows):
    """Windows of rows of an order as windows of the items of these rows."""

    n_blocks = 0

    stores: tuple[WindowStore, ...]
    """Stores of the same items, whose rows are read together."""

    @functools.cached_property
    def window_rows(self) -> int:
        first = self.stores[0]
        most = sum(self._most_items(store, store.extent) for store in self.stores)
        if all(store.has_steps_of(first) for store in self.stores):
            # Rows are at the same distance from each other in all stores.
            begins = [store.first_items(np.zeros(1, np.int64)).item(0) for store in self.stores]
            ends = [begin + one.extent for begin, one in zip(begins, self.stores, strict=True)]
            most = min(most, self._most_items(first, max(ends) - min(begins)))
        n_rows = self.windows.window_rows
        for window in itertools.islice(self.windows.needed(0, 1), 1):
            # Short runs of a selection may be so close together that their windows overlap. The
            # first window stands for all, and others may have half as many overlaps. The items that
            # memory cannot hold are read with their batches.
            n_items = _n_rows(self._item_runs(window.runs))
            most = min(most, 2 * n_items * n_rows // _n_rows(window.runs))
        return min(first.items.n_rows, most)

    @property
    def block_rows(self) -> int:
        return usual_run(self)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        for window in self.windows.needed(start, stop):
            yield window._replace(runs=self._item_runs(window.runs))

    def _item_runs(self, runs: Sequence[Interval]) -> list[Interval]:
        """Return the items of rows as runs [start, stop), in ascending order."""
        rows = np.concatenate([np.arange(*run) for run in runs])
        starts = np.concatenate([store.first_items(rows) for store in self.stores])
        stops = starts + np.repeat([store.extent for store in self.stores], len(rows))
        order = np.argsort(starts)
        starts = starts[order]
        stops = np.maximum.accumulate(stops[order])
        is_first = np.concatenate(([True], starts[1:] > stops[:-1]))
        begins = np.flatnonzero(is_first)
        ends = np.append(begins[1:], len(starts)) - 1
        return list(zip(starts[begins].tolist(), stops[ends].tolist(), strict=True))

    def _most_items(self, store: WindowStore, extent: int) -> int:
        """Return the most items of a window, if no run of rows is shorter than usual.

        Args:
            store: Store of the rows.
            extent: Items from the first one of a row to the last one, both included.
        """
        n_rows = self.windows.window_rows
        has_windows = store.counts.all(axis=1)
        sizes = [math.prod(store.shapes[i]) for i in np.flatnonzero(has_windows).tolist()]
        most = min(n_rows * extent, max(sizes) * len(sizes))
        if len(store.axes) == 1:
            # Consecutive rows overlap, up to the end of the axis, or of a run. A run may begin and
            # end within the axis, and so has one piece more than whole axes.
            (axis,) = store.axes.values()
            n_along = int(store.counts[has_windows, -1].min())
            n_runs = n_rows // max(1, self.windows.block_rows) + 2
            n_pieces = 2 * n_runs + n_rows // n_along
            most = min(most, n_rows * axis.step + n_pieces * extent)
        return most


def _n_rows(runs: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in runs)


class WindowReads(ReadStrategy):
    """Strategy that gathers windows as runs of items.

    Args:
        store: The windows.
        stores: All stores whose windows the strategy reads, with this one.
        strategy: Strategy of the items of the stores.
    """

    def __init__(
        self, store: WindowStore, stores: tuple[WindowStore, ...], strategy: ReadStrategy
    ) -> None:
        self._store = store
        self._stores = stores
        self.item_strategy = strategy
        self.items = strategy.items

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        of_items = None if windows is None else ItemWindows(windows, self._stores)
        with self.item_strategy.open_epoch(of_items, start, stop) as open_batch:
            if isinstance(open_batch, AnyBatch):
                yield AnyBatch(self._of_items(open_batch.make))
            else:
                yield lambda position, n: self._of_items(open_batch(position, n))

    def memory_rows(self) -> MemoryRows | None:
        return self._store.memory_rows_in(self.item_strategy.memory_rows())

    def memory_rows_when_loaded(self) -> MemoryRows | None:
        return self._store.memory_rows_in(self.item_strategy.memory_rows_when_loaded())

    @property
    def may_open_ahead(self) -> bool:
        return self.item_strategy.may_open_ahead

    def close(self) -> None:
        self.item_strategy.close()

    def _of_items(self, make: Callable[[Rows], UnreadRows]) -> Callable[[Rows], UnreadRows]:
        """Return a function that makes the windows of a batch, given one that makes its items."""
        items = make(_NO_ROWS)
        if not isinstance(items, StoreRows):
            # The items are sorted by chunk.
            return lambda rows: _WindowRows(self._store, make(self._items_of(rows)), len(rows))
        gather: Gather = functools.partial(self._store.gather_items, run_gather(items.store))
        if isinstance(items.store, (ArrayStore, MappedStore)):
            # All items are in memory.
            memory_rows = self._store.memory_rows_in(items.store.memory_rows)
            gather = gather if memory_rows is None else memory_rows.gather
        return functools.partial(StoreRows, self._store, gather=gather)

    def _items_of(self, rows: Rows) -> Rows:
        return self._store.item_runs(rows).rows()


class _WindowRows:
    """Windows that a batch needs, as unread items.

    Args:
        store: The windows.
        items: Their items, one window after the other.
        n: Number of windows.
    """

    def __init__(self, store: WindowStore, items: UnreadRows, n: int) -> None:
        self._store = store
        self._items = items
        self.shape = (n, *store.row_shape)
        self.dtype: np.dtype[np.generic] = store.dtype

    def cut(self, begin: int, end: int) -> _WindowRows:
        """Return windows [begin, end) of these."""
        n = self._store.n_items
        return _WindowRows(self._store, self._items.cut(begin * n, end * n), end - begin)

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the windows into ``out``, step by step."""
        self._items.read(self._store.as_items(out), check_stop)
