"""Counters: cheap counts of the waits and work of a loop, updated for every batch.

The results are in stats.py and timeline.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pinfeed.profiling.stats import COUNTED, FeederStats, ProcessMemory, Totals
from pinfeed.profiling.timeline import CacheCounts, Timeline


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
        self.batches = 0
        self.rows = 0
        self.bytes = 0
        self.late = 0
        self.late_host_transform_s = 0.0
        self.late_device_transform_s = 0.0
        self.wait_s = 0.0
        self.overhead_s = 0.0
        self.write_wait_s = 0.0
        self.starved_s = 0.0
        self.first_batch_s = 0.0
        self.read_s = 0.0
        self.source_s = 0.0
        self.host_transform_s = 0.0
        self.device_transform_s = 0.0
        self.copy_wait_s = 0.0
        self.write_s = 0.0
        self.cache_lookups = 0
        self.cache_hits = 0
        self.cache_evictions = 0
        self.cache_rows_written = 0
        self.cache_bytes_read = 0
        self.cache_bytes_written = 0
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
        # Time within loops that have ended.
        self.seconds = 0.0
        # Time at which the running loop began; None if no loop runs.
        self._entered: float | None = None
        # Whether the running loop has received no batch yet.
        self._is_first = False
        self.depth = 0
        self._n_readers = 1
        self._n_transform_threads = 1
        self._asynchronous = False
        self._measured_depth: Callable[[], int | None] | None = None

    def enter(
        self,
        depth: int,
        n_readers: int,
        *,
        n_transform_threads: int = 1,
        asynchronous: bool,
        measured_depth: Callable[[], int | None] | None = None,
    ) -> None:
        """Count a loop that begins and requests its first batch.

        Args:
            depth: Number of batches that are prefetched.
            n_readers: Number of reader threads.
            n_transform_threads: Number of threads that call ``host_transform``.
            asynchronous: Whether the loop only queues work for a device.
            measured_depth: Returns the depth that was chosen by measurement; None until then. A
                loop whose depth is not measured has no such function.
        """
        self._measured_depth = measured_depth
        self.depth = depth
        self._n_readers = n_readers
        self._n_transform_threads = n_transform_threads
        self._asynchronous = asynchronous
        self._is_first = True
        self._is_requesting = False
        self.request()
        self._entered = self.requested_s
        if self.timeline is not None:
            self.timeline.begin(
                self.requested_s, depth, n_readers, measured_depth, n_transform_threads
            )

    def change_depth(self, depth: int) -> None:
        """Note that the running loop prefetches another number of batches from now on."""
        self.depth = depth
        if self.timeline is not None:
            self.timeline.change_depth(self.now(), depth)

    def request(self) -> None:
        """Begin a request for a batch. A second call does nothing."""
        if self._is_requesting:
            return
        now = self.now()
        self.requested_s = now
        self._ready_s = math.inf
        self._is_idle = not self._asynchronous
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
        self.batches += 1
        self.rows += rows
        self.bytes += nbytes
        if ready_s > self.requested_s:
            self.late += 1
        if self.timeline is not None:
            self._batch = (number, rows, nbytes)

    def count_transforms(
        self, host_s: float, device_s: float, read_s: float, copy_wait_s: float, ready_s: float
    ) -> None:
        """Count the transforms of a batch that the loop is about to receive.

        Args:
            host_s: Time of ``host_transform``.
            device_s: Time of ``device_transform``.
            read_s: Time in which the rows of the batch were read.
            copy_wait_s: Time in which a reader thread waited for copies.
            ready_s: Time at which the batch was ready. If it is late, its longest stage is blamed.
        """
        self.host_transform_s += host_s
        self.device_transform_s += device_s
        late_s = ready_s - self.requested_s
        if late_s <= 0:
            return
        others_s = max(read_s, copy_wait_s)
        if host_s > max(others_s, device_s):
            self.late_host_transform_s += late_s
        elif device_s > others_s:
            self.late_device_transform_s += late_s

    def fail(self) -> None:
        """Do not count the batch of the running request, which failed."""
        self.batches -= 1
        self.late -= self._ready_s > self.requested_s

    def receive_none(self) -> None:
        """Note that the running request found no further batch, or that the loop was left."""
        self._ready_s = self.now()

    def lend(self, *, is_last: bool = False) -> None:
        """End the running request, because the loop receives its batch now.

        Args:
            is_last: Whether the loop ends without a batch instead.
        """
        now = self.now()
        requested_s = self.requested_s
        ready_s = self._ready_s
        if ready_s > requested_s:
            ready_s = min(ready_s, now)
            self.wait_s += ready_s - requested_s
            self.overhead_s += now - ready_s
        else:
            self.overhead_s += now - requested_s
        if self._is_idle:
            self.starved_s += now - requested_s
            if self._is_first:
                self.first_batch_s += now - requested_s
        self._is_requesting = False
        if not is_last:
            self._is_first = False
            if self.timeline is not None:
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
        self.write_wait_s += waited
        self.starved_s += waited
        if self._is_requesting:
            # This time must not count again as a part of the request.
            self.requested_s += waited
            self._ready_s += waited

    def count_cache(self, moved: CacheCounts) -> None:
        """Count the rows of a batch in a table with a cache."""
        self.cache_lookups += moved.lookups
        self.cache_hits += moved.hits
        self.cache_evictions += moved.evictions
        self.cache_bytes_read += moved.bytes_read
        if self.timeline is not None:
            self.timeline.add_cache(self.now(), moved)

    def count_cache_write(self, n_rows: int, nbytes: int) -> None:
        """Count rows of a table with a cache that are written to their stores."""
        self.cache_rows_written += n_rows
        self.cache_bytes_written += nbytes

    def leave(self) -> None:
        """Count a loop that ends."""
        if self._entered is None:
            return
        if self._is_requesting:
            self.lend(is_last=True)
        now = self.now()
        self.seconds += now - self._entered
        self._entered = None

    def totals(self) -> Totals:
        """Return the counts since the counters were made, including the running request."""
        now = self.now()
        requested_s = self.requested_s if self._is_requesting else now
        ready_s = min(max(requested_s, self._ready_s), now)
        starved_s = now - requested_s if self._is_idle else 0.0
        counts = {name: getattr(self, name) for name in COUNTED}
        counts["seconds"] += now - self._entered if self._entered is not None else 0.0
        counts["wait_s"] += ready_s - requested_s
        counts["overhead_s"] += now - ready_s
        counts["starved_s"] += starved_s
        counts["first_batch_s"] += starved_s if self._is_first else 0.0
        measured_depth = self._measured_depth
        return Totals(
            **counts,
            depth=self.depth,
            n_readers=self._n_readers,
            n_transform_threads=self._n_transform_threads,
            asynchronous=self._asynchronous,
            measures_depth=measured_depth is not None,
            is_measured=measured_depth is not None and measured_depth() == self.depth,
        )

    def stats(self) -> FeederStats:
        """Return the counts since the counters were made, and the memory of the process."""
        return FeederStats(**vars(self.totals()), memory=ProcessMemory.now())

    def _record_request(self, now: float) -> None:
        """Record the request that ends now as spans."""
        assert self.timeline is not None
        ready_s = max(self.requested_s, self._ready_s)
        number, rows, nbytes = self._batch
        self.timeline.add("wait", number, self.requested_s, ready_s)
        self.timeline.add("lend", number, ready_s, now, 1, rows, nbytes)
        self._lent_s = now
