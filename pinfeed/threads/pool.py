"""ThreadPool: threads that work for a loop until it ends, even where the main thread has ended before.

The pools of ``concurrent.futures`` take no more work once the main thread has ended, which would
cut off a loop that runs in another thread. Here, threads work on until every thread of the
program's own has ended; then they end by themselves.
"""

from __future__ import annotations

# With its threads, whose module cannot be imported any more when the main thread has ended: torch
# imports it as well.
import concurrent.futures.thread
import functools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from pinfeed.errors import ClosedError

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


_ENDING = "the program ends, and the threads of its loops have ended; end each loop before"


class Pending(Protocol[R_co]):
    """The result of a call that another thread makes; ``concurrent.futures.Future`` is one."""

    def done(self) -> bool: ...
    def result(self) -> R_co: ...
    def exception(self) -> BaseException | None: ...


class Workers(Protocol):
    """Threads that make calls, begun in the order in which they were submitted; ``concurrent.futures.Executor`` is one."""

    def submit(self, fn: Callable[..., R], /, *args: Any) -> Pending[R]: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class Call(Generic[R]):
    """A function, its arguments, and what it returned or raised once ``run`` has been called.

    A thread waits for it in one call into C, which an interrupt ends without harm. The condition
    that a ``Future`` waits with is Python code, and an interrupt within it may leave its lock held.
    """

    def __init__(self, fn: Callable[..., R], *args: Any) -> None:
        self._fn: Callable[[], R] | None = functools.partial(fn, *args)
        self._running = threading.Lock()
        self._running.acquire()
        self._done = False
        self._value: R
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function."""
        fn = self._fn
        self._fn = None
        assert fn is not None
        try:
            self._value = fn()
        except BaseException as error:
            self.fail(error)
            # The error's traceback keeps this frame, which must keep neither the error nor the
            # arguments.
            del fn, self
        else:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Let ``error`` be what the function raised; it is not called."""
        self._fn = None
        self._error = error
        self._end()

    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._done

    def exception(self) -> BaseException | None:
        """Wait until the function has ended; return its error, or None."""
        self._wait()
        return self._error

    def result(self) -> R:
        """Wait until the function has ended; return its result.

        Raises:
            Exception: If the function raised it.
        """
        self._wait()
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            # The error's traceback keeps this frame, which must not keep the error.
            del self

    def _wait(self) -> None:
        if not self._done:
            with self._running:
                pass

    def _end(self) -> None:
        self._done = True
        self._running.release()


_Calls = queue.SimpleQueue["Call[Any] | weakref.ref[ThreadPool] | None"]
"""The calls that threads are to make; anything else ends the threads."""


class ThreadPool:
    """Threads that make calls, begun in the order in which they were submitted.

    Args:
        n_threads: Number of threads; all are started at once.
        name: What their names begin with.
        prepare: What each of them calls before anything else.
        calls: What the first threads begin with while others are still started.
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
        starter = threading.current_thread()
        self.owner: threading.Thread = starter.owner if isinstance(starter, _Thread) else starter
        """The program's own thread that the pool works for."""
        self._is_over = False
        # The threads hold the queue and not the pool. One that is dropped, as by an interrupt that
        # hits whoever makes it, ends them: its reference is what its queue is given then, by one
        # call in C, which no interrupt can cut in two.
        self._reference = weakref.ref(self, self._calls.put)
        _exit.pools.add(self._reference)
        # A call is waited for safely; an interrupt within Thread.join makes Python 3.11 take a
        # thread for ended that is not.
        self._working = [Call(_work, self._calls, prepare) for _ in range(n_threads)]
        self._threads = [
            _Thread(self.owner, working.run, f"{name}_{i}")
            for i, working in enumerate(self._working)
        ]
        try:
            _exit.require_time()
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            self._calls.put(None)
            _exit.pools.discard(self._reference)
            # Two interrupts within Thread.start, one upon the other, make it fail with an error of
            # its lock's.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def submit(self, fn: Callable[..., R], /, *args: Any) -> Call[R]:
        """Let a thread call ``fn(*args)``.

        Raises:
            ClosedError: If the pool is shut down: by its owner, or because the program ends.
        """
        if self._is_over:
            raise ClosedError(_ENDING)
        call = Call(fn, *args)
        self._calls.put(call)
        return call

    def map(self, fn: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """The results for all items, in their order; all are submitted at once."""
        calls = deque(self.submit(fn, item) for item in items)
        while calls:
            yield calls.popleft().result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they have made the calls that were submitted. Idempotent.

        Args:
            wait: Return when they have ended.
            cancel_futures: Leave out the calls that have not begun.
        """
        while cancel_futures and not self._is_over:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if isinstance(call, Call):
                call.fail(concurrent.futures.CancelledError())
        self._is_over = True
        self._calls.put(None)
        if wait:
            for working, thread in zip(self._working, self._threads, strict=True):
                working.exception()
                thread.join()
        _exit.pools.discard(self._reference)


class _Thread(threading.Thread):
    """A thread of a pool.

    Args:
        owner: The program's own thread that the pool works for.
        target: What it runs.
        name: Its name.
    """

    def __init__(self, owner: threading.Thread, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name)
        self.owner = owner


def _work(calls: _Calls, prepare: Callable[[], object]) -> None:
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
        # Not kept while the thread waits for the next one.
        del call
    # For the other threads of the pool.
    calls.put(call)
    if call is not None:
        _exit.pools.discard(call)


class _Exit:
    """Ends the threads of all pools when no thread of the program's own can need them any more.

    Python waits at the end for all threads that are no daemons, and those of a pool wait for calls:
    somebody has to tell them that none will come.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, without pools: in a forked process, where their threads are not."""
        self.pools: set[weakref.ref[ThreadPool]] = set()
        self._main_has_ended = self._is_watching = self._is_over = False

    def main_thread_ends(self) -> None:
        """End the pools that worked for the main thread, or for threads that have ended.

        Python has not begun to wait for the others.
        """
        self._main_has_ended = True
        main = threading.main_thread()
        self._end(lambda pool: pool.owner is main or not pool.owner.is_alive())
        if self.pools:
            self._watch()

    def require_time(self) -> None:
        """Check that a pool can be made now, and see to its end.

        Raises:
            ClosedError: If no thread of the program's own is left.
        """
        if self._main_has_ended and not self._is_watching:
            self._watch()
        if self._is_over:
            raise ClosedError(_ENDING)

    def _watch(self) -> None:
        self._is_watching = True
        try:
            threading.Thread(target=self._wait_and_end, name="pinfeed-exit").start()
        except RuntimeError:
            # Python 3.12.0 and 3.12.1 start no thread from here on: loops of other threads end with
            # a ClosedError.
            self._is_over = True
            self._end(lambda pool: True)

    def _wait_and_end(self) -> None:
        while others := self._own_threads():
            for thread in others:
                thread.join()
        # First: a daemon may make a pool now.
        self._is_over = True
        self._end(lambda pool: True)

    def _end(self, is_done: Callable[[ThreadPool], bool]) -> None:
        for reference in self.pools.copy():
            if (pool := reference()) is not None and is_done(pool):
                pool.shutdown(wait=False)

    @staticmethod
    def _own_threads() -> list[threading.Thread]:
        """The program's own threads that Python waits for, but for this one."""
        others = (threading.main_thread(), threading.current_thread())
        return [
            thread
            for thread in threading.enumerate()
            if not isinstance(thread, _Thread) and not thread.daemon and thread not in others
        ]


_exit = _Exit()
os.register_at_fork(after_in_child=_exit.reset)
# Python has no public way to be told in time; concurrent.futures uses this one, in every version
# since 3.9.
threading._register_atexit(_exit.main_thread_ends)  # type: ignore[attr-defined]
