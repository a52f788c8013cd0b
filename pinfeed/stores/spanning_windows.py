"""Windows over the items of several files as one sequence: SpanningFiles and SpanningMap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.axis_windows import AxisWindow
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.host_rows import Gather
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.mapped_store import FileMap, MappedStore
from pinfeed.stores.sharded_file import RowLayout, ShardedStore
from pinfeed.stores.store import Array


class SpanningWindows(ShardedStore):
    """Rows that are windows of consecutive items of all files, and may extend over several files.

    The base class has the items. A window is a run of items, so a gather of windows is a gather of
    runs, which are cut where files end.
    """

    _window: AxisWindow
    # Items from one window to the next; 0 for a single window, whose step may be any number.
    _step: int

    def _divide(self, window: AxisWindow) -> None:
        """Make windows of the items the rows of the store, once in its life.

        Raises:
            StoreError: If the files have fewer items together than one window needs.
        """
        n_rows = window.count(self.n_rows)
        if not n_rows:
            raise StoreError(
                f"{self.label}: {self.n_rows:,} items in all files; expected at least "
                f"{window.in_words}; give a smaller length, or more files"
            )
        self._window = window
        self._step = window.step if n_rows > 1 else 0
        self.n_rows = n_rows
        self.row_shape = (window.length, *self.row_shape)
        self.row_nbytes *= window.length

    @property
    def overlaps(self) -> bool:
        return self.n_rows > 1 and self._step < self._window.length

    def gather_runs(self, runs: Runs, out: Array) -> None:
        super().gather_runs(self._item_runs(runs), self._items_of(out))

    def _item_runs(self, runs: Runs) -> Runs:
        """Return the run of items of each window of some runs."""
        length = self._window.length
        rows = runs.rows()
        starts = rows * self._step + self._window.start
        return Runs(starts, np.full(len(rows), length), runs.positions() * length)

    def _items_of(self, out: Array) -> Array:
        """Return an array of windows as an array of items, on the same memory."""
        return out.reshape(len(out) * self._window.length, *self.row_shape[1:])

    def _item_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first item of the windows [start, stop), and the item after their last one."""
        first = self._window.start
        return first + start * self._step, first + (stop - 1) * self._step + self._window.length


class SpanningFiles(SpanningWindows, LocalFileStore):
    """Windows over the items of local files; read-only."""

    rows_in_one_file = False

    def will_gather(self, start: int, stop: int) -> None:
        super().will_gather(*self._item_range(start, stop))

    def map_rows(self) -> MappedStore:
        layouts, maps = self._map_files()
        return SpanningMap(layouts, maps, self._window)


class SpanningMap(SpanningWindows, MappedStore):
    """Windows over the items of local files, in a memory map of each file.

    Args:
        layouts: Layout of the items of each file, at least one each.
        maps: Map of each file.
        window: The windows over the items.
    """

    def __init__(
        self, layouts: Sequence[RowLayout], maps: Sequence[FileMap], window: AxisWindow
    ) -> None:
        super().__init__(layouts, maps)
        self._divide(window)

    @property
    def memory_rows(self) -> None:
        """None, because a window may not be in one piece of memory."""
        return None

    @property
    def gather_unchecked(self) -> Gather:
        return self.gather_at

    def gather_at(self, rows: Rows, out: Array, positions: Rows | None = None) -> None:
        places = np.arange(len(rows)) if positions is None else positions
        FileStore.gather_at(self, rows, out, places)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        # Another thread may close the store.
        if (memory_rows := self._memory_rows) is None:
            super().gather_runs(runs, out)
        else:
            # One call copies the windows of all files.
            memory_rows.gather_runs(*self._item_runs(runs), self._items_of(out))

    def populate(self, start: int, stop: int) -> None:
        super().populate(*self._item_range(start, stop))

    def is_cached(self, start: int, stop: int) -> bool | None:
        return super().is_cached(*self._item_range(start, stop))
