"""RowWriter: a thread without Python that takes rows from a GPU back to their stores."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError
from pinfeed.native.driver import Driver
from pinfeed.native.library import Library, library, packing
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import StagedIndices
from pinfeed.threads.exit import current_owner, exit_hook

_pack_1 = packing(1)
_pack_2 = packing(2)
# PF_STOPPED of pinfeed.h.
_STOPPED = -1

# The numbers of writes begin again after this one.
_LAST_NUMBER = (1 << 32) - 1

# Key of what all writes use.
_ALL = "all"

_SHUT_DOWN = "the loop has ended, and takes no rows to write back; begin another loop"


class Written(ctypes.Structure):
    """Counts of a writer: the structure ``pf_written`` of pinfeed.h."""

    _fields_ = (
        ("n_queued", ctypes.c_uint32),
        ("n_done", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("seconds", ctypes.c_double),
    )


class RowWriter:
    """Writes rows of a device to their stores, in the order of the calls; see write.c.

    The thread of the loop calls ``write``. Any thread may wait, or shut the writer down. The writer
    keeps the memory of each write until it has ended.

    Args:
        driver: Driver of the device.
        side: Handle of the stream of the copies.
        staging: Two page-locked memories of the host, each for the largest write.
        n_pending: Maximum number of writes that have not ended.
        sources: Rows of each part of a write: those that are written from staging memory, then row
            indices for the device, and then rows that it writes itself. Without the last, there
            are no row indices.
        n_threads: Number of threads; with 0, those who wait for a write make it.
        n_staged: Number of parts that have staging memory: all but those of the device.
        direct: Writes of rows by the device itself, see ``RowMoves.description``; None if there
            are none.
        owner: Object that keeps the kernels of the device alive.

    Raises:
        Exception: If a call of the driver failed; the driver's error.
    """

    def __init__(
        self,
        driver: Driver,
        side: int,
        staging: Sequence[npt.NDArray[np.uint8]],
        n_pending: int,
        sources: Sequence[MemoryRows | StagedIndices],
        *,
        n_threads: int,
        n_staged: int,
        direct: npt.NDArray[np.int64] | None,
        owner: object,
    ) -> None:
        found = library()
        assert found is not None
        if n_threads:
            exit_hook.check_open()
        self.owner = current_owner()
        """The program's own thread for which the writer works."""
        self._library = found
        self._driver = driver
        address = ctypes.c_int64()
        # Row indices are staged, but not written to a store.
        n_written = n_staged - (direct is not None)
        # A store is its only part and the bytes of a row; see ``pf_store`` in pinfeed.h.
        stores = [(*rows.description[2:], rows.row_nbytes) for rows in sources[:n_written]]
        stores += [(0,) * 7 + (rows.row_nbytes,) for rows in sources[n_written:]]
        request = (
            driver.address,
            side,
            *(memory.ctypes.data for memory in staging),
            n_pending + 1,
            0 if direct is None else direct.ctypes.data,
            n_written,
            ctypes.addressof(address),
            len(stores),
            *itertools.chain.from_iterable(stores),
        )
        # The memory of each write that has not ended, by its number, and what all writes use.
        memory: dict[Any, object] = {_ALL: (driver, staging, sources, direct, owner)}
        self._memory = memory
        # An interrupt after the next call leaves a writer that is freed.
        end = weakref.finalize(self, _end, found, address, exit_hook.n_forks, memory)
        end.atexit = False
        if error := found.open_writer(packing(len(request))(*request)):
            driver.raise_error(error)
        self._writer = address.value
        self._written = Written.from_address(self._writer)
        self._n_forks = exit_hook.n_forks
        self.is_busy = False
        """Whether a thread without a thread of the writer makes its steps."""
        self._pack_write = packing(5 + 3 * len(stores))
        self._reference = weakref.ref(self)
        if n_threads:
            exit_hook.pools.add(self._reference)
        driver.start_writer(self, n_threads)

    def start(self, n_threads: int) -> None:
        """Start as many threads as the system permits, at most ``n_threads``."""
        self._library.start_writer(_pack_2(self._writer, n_threads - 1))

    @property
    def n_pending(self) -> int:
        """Number of writes that have not ended."""
        written = self._written
        return int(written.n_queued - written.n_done) & _LAST_NUMBER

    @property
    def error(self) -> int:
        """Error of the driver, after which nothing is written; 0 for none."""
        return int(self._written.error)

    @property
    def seconds(self) -> float:
        """Seconds in which rows were written."""
        return float(self._written.seconds)

    def write(
        self,
        stream: int,
        rows: int,
        n: int,
        offsets: Sequence[int],
        values: Sequence[int],
        held: Sequence[int],
        memory: object,
    ) -> None:
        """Queue a write.

        Args:
            stream: Handle of the stream that computes the values.
            rows: Address of the row indices, int64, shape (n,), all distinct.
            n: Number of rows, at least one.
            offsets: Offset of each part in staging memory.
            values: Address of the values of each part; 0 for a store that stays as it is.
            held: Address of memory on the device to which they are copied at once; that of the
                values themselves if they do not change any more.
            memory: Objects on whose memory all this is.

        Raises:
            ClosedError: If the writer was shut down.
            Exception: If a call of the driver failed; the driver's error.
        """
        self._forget()
        request = self._pack_write(
            self._writer, stream, rows, n, len(offsets), *offsets, *values, *held
        )
        number = int(self._written.n_queued)
        self._memory[number] = memory
        # No Python of any thread runs between the first and the last step of this call, which also
        # counts the write. An interrupt after it changes nothing.
        code = self._library.queue_write(request)
        if not code:
            return
        self._memory.pop(number, None)
        if code == _STOPPED:
            raise ClosedError(_SHUT_DOWN)
        self._driver.raise_error(code)

    def wait(self, most_pending: int = 0) -> None:
        """Wait until at most so many writes have not ended, and free the memory of the others."""
        last = (self._written.n_queued - most_pending - 1) & _LAST_NUMBER
        self.is_busy = True
        try:
            while self.n_pending > most_pending:
                # After a signal, the interpreter calls its handler before the next call.
                self._library.wait_write(_pack_2(self._writer, last))
        finally:
            self.is_busy = False
        self._forget()

    def is_computed(self) -> bool:
        """Return whether the device has computed the values of the last write."""
        return bool(self._library.is_write_computed(_pack_1(self._writer)))

    def step(self) -> bool:
        """Make one step of the writer's thread; return whether there was one.

        A simulated device, which has no threads, calls this.
        """
        self.is_busy = True
        try:
            return bool(self._library.step_writer(_pack_1(self._writer)))
        finally:
            self.is_busy = False

    def shutdown(self, wait: bool = True) -> None:
        """Make all writes so far, end the threads, and refuse later writes."""
        # A forked process has none of the threads.
        if self._n_forks == exit_hook.n_forks:
            self.is_busy = True
            self._library.stop_writer(_pack_1(self._writer))
            self._memory.clear()
        exit_hook.pools.discard(self._reference)

    def _forget(self) -> None:
        """Free the memory of writes that have ended."""
        n_done = self._written.n_done
        # Several threads may do this at the same time.
        for number in tuple(self._memory):
            if number != _ALL and (n_done - number - 1) & _LAST_NUMBER <= _LAST_NUMBER >> 1:
                self._memory.pop(number, None)


def _end(found: Library, writer: ctypes.c_int64, n_forks: int, memory: dict[Any, object]) -> None:
    """End and free a writer that was opened, and the memory of its writes."""
    if writer.value:
        found.free_writer(_pack_2(writer.value, n_forks == exit_hook.n_forks))
    memory.clear()
