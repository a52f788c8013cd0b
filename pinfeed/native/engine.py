"""Engine: threads without Python that gather the rows of the next batches, and move them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError
from pinfeed.native.driver import Driver
from pinfeed.native.library import Library, library, packing
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import StagedIndices
from pinfeed.threads.exit import current_owner, exit_hook

_pack_wait = packing(4)
# The wait was cut off by a signal.
_SIGNAL = -1

_SHUT_DOWN = "the loop has ended; begin another loop"


class Result(ctypes.Structure):
    """Result of ``Engine.wait``: the structure ``pf_result`` of pinfeed.h."""

    _fields_ = (
        ("begin_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("failed", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("is_idle", ctypes.c_int64),
    )


class Staged(NamedTuple):
    """Memory, stream and driver by which an engine moves its jobs to a device."""

    driver: Driver
    side: int
    """Handle of the stream of the copies."""
    slots: Sequence[int]
    """Address of the page-locked staging memory of each slot; the jobs use them in turn."""
    n_parts: int
    """Number of parts of a job on the device."""
    owner: object
    """Object that keeps this memory alive."""
    read: npt.NDArray[np.int64] | None = None
    """Rows that the device reads itself; see ``RowMoves.description``."""


class Engine:
    """Threads that gather the rows of the next batches, and move them to a GPU; see engine.c.

    The thread of the loop submits jobs and waits for them. Other threads may only shut the engine
    down. The engine keeps the memory of each job until the thread has waited for it, whatever cuts
    off the loop, because its threads would write into memory of others.

    Args:
        sources: Rows that every job gathers, or row indices for the device.
        n_threads: Number of threads.
        n_jobs: Maximum number of jobs for which ``wait`` has not returned.
        ring_at: Number of jobs with rows to gather at which sleeping threads are woken; the waiting
            thread gathers fewer itself.
        bypass: Whether rows are written past the caches of the processor.
        staged: Memory and driver to move the jobs to a device; None for batches in host memory.

    Raises:
        MemoryError: If memory is missing.
    """

    def __init__(
        self,
        sources: Sequence[MemoryRows | StagedIndices],
        *,
        n_threads: int,
        n_jobs: int,
        ring_at: int,
        bypass: bool,
        staged: Staged | None = None,
    ) -> None:
        found = library()
        assert found is not None
        if n_threads:
            exit_hook.check_open()
        self.owner = current_owner()
        """The program's own thread for which the engine works."""
        self._library = found
        numbers = [number for source in sources for number in source.description]
        pack = packing(4 + len(numbers))
        self._engine = found.open_engine(pack(n_jobs, ring_at, bypass, len(sources), *numbers))
        if not self._engine:
            raise MemoryError("the system has no memory for the threads that gather rows")
        # The memory that the threads may use: the sources, and each job for which ``wait`` has not
        # returned, by number. It is empty after the threads have ended.
        self._memory: list[dict[Any, object]] = [{"sources": sources, "driver": staged}]
        end = weakref.finalize(self, _end, found, self._engine, exit_hook.n_forks, self._memory)
        # A program may end within a loop, which then uses the engine once more.
        end.atexit = False
        self._n_forks = exit_hook.n_forks
        self._driver = None if staged is None else staged.driver
        if staged is not None:
            slots = staged.slots
            read = 0 if staged.read is None else staged.read.ctypes.data
            request = (self._engine, staged.driver.address, staged.side, read, len(slots), *slots)
            if error := found.use_driver(packing(len(request))(*request)):
                staged.driver.raise_error(error)
        self.result = Result()
        """Result of the last ``wait``."""
        self._result_address = ctypes.addressof(self.result)
        self.n_submitted = 0
        """Number of submitted jobs, which is the number of the next one."""
        self._n_waited = 0
        self._is_shut = False
        self._n_sources = len(sources)
        n_devices = 0 if staged is None else staged.n_parts
        self._pack_submit = packing(5 + len(sources) + n_devices)
        self._reference = weakref.ref(self)
        if n_threads:
            exit_hook.pools.add(self._reference)
        # An interrupt before this step leaves no threads, and one after it an owner of them.
        if self._driver is None:
            self.start(n_threads)
        else:
            self._driver.start(self, n_threads)

    @property
    def is_open(self) -> bool:
        """Whether the engine was not shut down."""
        return bool(self._memory)

    def start(self, n_threads: int) -> None:
        """Start as many threads as the system permits, at most ``n_threads``."""
        self._library.start_engine(packing(2)(self._engine, n_threads))

    def submit(
        self,
        rows: int,
        n: int,
        outs: Iterable[int],
        memory: object,
        devices: Iterable[int] = (),
        stream: int = 0,
    ) -> int:
        """Submit a job, and return its number.

        Args:
            rows: Address of the row indices, int64, shape (n,).
            n: Number of rows.
            outs: For each source, the address of its rows in the batch, or, if the job moves to a
                device, their offset in staging memory, in ascending order.
            memory: Objects on whose memory the row indices and the batch are.
            devices: Address on the device of the rows of each source, and then of each table that
                the device reads itself.
            stream: Handle of the stream whose later work may use this memory.

        Raises:
            ClosedError: If the engine was shut down.
            MemoryError: If memory is missing.
        """
        request = self._pack_submit(self._engine, rows, n, stream, self._n_sources, *outs, *devices)
        number = self.n_submitted
        try:
            self._memory[0][number] = memory
        except IndexError:
            raise ClosedError(_SHUT_DOWN) from None
        if self._library.submit(request) < 0:
            raise MemoryError(f"the system has no memory to gather a batch of {n:,} rows")
        self.n_submitted = number + 1
        return number

    def wait(self, number: int, stream: int = 0) -> Result:
        """Wait for a job, and gather parts of it while other threads gather the rest.

        Args:
            number: Number of the job.
            stream: Handle of the stream whose later work sees the rows.

        Returns:
            The result, which the next call changes. Its times are in seconds of
            ``time.perf_counter``.

        Raises:
            ClosedError: If the engine was shut down.
            Exception: If a call of the driver failed; the driver's error.
        """
        # This thread gathers and copies, too, also after another one has shut the engine down.
        try:
            memory = self._memory[0]
        except IndexError:
            raise ClosedError(_SHUT_DOWN) from None
        request = _pack_wait(self._engine, number, stream, self._result_address)
        # After a signal, the interpreter calls its handler before the next call.
        while self._library.wait(request) == _SIGNAL:
            pass
        if self._is_shut:
            self._library.stop_engine(packing(1)(self._engine))
        del memory[number]
        self._n_waited = number + 1
        if self.result.error and self._driver is not None:
            self._driver.raise_error(self.result.error)
        return self.result

    def wait_again(self, stream: int) -> None:
        """Make later work of another stream see the rows of the job that was last waited for."""
        error = self._library.wait_again(packing(3)(self._engine, self._n_waited - 1, stream))
        if error and self._driver is not None:
            self._driver.raise_error(error)

    def help(self, number: int) -> bool:
        """Gather one piece of a job, as a thread would; return whether there was one.

        A simulated device, which has no threads, calls this.
        """
        return bool(self._library.help(packing(2)(self._engine, number)))

    def gather(self, number: int) -> None:
        """Gather a job in this thread, now."""
        while self.help(number):
            pass
        if self._is_shut:
            # Another thread has shut the engine down before these copies were queued.
            self._library.stop_engine(packing(1)(self._engine))

    def shutdown(self, wait: bool = True) -> None:
        """End the threads, and drop the memory of all jobs. A second call does nothing."""
        # A forked process has none of the threads. The garbage collector calls ``_end`` before it
        # closes the generator of a loop that shuts the engine down.
        if self._memory and self._n_forks == exit_hook.n_forks:
            # A thread that waits now stops the engine again, because it may have queued copies.
            self._is_shut = True
            self._library.stop_engine(packing(1)(self._engine))
            self._memory.clear()
        exit_hook.pools.discard(self._reference)


def _end(found: Library, engine: int, n_forks: int, memory: list[dict[Any, object]]) -> None:
    """End an engine that Python frees, and then free it and the memory of its jobs."""
    found.free_engine(packing(2)(engine, n_forks == exit_hook.n_forks))
    memory.clear()
