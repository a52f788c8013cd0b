"""PageCacheReadahead: reads rows of a file through the page cache, which the kernel fills ahead."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.base import OpenBatch, whole_file_hint
from pinfeed.readahead.windows import RowRuns, WindowCursor
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.base import StoreRows, rows_in
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.threads.pool import ThreadPool

UNCOUNTED_CACHE = "read through the OS page cache, which the plan does not count"
"""Beginning of the reason for this strategy, which maps no page."""

# The strategy advises the kernel in chunks, because each call may block until the disk has accepted
# it, and the loop may end in between.
_CHUNK_BYTES = 8 << 20


class PageCacheReadahead:
    """Strategy that gathers rows from a file and lets the kernel fill the page cache ahead.

    In a block-shuffled epoch, the kernel fills the page cache window by window. In any other order,
    it reads the whole file once, in sequence. A disk reads many times faster in sequence than in
    random order, so random reads soon find their rows in the page cache.

    Args:
        store: The rows.
        advice: Advice on a better order, for a loop that waits for the rows.
    """

    items: tuple[Allocation, ...] = ()

    def __init__(self, store: AnyShardedStore, advice: str = "") -> None:
        self._store = store
        self._advice = advice
        self._n_advised = 0
        self._stopping = False
        self._chunk_rows = rows_in(store, _CHUNK_BYTES)

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        self._stopping = False
        with ThreadPool(1, "pinfeed-advise") as adviser:
            cursor = None
            if windows is None:
                adviser.submit(self._advise_all)
            else:
                cursor = WindowCursor(
                    windows, start, stop, lambda runs: adviser.submit(self._advise, runs)
                )

            def open_batch(position: int, n: int) -> Callable[[Rows], StoreRows]:
                if cursor is not None:
                    cursor.take(position, n)
                return functools.partial(StoreRows, self._store)

            try:
                yield open_batch
            finally:
                self._stopping = True

    @property
    def hint(self) -> str:
        how = (
            f"Rows of {self._store.label} are read from the OS page cache if it holds them, and "
            "from the disk otherwise."
        )
        return " ".join(filter(None, (how, self._advice, whole_file_hint(self._store))))

    def memory_rows(self) -> None:
        """Return None, because the rows are read from the file."""

    def close(self) -> None:
        """Do nothing: the page cache belongs to the kernel."""

    def _advise_all(self) -> None:
        while self._n_advised < self._store.n_rows and not self._stopping:
            end = min(self._n_advised + self._chunk_rows, self._store.n_rows)
            self._store.will_gather(self._n_advised, end)
            self._n_advised = end

    def _advise(self, runs: RowRuns) -> None:
        for start, stop in runs:
            if not self._stopping:
                self._store.will_gather(start, stop)
