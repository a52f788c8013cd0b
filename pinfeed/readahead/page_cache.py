"""PageCacheReadahead: rows of a file through the page cache, which is filled ahead of them in sequence."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.base import Serve, StoreRows
from pinfeed.readahead.files import whole_file
from pinfeed.readahead.window_cursor import Runs, WindowCursor
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.threads.pool import ThreadPool

# Advice is given in pieces: it takes as long as the disk has room for it, and the loop may end
# meanwhile.
_STEP_BYTES = 8 << 20


class PageCacheReadahead:
    """Rows are gathered from a file, whose page cache the kernel is told to fill: the whole of it, once, in sequence; or window by window.

    A disk gives many times as much in sequence as in random rows; these are soon found in memory
    that is the kernel's.
    """

    items: tuple[Allocation, ...] = ()

    def __init__(self, store: AnyShardedStore) -> None:
        self._store = store
        self._told = 0
        self._stopping = False
        self._step = max(1, _STEP_BYTES // max(1, store.row_nbytes))

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[Serve]:
        self._stopping = False
        with ThreadPool(1, "pinfeed-advise") as adviser:
            ahead = None
            if windows is None:
                adviser.submit(self._tell_all)
            else:
                ahead = WindowCursor(
                    windows, start, stop, lambda runs: adviser.submit(self._tell, runs)
                )

            def serve(position: int, n: int) -> Callable[[Rows], StoreRows]:
                if ahead is not None:
                    ahead.take(position, n)
                return functools.partial(StoreRows, self._store)

            try:
                yield serve
            finally:
                self._stopping = True

    @property
    def hint(self) -> str:
        return f"Rows of {self._store.label} come from the page cache, as far as it holds them. {whole_file(self._store)}"

    def close(self) -> None:
        """There is nothing."""

    def _tell_all(self) -> None:
        while self._told < self._store.n_rows and not self._stopping:
            end = min(self._told + self._step, self._store.n_rows)
            self._store.will_gather(self._told, end)
            self._told = end

    def _tell(self, runs: Runs) -> None:
        for run in runs:
            if not self._stopping:
                self._store.will_gather(*run)
