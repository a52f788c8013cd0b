"""ExitHook: saves the rows of suspended loops and ends all threads when the program ends.

At exit, Python waits for all threads that are no daemons. The threads of a pool wait for calls, so
the exit hook must end them. It does so as soon as none of the program's own threads can submit a
call.
"""

from __future__ import annotations

# concurrent.futures.thread registers a hook too, and must do so before the hook below. torch would
# import it late, and it cannot be imported after the main thread has ended.
import concurrent.futures.thread  # noqa: F401
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pinfeed.errors import ClosedError

ENDING = (
    "the program is ending, and the threads of its loops have ended; end each loop before the "
    "program ends"
)


class PoolThread(threading.Thread):
    """A thread of a pool.

    Args:
        owner: The program's own thread for which the pool works.
        target: The function that the thread runs.
        name: The name of the thread.
    """

    def __init__(self, owner: threading.Thread, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name)
        self.owner = owner


def current_owner() -> threading.Thread:
    """Return the program's own thread for which the current thread works."""
    current = threading.current_thread()
    return current.owner if isinstance(current, PoolThread) else current


class ExitHook:
    """The pools of this process, which end when none of the program's own threads needs them.

    Attributes:
        pools: The pools that have not ended. Each has an ``owner``, the program's own thread for
            which it works, and ``shutdown(wait)``.
        loops: The loops that have not ended. Each has an ``owner``, the thread in which it runs,
            and ``save()``, which queues the writes of all rows that only the device has, without
            raising errors. A loop that cannot continue is saved before its pools end, because its
            stores may be closed when Python frees it. ``end_between_epochs()`` ends a loop that
            waits for its next epoch.
        n_forks: Number of forks between the first process that imported pinfeed and this one.
            Reading it costs less than requesting the process identifier from the system.
    """

    def __init__(self) -> None:
        self.n_forks = -1
        self.reset()

    def reset(self) -> None:
        """Forget all pools, because a forked process does not have their threads."""
        self.n_forks += 1
        self.pools: set[weakref.ref[Any]] = set()
        self.loops: set[weakref.ref[Any]] = set()
        self._main_has_ended = False
        self._is_watching = False
        self._is_over = False

    def fork_begins(self) -> None:
        """End the loops between two epochs, whose feeders the forked process may use."""
        for reference in self.loops.copy():
            if (loop := reference()) is not None:
                loop.end_between_epochs()

    def main_thread_ends(self) -> None:
        """End the pools that worked for the main thread, or for threads that have ended.

        Python calls this before it waits for the other threads.
        """
        self._main_has_ended = True
        main = threading.main_thread()
        self._save()
        self._end(lambda pool: pool.owner is main or not pool.owner.is_alive())
        if self.pools:
            self._watch()

    def check_open(self) -> None:
        """Check that a pool can be made now, and ensure that it will end.

        Raises:
            ClosedError: If all of the program's own threads have ended.
        """
        if self._main_has_ended and not self._is_watching:
            self._watch()
        if self._is_over:
            raise ClosedError(ENDING)

    def _watch(self) -> None:
        self._is_watching = True
        try:
            threading.Thread(target=self._wait_and_end, name="pinfeed-exit").start()
        except RuntimeError:
            # Python 3.12.0 and 3.12.1 start no thread after the main thread has ended. The loops of
            # other threads then end with a ClosedError.
            self._is_over = True
            self._end(lambda pool: True)

    def _wait_and_end(self) -> None:
        while others := self._own_threads():
            for thread in others:
                thread.join()
        self._save()
        # This comes first, because a daemon thread may make a pool now.
        self._is_over = True
        self._end(lambda pool: True)

    def _save(self) -> None:
        """Save the loops of threads that have ended, such as the main thread."""
        for reference in self.loops.copy():
            loop = reference()
            if loop is None:
                self.loops.discard(reference)
            elif loop.owner is threading.main_thread() or not loop.owner.is_alive():
                loop.save()

    def _end(self, is_done: Callable[[Any], bool]) -> None:
        for reference in self.pools.copy():
            if (pool := reference()) is not None and is_done(pool):
                pool.shutdown(wait=False)

    @staticmethod
    def _own_threads() -> list[threading.Thread]:
        """List the program's own threads that Python waits for, other than this one."""
        others = (threading.main_thread(), threading.current_thread())
        return [
            thread
            for thread in threading.enumerate()
            if not isinstance(thread, PoolThread) and not thread.daemon and thread not in others
        ]


exit_hook = ExitHook()
os.register_at_fork(before=exit_hook.fork_begins, after_in_child=exit_hook.reset)
# Python has no public way to call a function before it waits for threads. concurrent.futures uses
# this one, in every version since 3.9.
threading._register_atexit(exit_hook.main_thread_ends)  # type: ignore[attr-defined]
