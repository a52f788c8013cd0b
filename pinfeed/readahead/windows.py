"""WindowReadahead: the windows of a block-shuffled order, read ahead of it in long runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.memory.buffer_pool import BufferPool
from pinfeed.memory.demand import window_allocation
from pinfeed.readahead.base import Serve, StoreRows
from pinfeed.readahead.files import AS_FAST, whole_file
from pinfeed.readahead.window_cursor import Runs, WindowCursor
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.threads.call import Pending
from pinfeed.threads.pool import ThreadPool

# Reads that wait for the disk at a time.
_N_THREADS = 4


class WindowReadahead:
    """Rows are gathered from windows in memory: one is read ahead, the others are those that batches under way are gathered from.

    Args:
        store: A read-only store.
        window_rows: Rows of a window.
        n_batch_rows: Rows of all batches under way.
    """

    def __init__(self, store: AnyShardedStore, window_rows: int, n_batch_rows: int) -> None:
        self._store = store
        self._nbytes = window_rows * store.row_nbytes
        self.items = (window_allocation(window_rows, store.row_nbytes, n_batch_rows),)
        self._pool = BufferPool(self.items[0].count)

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[Serve]:
        assert windows is not None
        with ThreadPool(_N_THREADS, "pinfeed-window") as threads:
            ahead = WindowCursor(
                windows,
                start,
                stop,
                lambda runs: _Window(self._store, runs, self._pool.take(self._nbytes), threads),
            )
            try:
                yield lambda position, n: functools.partial(
                    _WindowRows, self._store, ahead.take(position, n)
                )
            except GeneratorExit:
                # The loop was left; at the end of the data, the last batches may still wait for
                # what is being read.
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    @property
    def hint(self) -> str:
        return f"Windows of {self._store.label} are read ahead in long runs, {AS_FAST} {whole_file(self._store)}"

    def close(self) -> None:
        """Free the windows."""
        self._pool.close()


class _Window:
    """Rows of some runs, being read."""

    def __init__(
        self, store: AnyShardedStore, runs: Runs, memory: npt.NDArray[np.uint8], threads: ThreadPool
    ) -> None:
        self.row_shape = store.row_shape
        self.dtype = store.dtype
        self._starts, stops = np.array(list(runs), np.int64).T
        ends = np.cumsum(stops - self._starts)
        # From a row's number to its place in memory.
        self._shifts = ends - stops
        n_rows = int(ends[-1])
        array: npt.NDArray[Any] = (
            memory[: n_rows * store.row_nbytes].view(store.dtype).reshape(n_rows, *store.row_shape)
        )
        self._rows = ArrayStore(array)
        self._reading: Sequence[Pending[None]] = [
            threads.submit(store.gather, np.arange(start, stop), array[end - (stop - start) : end])
            for start, stop, end in zip(
                self._starts.tolist(), stops.tolist(), ends.tolist(), strict=True
            )
        ]

    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows of the window into ``out``, when it has been read."""
        for reading in self._reading:
            reading.result()
        self._rows.gather(
            rows + self._shifts[np.searchsorted(self._starts, rows, side="right") - 1], out
        )


class _WindowRows:
    """Rows that lie on some windows, one after the other."""

    def __init__(
        self, store: AnyShardedStore, windows: Sequence[tuple[int, _Window]], rows: Rows
    ) -> None:
        self._store = store
        self._rows = rows
        self._windows = windows
        self.shape = (len(rows), *store.row_shape)
        self.dtype = store.dtype

    def cut(self, begin: int, end: int) -> _WindowRows:
        """Rows [begin, end) of these."""
        windows, first = [], 0
        for n, window in self._windows:
            if (here := min(end, first + n) - max(begin, first)) > 0:
                windows.append((here, window))
            first += n
        return _WindowRows(self._store, windows, self._rows[begin:end])

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Gather the rows into ``out``, step by step."""
        begin = 0
        for n, window in self._windows:
            yield from StoreRows(window, self._rows[begin : begin + n]).read(out[begin : begin + n])
            begin += n
