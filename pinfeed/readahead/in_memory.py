"""InMemoryCopy: the rows of a file in memory, brought in while they are served."""

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
from pinfeed.readahead.base import IN_MEMORY, Serve, StoreRows
from pinfeed.readahead.files import AS_FAST
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.threads.pool import ThreadPool

logger = logging.getLogger("pinfeed")

# Of the time; at 0.2, 6 of 9 loops that do nothing passed for loops that compute, at this none
# of 6.
_FEW_PAUSES = 0.4
# Large enough for the disk to be read in sequence, small enough for a loop's end not to wait for
# it.
_PIECE_BYTES = 8 << 20
# So long a batch may wait for the rest of the file.
_SOON_S = 2.0
# Bytes per second, until there is a piece to go by.
_FIRST_GUESS = 1e9
# Gathers after which it is judged whether the loop waits for them.
_N_JUDGED = 16


class InMemoryCopy:
    """All rows of a read-only store, in memory of their own: in the first epoch they are brought in piece by piece, in sequence.

    Rows that are not there yet are read one by one. A loop that asks for more than that gives had
    better wait, as it slows the bringing down: it does if all will be there soon. In a
    block-shuffled epoch, pieces come in the order in which they are needed, and are waited for. A
    file that was written since its rows came in is brought in again before an epoch begins.

    Raises:
        OSError: The system has not so much memory.
    """

    def __init__(self, store: AnyShardedStore) -> None:
        self._store = store
        self.row_shape = store.row_shape
        self.dtype = store.dtype
        self.items = (resident_item(store),)
        nbytes = store.n_rows * store.row_nbytes
        array: npt.NDArray[Any] = (
            huge(nbytes)[:nbytes].view(store.dtype).reshape(store.n_rows, *store.row_shape)
        )
        self._array = array
        self._rows = ArrayStore(array)
        self._piece_rows = max(1, _PIECE_BYTES // max(1, store.row_nbytes))
        self._ready = np.zeros(-(-store.n_rows // self._piece_rows), np.bool_)
        self._complete = False
        self._version: object = None
        # Guards what is below.
        self._changed = threading.Condition()
        self._pending: Iterator[int] = iter(())
        self._in_order = self._stopping = False
        self._begun_s = 0.0
        self._n_brought = 0
        # Of those with rows missing, and the time between them.
        self._n_gathers = 0
        self._idle_s = 0.0
        self._ended_s = 0.0

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[Serve]:
        self._refresh()
        if self._complete:
            yield self._part
            return
        self._pending = self._order(windows, start, stop)
        self._in_order = windows is not None
        self._stopping = False
        self._begun_s = time.monotonic()
        self._n_brought = 0
        self._n_gathers = 0
        self._idle_s = 0.0
        self._ended_s = self._begun_s
        with ThreadPool(1, "pinfeed-bring") as thread:
            thread.submit(self._bring)
            try:
                yield self._part
            finally:
                self._stop()

    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Copy rows into ``out``, as a Store does."""
        if self._complete:
            self._rows.gather(rows, out)
            return
        pieces = rows // self._piece_rows
        self._idle_s += max(0.0, time.monotonic() - self._ended_s)
        if self._in_order or (self._is_starved() and self._rest_s() < _SOON_S):
            self._await(pieces)
        # Looked up first: a piece may come while its rows are copied.
        missing = np.flatnonzero(~self._ready[pieces])
        self._rows.gather(rows, out)
        if len(missing):
            self._store.gather_at(rows[missing], out, missing)
        self._n_gathers = self._n_gathers + 1
        self._ended_s = time.monotonic()

    @property
    def hint(self) -> str:
        if self._complete:
            return IN_MEMORY
        return f"{self._store.label} is still being brought into memory, {AS_FAST} Later epochs run at the speed of memory."

    def close(self) -> None:
        """Free the memory; what is being gathered from it keeps it until then."""
        self._ready[:] = self._complete = False
        del self._array, self._rows

    def _is_starved(self) -> bool:
        """Whether readers have had hardly a pause between gathers, as far as that can be told: races between them count for nothing."""
        return self._n_gathers >= _N_JUDGED and self._idle_s < _FEW_PAUSES * (
            time.monotonic() - self._begun_s
        )

    def _rest_s(self) -> float:
        """The time until all rows will be there, as far as that can be told, in seconds."""
        rest = np.count_nonzero(~self._ready) * _PIECE_BYTES
        spent_s = max(1e-9, time.monotonic() - self._begun_s)
        return float(
            rest / (self._n_brought * _PIECE_BYTES / spent_s if self._n_brought else _FIRST_GUESS)
        )

    def _part(self, position: int, n: int) -> Callable[[Rows], StoreRows]:
        return functools.partial(StoreRows, self)

    def _refresh(self) -> None:
        """Forget rows that may have changed in the file."""
        version = self._store.version
        if version != self._version:
            self._version = version
            self._complete = False
            self._ready[:] = False

    def _order(self, windows: Windows | None, start: int, stop: int) -> Iterator[int]:
        """The pieces that are not there yet, in the order in which they are to come."""
        size, taken = self._piece_rows, self._ready.copy()
        spans = windows.spans(start, stop) if windows is not None else []
        for number, _ in spans:
            for first, end in windows.runs(number) if windows is not None else []:
                for piece in range(first // size, -(-end // size)):
                    if not taken[piece]:
                        taken[piece] = True
                        yield piece
        yield from np.flatnonzero(~taken).tolist()

    def _bring(self) -> None:
        while self._bring_next():
            pass

    def _bring_next(self) -> bool:
        """Bring one piece; False if none is left."""
        with self._changed:
            piece = None if self._stopping else next(self._pending, None)
        if piece is None:
            return False
        first = piece * self._piece_rows
        rows = np.arange(first, min(first + self._piece_rows, self._store.n_rows))
        try:
            self._store.gather(rows, self._array[first : first + len(rows)])
        except Exception as error:
            # The batch that needs the rows meets it too, and raises it in its turn.
            logger.info(
                "rows are read one by one: bringing %r into memory ended with %r",
                self._store,
                error,
            )
            self._stop()
            return False
        with self._changed:
            self._ready[piece], self._n_brought = True, self._n_brought + 1
            self._complete = bool(self._ready.all())
            self._changed.notify_all()
        return True

    def _await(self, pieces: npt.NDArray[np.int64]) -> None:
        """Wait for pieces; a reader that has to, helps."""
        while not self._stopping and not self._ready[pieces].all():
            if not self._bring_next():
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopping or bool(self._ready[pieces].all())
                    )

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def resident_item(store: AnyShardedStore) -> Allocation:
    """The memory that it takes."""
    return Allocation("rows of a file", "host", 1, block_nbytes(store.n_rows * store.row_nbytes))
