"""Call: a function call that another thread makes; protocols of threads that make such calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """The result of a call that another thread makes; a ``concurrent.futures.Future`` is one."""

    def done(self) -> bool: ...
    def result(self) -> R_co: ...
    def exception(self) -> BaseException | None: ...


class Workers(Protocol):
    """Threads that begin calls in the order of submission.

    A ``concurrent.futures.Executor`` satisfies the protocol.
    """

    def submit(self, fn: Callable[..., R], /, *args: Any) -> Pending[R]: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class Call(Generic[R]):
    """A function with its arguments, and its result or error after ``run`` was called.

    A thread waits for the call in a single C function, which an interrupt ends without harm. A
    ``Future`` waits in Python code, and an interrupt within it may leave its lock held.

    The traceback of an error keeps the frames of ``run`` and ``result``, which therefore delete
    their references to the call, its error and its arguments.
    """

    __slots__ = ("__weakref__", "_args", "_done", "_error", "_fn", "_running", "_takers", "_value")

    def __init__(self, fn: Callable[..., R], *args: Any) -> None:
        self._fn: Callable[..., R] | None = fn
        self._args: tuple[Any, ...] = args
        # Identifiers of the threads in ``run``. The first one calls the function; ``list.append``
        # is atomic.
        self._takers: list[int] = []
        # Held until the function has ended.
        self._running = threading.Lock()
        self._running.acquire()
        self._done = False
        self._value: R
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function, or wait until the thread that calls it already has done so."""
        me = threading.get_ident()
        self._takers.append(me)
        if self._takers[0] != me:
            self._wait()
            return
        fn = self._fn
        args = self._args
        self._fn = None
        self._args = ()
        assert fn is not None
        try:
            self._value = fn(*args)
        except BaseException as error:
            self._error = error
        self._done = True
        self._running.release()
        del fn, args, self

    def fail(self, error: BaseException) -> None:
        """End the call with ``error``, without calling the function."""
        self._fn = None
        self._args = ()
        self._error = error
        self._done = True
        self._running.release()

    def abandon(self, error: BaseException) -> None:
        """End the call with ``error``, if an interrupt has cut off ``run`` in this thread."""
        if self._takers[:1] == [threading.get_ident()] and self._running.locked():
            self.fail(error)

    def done(self) -> bool:
        """Return whether the function has returned or raised."""
        return self._done

    def exception(self) -> BaseException | None:
        """Wait until the function has ended; return its error, or None."""
        if not self._done:
            self._wait()
        return self._error

    def result(self) -> R:
        """Wait until the function has ended; return its result.

        Raises:
            Exception: If the function raised it.
        """
        if not self._done:
            self._wait()
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self

    def finish(self) -> R:
        """Call the function in this thread unless another one calls it; return its result.

        Raises:
            Exception: If the function raised it.
        """
        if not self._done:
            self.run()
        return self._value if self._error is None else self.result()

    def _wait(self) -> None:
        with self._running:
            pass
