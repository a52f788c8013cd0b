"""LoopThreads: the reader threads and the writer thread of one loop."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.errors import ClosedError
from pinfeed.native.engine import Engine
from pinfeed.native.writer import RowWriter
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.threads.call import Call, Pending, Workers
from pinfeed.threads.exit import exit_hook

N_SCATTER_HELPERS = max(0, min(len(os.sched_getaffinity(0)) // 2, 4) - 1)
"""Number of threads that help the writer to scatter the rows of a write-back; together they use at
most half of the cores."""


_CLOSED = (
    "another thread closed the feeder while its loop ran; join the thread of the loop before "
    "closing the feeder"
)


class LoopThreads:
    """Reader threads and the writer thread of one loop.

    ``start_readers`` starts the reader threads and those of transforms. The writer thread starts
    with the first write-back, and may have helpers. At depth 0, a loop has no threads, and the
    caller makes every call itself.

    Args:
        device: Device that makes the threads.
        schedule: Depth of the loop, and number of reader threads.
        is_named: Whether a profiler of the device should show each call under a name.
    """

    def __init__(
        self, device: Device, schedule: PrefetchSchedule, *, is_named: bool = False
    ) -> None:
        self._device = device
        self._schedule = schedule
        self.n_forks = exit_hook.n_forks
        """Number of forks until the loop began; another number shows a forked process."""
        self.has_ended = False
        """Whether the loop has ended and its threads are joined."""
        self._is_named = is_named
        # Identifiers of the threads that have written rows back.
        self._writers: set[int] = set()
        # Another thread may close the feeder while the loop writes rows back. Without this lock, it
        # could join the writer thread just before it starts for the write-back, or free memory that
        # the device is about to write from. A signal handler may close the feeder, too.
        self._joining = threading.RLock()
        self._are_writers_joined = False
        # All threads that ``start_readers`` has started.
        self._readers: list[Workers] = []
        self.engine: Engine | None = None
        """Threads that gather rows without Python; None if the loop has none."""
        self.row_writer: RowWriter | None = None
        """Threads that write rows back without Python; None before the first write-back."""
        self._writer: Workers | None = None
        # Threads that help the writer.
        self._helpers: Workers | None = None

    def start_readers(self, step_threads: Iterable[int] = ()) -> list[Workers]:
        """Start the reader threads, and threads for each step after them, and return them.

        Args:
            step_threads: Number of threads of each step, of at most two.
        """
        names = ("pinfeed-read", "pinfeed-transform", "pinfeed-device-transform")
        for name, n_threads in zip(names, (self._schedule.n_readers, *step_threads), strict=False):
            self._readers.append(self._device.worker(name, n_threads))
        return self._readers

    def write_now(self, batch: int, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn(*args)`` for a batch in this thread."""
        guarded(self._named("write", batch, fn), *args)

    def submit_write(self, batch: int, fn: Callable[..., Any], *args: Any) -> Pending[Any]:
        """Make the writer thread call ``fn(*args)`` for a batch."""
        with self._joining:
            self._require_writers()
            if self._writer is None:
                self._writer = self._device.worker("pinfeed-write")
            return self._writer.submit(self._write, self._named("write", batch, fn), *args)

    def queue_write(self, batch: int, fn: Callable[..., object], *args: Any) -> bool:
        """Call ``fn(*args)``, which queues a write of a batch on the device.

        Returns:
            False if a signal handler has closed the feeder in the meantime.

        Raises:
            ClosedError: If another thread has closed the feeder.
        """
        with self._joining:
            self._require_writers()
            self._named("write", batch, fn)(*args)
            return not self._are_writers_joined

    def open_row_writer(self, make: Callable[[], RowWriter]) -> RowWriter:
        """Return the writer without Python, which ``make`` opens before the first write-back."""
        with self._joining:
            self._require_writers()
            if self.row_writer is None:
                self.row_writer = make()
            if self._are_writers_joined:
                # A signal handler has closed the feeder since.
                self.row_writer.shutdown()
            return self.row_writer

    def scatter_all(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make several calls, in several threads if the machine has cores (writer).

        Return, or raise the first error, when all calls have ended.
        """
        own: list[Call[object]] = []
        pending: list[Pending[object]] = []
        made: Call[object] | None = None
        one: Pending[object] | None = None
        submitted: Pending[object] | None = None
        for i, call in enumerate(calls):
            submitted = None
            if i % (1 + N_SCATTER_HELPERS):
                # If the program is ending, or no thread starts, this thread makes the call.
                with contextlib.suppress(Exception):
                    if self._helpers is None:
                        name = "pinfeed-scatter-helper"
                        self._helpers = self._device.worker(name, N_SCATTER_HELPERS)
                    submitted = self._helpers.submit(guarded, call)
            if submitted is None:
                own.append(Call(call))
            else:
                pending.append(submitted)
        try:
            for made in own:
                made.run()
            for one in (*pending, *own):
                # All have ended when the first error is raised.
                one.exception()
            for one in (*pending, *own):
                one.result()
        finally:
            # An error's traceback keeps this frame, which must not keep the calls, because a call
            # keeps its error.
            own.clear()
            pending.clear()
            one = made = submitted = None

    def join_readers(self) -> None:
        """Wait until the reader threads, the transform threads and the engine have ended."""
        try:
            if self.engine is not None:
                self.engine.shutdown()
        finally:
            for worker in self._readers:
                worker.shutdown(wait=True)

    def join_writers(self) -> None:
        """Wait until the writer thread has made all submitted calls."""
        with self._joining:
            self._are_writers_joined = True
        if self.row_writer is not None:
            self.row_writer.shutdown()
        if self._writer is not None:
            self._writer.shutdown(wait=True)
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)

    @property
    def is_inside(self) -> bool:
        """Whether the current thread works for a loop, and so cannot wait for other threads."""
        return threading.get_ident() in self._writers or self.is_in_pool

    @property
    def is_in_pool(self) -> bool:
        """Whether the current thread belongs to a pool."""
        return threading.current_thread().name.startswith("pinfeed-")

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked while the loop ran, and so has none of its threads."""
        return self.n_forks != exit_hook.n_forks and not self.has_ended

    def require_not_forked(self) -> None:
        """Check that this is the process in which the loop began.

        Raises:
            ClosedError: If it is another process.
        """
        if self.is_forked:
            raise ClosedError(
                "this process was forked while the loop ran, and does not have the loop's threads; "
                "make another feeder in this process"
            )

    def require_running(self) -> None:
        """Check that the loop runs, in this process.

        Raises:
            ClosedError: If the process is a fork, or another thread has closed the feeder.
        """
        if self.n_forks != exit_hook.n_forks:
            self.require_not_forked()
        if self.has_ended:
            raise ClosedError(_CLOSED)

    def _require_writers(self) -> None:
        if self._are_writers_joined:
            raise ClosedError(_CLOSED)

    def _named(self, lane: str, batch: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, under a name if the profiler of a device should show it."""
        if not self._is_named:
            return fn
        return functools.partial(call_named, self._device, f"{lane} {batch}", fn)

    def _write(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._writers.add(threading.get_ident())
        return guarded(fn, *args)


def call_named(device: Device, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)`` under a name that the profiler of a GPU shows, such as ``write 12``."""
    with device.named(f"pinfeed {name}"):
        try:
            return fn(*args)
        finally:
            # An error's traceback keeps this frame, which must not keep the call, because the call
            # keeps the error.
            del fn, args
