"""InMemoryCopy: the rows of a file are loaded into memory while they are already served."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.memory.mapping import block_nbytes, huge
from pinfeed.memory.plan import Allocation
from pinfeed.readahead.base import DISK_SPEED, IN_MEMORY_HINT, OpenBatch
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import StoreRows
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.threads.pool import ThreadPool

logger = logging.getLogger("pinfeed")

# Share of the time. At 0.2, 6 of 9 loops that do nothing were taken for loops that compute; at 0.4,
# none of 6.
_MAX_IDLE_SHARE = 0.4
# Large enough for the disk to be read in sequence, small enough that the end of a loop need not
# wait long for the current chunk.
_CHUNK_BYTES = 8 << 20
# A batch waits for the rest of the file for at most this time, in seconds.
_MAX_WAIT_S = 2.0
# Bytes per second, until a first chunk has been measured.
_ASSUMED_RATE = 1e9
# Gathers before it is judged whether the loop waits for them.
_MIN_GATHERS = 16


class InMemoryCopy:
    """Strategy that keeps a copy of all rows of a read-only store in memory.

    In the first epoch a thread loads the rows chunk by chunk, in sequence. Rows that have not been
    loaded yet are read one by one. If single-row reads cannot keep up with the loop and the load is
    nearly complete, readers wait for it instead, because random reads slow it down. In a
    block-shuffled epoch, chunks are loaded in the order in which they are needed, and readers wait
    for them. A file that was written since it was loaded is loaded again before an epoch begins.

    Raises:
        MemoryError: If the system does not have so much memory.
    """

    def __init__(self, store: AnyShardedStore) -> None:
        self._store = store
        self.row_shape = store.row_shape
        self.dtype = store.dtype
        self.items = (copy_allocation(store),)
        nbytes = store.n_rows * store.row_nbytes
        array: npt.NDArray[Any] = (
            huge(nbytes)[:nbytes].view(store.dtype).reshape(store.n_rows, *store.row_shape)
        )
        self._array = array
        self._rows = ArrayStore(array)
        self._chunk_rows = max(1, _CHUNK_BYTES // max(1, store.row_nbytes))
        self._is_loaded = np.zeros(-(-store.n_rows // self._chunk_rows), np.bool_)
        self._complete = False
        self._version: object = None
        # Guards the chunks that are to be loaded, and the end of loading.
        self._changed = threading.Condition()
        self._chunks_to_load: Iterator[int] = iter(())
        self._in_order = False
        self._stopping = False
        self._begun_s = 0.0
        self._n_loaded = 0
        # Gathers since loading began, and the time between them.
        self._n_gathers = 0
        self._idle_s = 0.0
        self._ended_s = 0.0

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        self._forget_if_written()
        if self._complete:
            yield self._open_batch
            return
        self._chunks_to_load = self._load_order(windows, start, stop)
        self._in_order = windows is not None
        self._stopping = False
        self._begun_s = time.monotonic()
        self._n_loaded = 0
        self._n_gathers = 0
        self._idle_s = 0.0
        self._ended_s = self._begun_s
        with ThreadPool(1, "pinfeed-load") as thread:
            thread.submit(self._load)
            try:
                yield self._open_batch
            finally:
                self._stop()

    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        if self._complete:
            self._rows.gather(rows, out)
            return
        chunks = rows // self._chunk_rows
        self._idle_s += max(0.0, time.monotonic() - self._ended_s)
        if self._in_order or (self._is_starved() and self._remaining_s() < _MAX_WAIT_S):
            self._wait_for(chunks)
        # Looked up before the copy, because a chunk may be loaded while its rows are copied.
        missing = np.flatnonzero(~self._is_loaded[chunks])
        self._rows.gather(rows, out)
        if len(missing):
            self._store.gather_at(rows[missing], out, missing)
        self._n_gathers += 1
        self._ended_s = time.monotonic()

    @property
    def hint(self) -> str:
        if self._complete:
            return IN_MEMORY_HINT
        return (
            f"{self._store.label} is still being brought into memory, {DISK_SPEED} "
            "Later epochs run at the speed of memory."
        )

    def close(self) -> None:
        """Free the memory; a gather that is running keeps it until it ends."""
        self._is_loaded[:] = False
        self._complete = False
        del self._array, self._rows

    def _open_batch(self, position: int, n: int) -> Callable[[Rows], StoreRows]:
        return functools.partial(StoreRows, self)

    def _is_starved(self) -> bool:
        """Return whether readers pause too little between gathers, by estimate.

        Readers race to update the counters; the error does not matter for an estimate.
        """
        elapsed_s = time.monotonic() - self._begun_s
        return self._n_gathers >= _MIN_GATHERS and self._idle_s < _MAX_IDLE_SHARE * elapsed_s

    def _remaining_s(self) -> float:
        """Return the estimated time until all rows are loaded, in seconds."""
        nbytes = np.count_nonzero(~self._is_loaded) * _CHUNK_BYTES
        elapsed_s = max(1e-9, time.monotonic() - self._begun_s)
        rate = self._n_loaded * _CHUNK_BYTES / elapsed_s if self._n_loaded else _ASSUMED_RATE
        return float(nbytes / rate)

    def _forget_if_written(self) -> None:
        """Forget the loaded rows if the file has changed."""
        version = self._store.version
        if version != self._version:
            self._version = version
            self._complete = False
            self._is_loaded[:] = False

    def _load_order(self, windows: Windows | None, start: int, stop: int) -> Iterator[int]:
        """Yield the chunks that are not loaded, in the order in which they are to be loaded."""
        is_listed = self._is_loaded.copy()
        for first, end in _runs(windows, start, stop):
            for chunk in range(first // self._chunk_rows, -(-end // self._chunk_rows)):
                if not is_listed[chunk]:
                    is_listed[chunk] = True
                    yield chunk
        yield from np.flatnonzero(~is_listed).tolist()

    def _load(self) -> None:
        while self._load_next():
            pass

    def _load_next(self) -> bool:
        """Load one chunk, and return True; or return False if none is left."""
        with self._changed:
            chunk = None if self._stopping else next(self._chunks_to_load, None)
        if chunk is None:
            return False
        first = chunk * self._chunk_rows
        rows = np.arange(first, min(first + self._chunk_rows, self._store.n_rows))
        try:
            self._store.gather(rows, self._array[first : first + len(rows)])
        except Exception as error:
            # The batch that needs the rows reads them itself, and raises the error in its turn.
            logger.info(
                "rows are read one by one: bringing %r into memory ended with %r",
                self._store,
                error,
            )
            self._stop()
            return False
        with self._changed:
            self._is_loaded[chunk] = True
            self._n_loaded += 1
            self._complete = bool(self._is_loaded.all())
            self._changed.notify_all()
        return True

    def _wait_for(self, chunks: npt.NDArray[np.int64]) -> None:
        """Wait until chunks are loaded; the waiting reader helps to load."""
        while not self._stopping and not self._is_loaded[chunks].all():
            if not self._load_next():
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopping or bool(self._is_loaded[chunks].all())
                    )

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def copy_allocation(store: AnyShardedStore) -> Allocation:
    """Return the memory that a copy of all rows takes."""
    return Allocation("rows of a file", "host", 1, block_nbytes(store.n_rows * store.row_nbytes))


def _runs(windows: Windows | None, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of rows of the windows of an epoch, if it has windows."""
    if windows is not None:
        for number, _ in windows.spans(start, stop):
            yield from windows.runs(number)
