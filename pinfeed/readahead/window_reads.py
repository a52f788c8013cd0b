"""WindowReads: strategy for windows along axes, which reads their items by another strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from pinfeed.readahead.item_windows import ItemWindows
from pinfeed.readahead.strategy import AnyBatch, OpenBatch, ReadStrategy, UnreadRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.axis_windows import WindowStore
from pinfeed.stores.host_rows import CheckStop, never
from pinfeed.stores.store import Array


class WindowReads(ReadStrategy):
    """Strategy that gathers windows as rows of items.

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
        self._strategy = strategy
        self.items = strategy.items

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        of_items = None if windows is None else ItemWindows(windows, self._stores)
        with self._strategy.open_epoch(of_items, start, stop) as open_batch:
            if isinstance(open_batch, AnyBatch):
                yield AnyBatch(self._of_items(open_batch.make))
            else:
                yield lambda position, n: self._of_items(open_batch(position, n))

    @property
    def may_open_ahead(self) -> bool:
        return self._strategy.may_open_ahead

    def close(self) -> None:
        self._strategy.close()

    def _of_items(self, make: Callable[[Rows], UnreadRows]) -> Callable[[Rows], UnreadRows]:
        return lambda rows: _WindowRows(self._store, make(self._store.items_of(rows)), len(rows))


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
        n = len(self._store.offsets)
        return _WindowRows(self._store, self._items.cut(begin * n, end * n), end - begin)

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the windows into ``out``, step by step."""
        self._items.read(self._store.as_items(out), check_stop)
