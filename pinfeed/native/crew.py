"""Crew: threads without Python that copy the rows of the next batches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from pinfeed.errors import ClosedError
from pinfeed.native.library import Library, library, packing
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.threads.exit import current_owner, exit_hook

_pack_wait = packing(3)
# The wait was cut off by a signal.
_SIGNAL = -1

_SHUT_DOWN = "the loop has ended; begin another loop"


class Crew:
    """Threads that copy the rows of the next batches; see crew.c.

    The thread of the loop submits jobs and waits for them. Other threads may only shut the crew
    down. The crew keeps the memory of each job until the thread has waited for it, whatever cuts
    off the loop, because its threads would copy into memory of others.

    Args:
        sources: Rows that every job copies.
        n_threads: Number of threads.
        n_jobs: Maximum number of jobs for which ``wait`` has not returned.
        ring_at: Number of jobs with rows to copy at which sleeping threads are woken; the waiting
            thread copies fewer itself.
        bypass: Whether rows are written past the caches of the processor.

    Raises:
        MemoryError: If memory is missing.
    """

    def __init__(
        self,
        sources: Sequence[MemoryRows],
        *,
        n_threads: int,
        n_jobs: int,
        ring_at: int,
        bypass: bool,
    ) -> None:
        found = library()
        assert found is not None
        if n_threads:
            exit_hook.check_open()
        self.owner = current_owner()
        """The program's own thread for which the crew works."""
        self._library = found
        numbers = [number for source in sources for number in source.description]
        pack = packing(4 + len(numbers))
        self._crew = found.open_crew(pack(n_jobs, ring_at, bypass, len(sources), *numbers))
        if not self._crew:
            raise MemoryError("the system has no memory for the threads that copy rows")
        # The memory that the threads may use: the sources, and each job for which ``wait`` has not
        # returned, by number. It is empty after the threads have ended.
        self._memory: list[dict[Any, object]] = [{"sources": sources}]
        end = weakref.finalize(self, _end, found, self._crew, exit_hook.n_forks, self._memory)
        # A program may end within a loop, which then uses the crew once more.
        end.atexit = False
        self._n_forks = exit_hook.n_forks
        self._times = (ctypes.c_double * 2)()
        self._times_address = ctypes.addressof(self._times)
        self._next_number = 0
        self._pack_submit = packing(4 + len(sources))
        self._reference = weakref.ref(self)
        if n_threads:
            exit_hook.pools.add(self._reference)
        # An interrupt before this step leaves no threads, and one after it an owner of them.
        found.start_crew(packing(2)(self._crew, n_threads))

    def submit(self, rows: int, n: int, outs: Iterable[int], memory: object) -> int:
        """Submit a job, and return its number.

        Args:
            rows: Address of the row indices, int64, shape (n,).
            n: Number of rows.
            outs: For each source, the address of its rows in the batch.
            memory: Objects on whose memory the row indices and the batch are.

        Raises:
            ClosedError: If the crew was shut down.
        """
        if not self._memory:
            raise ClosedError(_SHUT_DOWN)
        request = self._pack_submit(self._crew, rows, 0, n, *outs)
        number = self._next_number
        self._memory[0][number] = memory
        self._next_number = self._library.submit(request) + 1
        return number

    def wait(self, number: int) -> tuple[int, float, float]:
        """Wait for a job, and copy parts of it while other threads copy the rest.

        Args:
            number: Number of the job.

        Returns:
            0, or 1 + the number of a source that could not be read; and the times at which the
            copy began and ended, in seconds of ``time.perf_counter``.

        Raises:
            ClosedError: If the crew was shut down.
        """
        if not self._memory:
            raise ClosedError(_SHUT_DOWN)
        # This thread copies, too, also after another one has shut the crew down.
        memory = self._memory[0]
        request = _pack_wait(self._crew, number, self._times_address)
        # After a signal, the interpreter calls its handler before the next call.
        while (failed := self._library.wait(request)) == _SIGNAL:
            pass
        del memory[number]
        return failed, self._times[0], self._times[1]

    def shutdown(self, wait: bool = True) -> None:
        """End the threads, and drop the memory of all jobs. A second call does nothing."""
        # A forked process has none of the threads. The garbage collector calls ``_end`` before it
        # closes the generator of a loop that shuts the crew down.
        if self._memory and self._n_forks == exit_hook.n_forks:
            self._library.stop_crew(packing(1)(self._crew))
            self._memory.clear()
        exit_hook.pools.discard(self._reference)


def _end(found: Library, crew: int, n_forks: int, memory: list[dict[Any, object]]) -> None:
    """End a crew that Python frees, and then free it and the memory of its jobs."""
    found.free_crew(packing(2)(crew, n_forks == exit_hook.n_forks))
    memory.clear()
