"""Rows that consist of items: windows and ragged rows, in terms of reads of items."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pinfeed.memory.plan import Allocation
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.buffers import BufferedRows
from pinfeed.readahead.source_reads import AxisItemWindows, RaggedWindows
from pinfeed.readahead.strategy import AnyBatch, ChunkRows, OpenBatch, ReadStrategy, UnreadRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.packing import Places
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import Gather, StoreRows, run_gather
from pinfeed.stores.mapped_store import MappedStore
from pinfeed.stores.ragged import RaggedParts, RaggedStore
from pinfeed.stores.window_store import WindowStore

OpenRaggedBatch = Callable[[int, int], Callable[[Rows, Places | None], RaggedParts]]
"""Takes the position of a batch and its number of rows, as ``OpenBatch``; returns its parts."""

_NO_ROWS = np.empty(0, np.int64)


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
        self,
        store: WindowStore,
        views: tuple[WindowStore, ...],
        items: ReadStrategy,
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
        of_items = None if windows is None else AxisItemWindows(windows, self._views)
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
            windows = RaggedWindows(windows, self.store)
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
