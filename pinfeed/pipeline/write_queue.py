"""WriteQueue: write-backs under way, bounded, and their errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pinfeed.pipeline.transfer import PendingWrite
from pinfeed.profiling.counters import Counters
from pinfeed.threads.call import Pending


class WriteQueue:
    """Write-backs under way, oldest first.

    Args:
        land: Submits one.
        limit: So many may be under way; one more waits for the oldest, so that their memory is
            bounded.
        may_wait: Whether the thread that asks may wait for one.
        counters: Counts how long it does.
    """

    def __init__(
        self,
        land: Callable[[PendingWrite], Pending[None]],
        limit: int,
        may_wait: Callable[[], bool],
        counters: Counters,
    ) -> None:
        self._land = land
        self._limit = limit
        self._may_wait = may_wait
        self._counters = counters
        self._futures: deque[Pending[None]] = deque()
        self._failed = False
        self.failure: BaseException | None = None
        """The first error of a write-back, until it is raised; those of later ones only follow from it."""

    def add(self, landing: PendingWrite, *, check: bool) -> None:
        """Submit a write-back; ``check`` first."""
        while len(self._futures) >= self._limit:
            if self._futures[0].done():
                self._take()
            elif self._may_wait():
                self._await(landing)
            else:
                break
        if check:
            self.check()
        self._futures.append(self._land(landing))

    def check(self) -> None:
        """Raise the error of a write-back that has failed."""
        while self._futures and self._futures[0].done():
            self._take()
        if self.failure is not None:
            failure = self.failure
            self.failure = None
            raise failure

    def finish(self) -> None:
        """Wait for all of them; ``failure`` tells how they ended."""
        while self._futures:
            self._take()

    def land(self) -> None:
        """Wait for all of them, and raise the error of one that has failed."""
        self.finish()
        self.check()

    def _await(self, landing: PendingWrite) -> None:
        """Wait for the oldest, before ``landing`` can begin."""
        start = self._counters.now()
        self._take()
        self._counters.landed(landing.batch, start, idle=landing.write.values.ready.is_done())

    def _take(self) -> None:
        # Where an interrupt ends the wait, it still is the oldest.
        error = self._futures[0].exception()
        self._futures.popleft()
        if error is not None and not self._failed:
            self.failure = error
            self._failed = True
