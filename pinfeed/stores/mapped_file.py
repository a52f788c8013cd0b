"""MappedFileStore: rows of local files, gathered from memory maps of the page cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.base import Array, Gather, checked_gather, run_of
from pinfeed.stores.disk.file_map import FileMap, joined_rows
from pinfeed.stores.formats.row_layout import RowLayout
from pinfeed.stores.sharded_file import ShardedStore, as_bytes


class MappedFileStore(ShardedStore[FileMap]):
    """Rows of local files, read-only, in a memory map of each file.

    Args:
        layouts: Layout of the rows of each file.
        open_map: Function that maps a file, given its number.

    Raises:
        OSError: If a file cannot be mapped.
    """

    def __init__(self, layouts: Sequence[RowLayout], open_map: Callable[[int], FileMap]) -> None:
        self._open_map = open_map
        super().__init__(layouts)
        maps = [self._reader(number) for number, layout in enumerate(layouts) if layout.n_rows]
        # The map of the only file, if its rows need no conversion.
        self._only = maps[0] if len(layouts) == 1 and not self._swapped else None
        self._memory_rows: MemoryRows | None = None
        if not self._swapped and maps[0].memory_rows is not None:
            self._memory_rows = joined_rows(maps)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``.

        Raises:
            ReadError: If a file has shrunk or cannot be read.
        """
        self.gather_unchecked(checked_gather(self, rows, out), out)

    @property
    def gather_unchecked(self) -> Gather:
        """Function that copies rows into an array. The caller has checked all arguments.

        It raises a ReadError if a file has shrunk.
        """
        if self._only is not None:
            return self._only.read_all
        return self._gather_shards if self._memory_rows is None else self._memory_rows.gather

    @property
    def memory_rows(self) -> MemoryRows | None:
        """The rows, if the compiled functions can copy them."""
        return self._memory_rows

    def _gather_shards(self, rows: Rows, out: Array) -> None:
        run = run_of(rows)
        if run is None or self._swapped:
            self.gather_at(rows, out, np.arange(len(rows)))
        else:
            self._read_run(run, as_bytes(out))

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their positions in ``out``. The caller has checked all arguments.

        Raises:
            ReadError: If a file has shrunk or cannot be read.
        """
        self._gather_runs(runs, out)

    def populate(self, start: int, stop: int) -> None:
        """Load the rows [start, stop) into the page cache, and fill the page tables of the maps.

        Raises:
            OSError: If a file has shrunk or cannot be read.
        """
        for number, first, n_rows in self._parts(start, stop):
            self._reader(number).populate(first, n_rows)

    def is_cached(self, start: int, stop: int) -> bool | None:
        """Return whether the page cache holds the rows [start, stop); None if unknown."""
        found = [
            self._reader(number).is_cached(first, n_rows)
            for number, first, n_rows in self._parts(start, stop)
        ]
        return None if None in found else all(found)

    def close(self) -> None:
        """Unmap the files; a gather that is running keeps its map until it ends."""
        self._only = self._memory_rows = None
        super().close()

    def _open_reader(self, number: int) -> FileMap:
        return self._open_map(number)
