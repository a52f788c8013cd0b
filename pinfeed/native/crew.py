"""Crew: threads without Python that copy the rows of the next batches."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence

from pinfeed.native.library import library, packing
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.threads.exit import PoolThread, exit_hook

_pack_wait = packing(3)
# The wait was cut off by a signal.
_SIGNAL = -1


class Crew:
    """Threads that copy the rows of the next batches; see crew.c.

    The thread of the loop submits jobs and waits for them. It keeps the memory of each job until it
    has waited for it, or has shut the crew down. Other threads may only shut the crew down.

    Args:
        sources: Rows that every job copies.
        n_threads: Number of threads.
        n_jobs: Maximum number of jobs for which ``wait`` has not returned.
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
        bypass: bool,
    ) -> None:
        found = library()
        assert found is not None
        exit_hook.check_open()
        starter = threading.current_thread()
        self.owner: threading.Thread = starter.owner if isinstance(starter, PoolThread) else starter
        """The program's own thread for which the crew works."""
        self._library = found
        # The crew reads this memory.
        self._sources = sources
        numbers = [number for source in sources for number in source.description]
        pack = packing(5 + len(numbers))
        # Sleeping threads are woken when half of the jobs wait, because waking takes several us.
        self._crew = found.open_crew(
            pack(n_threads, n_jobs, max(1, n_jobs // 2), bypass, len(sources), *numbers)
        )
        if not self._crew:
            raise MemoryError("the system has no memory for the threads that copy rows")
        weakref.finalize(self, found.free_crew, packing(1)(self._crew))
        self._n_forks = exit_hook.n_forks
        self._times = (ctypes.c_double * 2)()
        self._times_address = ctypes.addressof(self._times)
        self._pack_submit = packing(4 + len(sources))
        self._reference = weakref.ref(self)
        exit_hook.pools.add(self._reference)

    def submit(self, rows: int, n: int, outs: Iterable[int]) -> int:
        """Submit a job, and return its number.

        Args:
            rows: Address of the row indices, int64, shape (n,).
            n: Number of rows.
            outs: For each source, the address of its rows in the batch.
        """
        return self._library.submit(self._pack_submit(self._crew, rows, 0, n, *outs))

    def wait(self, number: int) -> tuple[int, float, float]:
        """Wait for a job, and copy a part of it meanwhile.

        Args:
            number: Number of the job.

        Returns:
            0, or 1 + the number of a source that could not be read; and the times at which the
            copy began and ended, in seconds of ``time.perf_counter``.
        """
        request = _pack_wait(self._crew, number, self._times_address)
        # After a signal, the interpreter calls its handler before the next call.
        while (failed := self._library.wait(request)) == _SIGNAL:
            pass
        return failed, self._times[0], self._times[1]

    def shutdown(self, wait: bool = True) -> None:
        """End the threads, so that only ``wait`` copies. A second call does nothing."""
        # A forked process has none of the threads.
        if self._n_forks == exit_hook.n_forks:
            self._library.stop_crew(packing(1)(self._crew))
        exit_hook.pools.discard(self._reference)
