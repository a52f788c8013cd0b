"""ThreadPool: threads that work for a loop until it ends; Turns, in which they work.

The pools of ``concurrent.futures`` refuse work after the main thread has ended, which would cut off
a loop that runs in another thread. The threads of a ThreadPool continue until all of the program's
own threads have ended. Then the exit hook ends them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from pinfeed.errors import ClosedError
from pinfeed.threads.call import Call
from pinfeed.threads.exit import ENDING, PoolThread, current_owner, exit_hook

T = TypeVar("T")
R = TypeVar("R")

_Calls = queue.SimpleQueue["Call[Any] | weakref.ref[ThreadPool] | None"]
"""Queue of the calls that threads will make; any other entry ends the threads."""


class ThreadPool:
    """Threads that make calls, begun in the order of submission.

    Args:
        n_threads: Number of threads; all start at once.
        name: Prefix of the threads' names.
        prepare: Function that each thread calls first.
        calls: Calls that the first threads begin while other threads still start.
    """

    def __init__(
        self,
        n_threads: int,
        name: str,
        prepare: Callable[[], object] = lambda: None,
        calls: Iterable[Call[Any]] = (),
    ) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        for call in calls:
            self._calls.put(call)
        self.owner = current_owner()
        """The program's own thread for which the pool works."""
        self._is_over = False
        # The threads hold the queue, but not the pool. When a pool is dropped, for example by an
        # interrupt in the code that makes it, a single C function puts the weak reference into the
        # queue, which ends the threads. No interrupt can cut this function in two.
        self._reference = weakref.ref(self, self._calls.put)
        exit_hook.pools.add(self._reference)
        # Waiting for a Call is safe. After an interrupt within Thread.join, Python 3.11 takes a
        # running thread for ended.
        self._loops = [Call(_make_calls, self._calls, prepare) for _ in range(n_threads)]
        self._threads = [
            PoolThread(self.owner, loop.run, f"{name}_{i}") for i, loop in enumerate(self._loops)
        ]
        try:
            exit_hook.check_open()
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            self._calls.put(None)
            exit_hook.pools.discard(self._reference)
            # Two interrupts in quick succession within Thread.start make it fail with an error of
            # its lock.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def submit(self, fn: Callable[..., R], /, *args: Any) -> Call[R]:
        """Make a thread call ``fn(*args)``.

        Raises:
            ClosedError: If the pool is shut down, by its owner or because the program is ending.
        """
        call = Call(fn, *args)
        if self._reference() is None:
            # The garbage collector has dropped the pool, which ends the threads, and now calls code
            # of objects that it frees together with the pool.
            self._join()
            call.run()
            return call
        if self._is_over:
            raise ClosedError(ENDING)
        self._calls.put(call)
        return call

    def map(self, fn: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Submit a call for each item at once; yield the results in the order of the items."""
        calls = deque(self.submit(fn, item) for item in items)
        while calls:
            yield calls.popleft().result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when they have made all submitted calls.

        A pool may be shut down more than once.

        Args:
            wait: Whether to wait until the threads have ended.
            cancel_futures: Whether to cancel the calls that have not begun.
        """
        while cancel_futures and not self._is_over:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if isinstance(call, Call):
                call.fail(CancelledError())
        self._is_over = True
        self._calls.put(None)
        if wait:
            self._join()
        exit_hook.pools.discard(self._reference)

    def _join(self) -> None:
        for loop, thread in zip(self._loops, self._threads, strict=True):
            loop.exception()
            thread.join()


def _make_calls(calls: _Calls, prepare: Callable[[], object]) -> None:
    """Make the calls of a queue, in a thread of a pool, until another entry ends the thread."""
    failure: BaseException | None = None
    try:
        prepare()
    except BaseException as error:
        failure = error
    while isinstance(call := calls.get(), Call):
        if failure is None:
            call.run()
        else:
            call.fail(failure)
        # The thread must not keep the call while it waits for the next one.
        del call
    # The other threads of the pool end by the same entry.
    calls.put(call)
    if call is not None:
        exit_hook.pools.discard(call)


class Turns:
    """Order in which threads do some work, one at a time.

    A thread that does all of it takes its work in this order, and does not wait. An interrupt may
    have kept the turn before from ending.

    Args:
        is_shared: Whether several threads take turns at the same time.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._next = 0
        self._is_shared = is_shared
        self._is_stopped = False
        self._has_changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, turn: int) -> Iterator[None]:
        """Run code in a turn."""
        self.wait_for(turn)
        try:
            yield
        finally:
            self.end()

    def wait_for(self, turn: int) -> None:
        """Wait until all earlier turns have ended, or ``stop`` was called."""
        # Only the thread that has the turn ends it, so a thread whose turn it is needs no lock.
        if self._is_shared and self._next != turn:
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._next == turn or self._is_stopped)

    def stop(self) -> None:
        """Let no thread wait any more. Any thread may call this."""
        with self._has_changed:
            self._is_stopped = True
            self._has_changed.notify_all()

    def end(self) -> None:
        """End the current turn."""
        if not self._is_shared:
            self._next += 1
            return
        with self._has_changed:
            self._next += 1
            self._has_changed.notify_all()
