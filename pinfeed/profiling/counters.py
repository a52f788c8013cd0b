"""Counters: change the statistics of a feeder with every batch; StallMonitor: warns of stalls."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from pinfeed.errors import logger
from pinfeed.memory.host import ProcessMemory
from pinfeed.profiling.spans import CacheCounts
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline

STARVED = 0.2
"""Share of the time; a loop that waits for more has a data stall."""
WARM_UP_BATCHES = 5
"""First batches of a feeder, which prove nothing because they were not prefetched in time."""
STRETCH_S = 5.0
"""Minimum time within loops, in seconds, that is evaluated."""
STRETCH_BATCHES = 20
"""Minimum number of batches that is evaluated."""


class Counters:
    """Counts of a feeder's loops.

    The time within a loop is divided into training steps and requests for batches. A request
    begins when the loop calls ``next()`` on its iterator, and ends when it receives the batch.
    Until the batch is ready, the loop waits for data; the rest of the request is overhead.

    It is one class, because each event of a loop changes several counts.

    Each number belongs to one thread: ``write_s`` to the writer thread, the others to the training
    thread.

    Args:
        timeline: Timeline that records the spans; None records none.
        now: The clock, in seconds, which the events of the device use too.
    """

    def __init__(
        self, *, timeline: Timeline | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.timeline = timeline
        self.now = now
        self.counts = FeederStats()
        """Counts without the running request, and without the time of the running loop."""
        self.requested_s = 0.0
        """Time at which the running or the last request began."""
        # Time at which the batch of the running request was ready; infinite while it is unknown.
        self._ready_s = math.inf
        # Whether the device is idle during the running request.
        self._is_idle = False
        self._is_requesting = False
        # For the timeline: number, rows and bytes of the batch of the running or the last request,
        # and the time at which the last one ended.
        self._batch = (0, 0, 0)
        self._lent_s = 0.0
        # Time at which the running loop began; None if no loop runs.
        self._entered: float | None = None
        # Whether the running loop has received no batch yet.
        self._is_first = False

    def enter(
        self, depth: int, n_readers: int, *, n_transform_threads: int = 1, asynchronous: bool
    ) -> None:
        """Count a loop that begins and requests its first batch.

        Args:
            depth: Number of batches that are prefetched.
            n_readers: Number of reader threads.
            n_transform_threads: Number of threads that call ``host_transform``.
            asynchronous: Whether the loop only queues work for a device.
        """
        counts = self.counts
        counts.depth = depth
        counts.n_readers = n_readers
        counts.n_transform_threads = n_transform_threads
        counts.asynchronous = asynchronous
        self._is_first = True
        self._is_requesting = False
        self.request()
        self._entered = self.requested_s
        if self.timeline is not None:
            self.timeline.begin(self.requested_s, depth)

    def request(self) -> None:
        """Begin a request for a batch. A second call does nothing."""
        if self._is_requesting:
            return
        now = self.now()
        self.requested_s = now
        self._ready_s = math.inf
        self._is_idle = not self.counts.asynchronous
        self._is_requesting = True
        if self.timeline is not None and not self._is_first:
            self.timeline.add("compute", self._batch[0], self._lent_s, now)

    def receive(self, number: int, rows: int, nbytes: int, ready_s: float, *, idle: bool) -> None:
        """Count the batch of the running request.

        Args:
            number: Number of the batch.
            rows: Rows of the batch.
            nbytes: Bytes of the batch.
            ready_s: Time at which the batch was ready.
            idle: Whether the device is idle.
        """
        self._ready_s = ready_s
        self._is_idle = idle
        counts = self.counts
        counts.batches += 1
        counts.rows += rows
        counts.bytes += nbytes
        if ready_s > self.requested_s:
            counts.late += 1
        if self.timeline is not None:
            self._batch = (number, rows, nbytes)

    def fail(self) -> None:
        """Do not count the batch of the running request, which failed."""
        self.counts.batches -= 1
        self.counts.late -= self._ready_s > self.requested_s

    def receive_none(self) -> None:
        """Note that the running request found no further batch, or that the loop was left."""
        self._ready_s = self.now()

    def lend(self) -> None:
        """End the running request, because the loop receives its batch now."""
        now = self.now()
        counts = self.counts
        requested_s = self.requested_s
        ready_s = self._ready_s
        if ready_s > requested_s:
            # It may be infinite.
            if ready_s > now:
                ready_s = now
            counts.wait_s += ready_s - requested_s
            counts.overhead_s += now - ready_s
        else:
            counts.overhead_s += now - requested_s
        if self._is_idle:
            counts.starved_s += now - requested_s
            if self._is_first:
                counts.first_batch_s += now - requested_s
        self._is_requesting = False
        self._is_first = False
        # A loop that ends receives no batch.
        if self.timeline is not None and self._entered is not None:
            self._record_request(now)

    def count_write_wait(self, start: float, *, idle: bool, batch: int | None = None) -> None:
        """Count the time since ``start``, in which the loop waited for earlier writes.

        Args:
            start: Time at which the loop began to wait.
            idle: Whether the device was idle.
            batch: Number of the batch that the loop writes back; None at the end of a loop.
        """
        now = self.now()
        if self.timeline is not None and batch is not None:
            self.timeline.add("write_wait", batch, start, now)
        if self._entered is None or not idle:
            return
        waited = now - start
        self.counts.write_wait_s += waited
        self.counts.starved_s += waited
        if self._is_requesting:
            # This time must not count again as a part of the request.
            self.requested_s += waited
            self._ready_s += waited

    def count_cache(self, moved: CacheCounts) -> None:
        """Count the rows of a batch in a table with a cache."""
        self.counts.cache_lookups += moved.lookups
        self.counts.cache_hits += moved.hits
        self.counts.cache_bytes_read += moved.bytes_read
        if self.timeline is not None:
            self.timeline.add_cache(self.now(), moved)

    def count_cache_write(self, n_rows: int, nbytes: int) -> None:
        """Count rows of a table with a cache that are written to their stores."""
        self.counts.cache_rows_written += n_rows
        self.counts.cache_bytes_written += nbytes

    def leave(self) -> None:
        """Count a loop that ends."""
        entered_s = self._entered
        self._entered = None
        if entered_s is None:
            return
        if self._is_requesting:
            self.lend()
        self.counts.seconds += self.now() - entered_s

    def stats(self) -> FeederStats:
        """Return all counts, with the running request, and the memory of the process."""
        now = self.now()
        counts = self.counts
        # A copy of this object that ends its request would need fewer lines. But once an object was
        # copied, Python finds its attributes more slowly, which every batch would pay for.
        requested_s = self.requested_s if self._is_requesting else now
        ready_s = min(max(requested_s, self._ready_s), now)
        starved_s = now - requested_s if self._is_idle else 0.0
        entered_s = now if self._entered is None else self._entered
        return dataclasses.replace(
            counts,
            seconds=counts.seconds + (now - entered_s),
            wait_s=counts.wait_s + (ready_s - requested_s),
            overhead_s=counts.overhead_s + (now - ready_s),
            starved_s=counts.starved_s + starved_s,
            first_batch_s=counts.first_batch_s + (starved_s if self._is_first else 0.0),
            memory=ProcessMemory.now(),
        )

    def _record_request(self, now: float) -> None:
        """Record the request that ends now as spans."""
        assert self.timeline is not None
        ready_s = max(self.requested_s, self._ready_s)
        number, rows, nbytes = self._batch
        self.timeline.add("wait", number, self.requested_s, ready_s)
        self.timeline.add("lend", number, ready_s, now, 1, rows, nbytes)
        self._lent_s = now


class StallMonitor:
    """Monitor of the counters of a feeder's loops; the consumer thread calls it.

    Args:
        counters: The counts of the loops.

    Attributes:
        next_check: Number of batches at which to call ``check``; infinite after the warning.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        # Statistics at the beginning of the stretch to evaluate, which may span several loops.
        self._earlier: FeederStats | None = None
        # Reading statistics takes some microseconds, so they are not read before this time.
        self._due_s = -math.inf
        self.next_check: float = WARM_UP_BATCHES

    def check(self) -> None:
        """Evaluate the stretch if it is long enough by now; warn of a data stall.

        Waits for the first batch of a loop are no stall, because it cannot be prefetched.
        """
        self.next_check = self._counters.counts.batches + STRETCH_BATCHES
        now = self._counters.now()
        if now < self._due_s:
            return
        stats = self._counters.stats()
        if self._earlier is None:
            self._earlier = stats
        recent = stats - self._earlier
        # Time between loops does not count.
        self._due_s = now + STRETCH_S - recent.seconds
        if recent.seconds < STRETCH_S or recent.batches < STRETCH_BATCHES:
            return
        self._earlier = stats
        self._due_s = now + STRETCH_S
        if recent.starved_s - recent.first_batch_s > STARVED * recent.seconds:
            logger.warning("in the last %.1f s, %s", recent.seconds, recent.verdict)
            self.next_check = math.inf
