"""Counters: cheap counts of what a loop waits for, updated for every batch.

The results are in stats.py and timeline.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pinfeed.profiling.stats import FeederStats, ProcessMemory, Totals
from pinfeed.profiling.timeline import Timeline


class Counters:
    """Counts of a feeder's loops.

    Each number belongs to one thread: ``write_s`` to the writer thread, the others to the training
    thread.

    Args:
        timeline: Records a span for everything that takes time; None records none.
        now: The clock, in seconds; the events of the device use the same.
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
        self.wait_s = 0.0
        self.starved_s = 0.0
        self.start_s = 0.0
        self.land_s = 0.0
        self.read_s = 0.0
        self.draw_s = 0.0
        self.held_s = 0.0
        self.write_s = 0.0
        # Time within loops that have ended.
        self._seconds = 0.0
        # When the running loop began; None without one.
        self._entered: float | None = None
        # Whether the running loop has no batch yet.
        self._is_first = False
        self._depth = 0
        self._n_readers = 1
        self._asynchronous = False

    def enter(self, depth: int, n_readers: int, *, asynchronous: bool) -> float:
        """Count a loop that begins; return the time."""
        now = self.now()
        self._depth = depth
        self._n_readers = n_readers
        self._asynchronous = asynchronous
        self._entered = now
        self._is_first = True
        if self.timeline is not None:
            self.timeline.begin(now, depth, n_readers)
        return now

    def change_depth(self, depth: int) -> None:
        """Note that the running loop keeps another number of batches ahead from now on."""
        self._depth = depth

    def lent(self, rows: int, nbytes: int, asked: float, *, late: bool, idle: bool) -> float:
        """Count a batch that the loop gets now; return the time.

        Args:
            rows: Rows of the batch.
            nbytes: Bytes of the batch.
            asked: When the loop asked for the batch.
            late: Whether the batch was not ready then.
            idle: Whether the device had nothing to do when the batch was ready.
        """
        now = self.now()
        waited = now - asked
        self.batches += 1
        self.rows += rows
        self.bytes += nbytes
        self.wait_s += waited
        if late:
            self.late += 1
            if idle:
                self.starved_s += waited
                if self._is_first:
                    self.start_s += waited
        self._is_first = False
        return now

    def landed(self, batch: int, start: float, *, idle: bool) -> None:
        """Count the time since ``start``, in which the loop waited for earlier writes.

        Args:
            batch: Number of the batch that the loop writes back.
            start: When the loop began to wait.
            idle: Whether the device had nothing to do.
        """
        now = self.now()
        if idle:
            self.land_s += now - start
        if self.timeline is not None:
            self.timeline.add("land", batch, start, now)

    def leave(self) -> None:
        """Count a loop that ends."""
        if self._entered is not None:
            self._seconds += self.now() - self._entered
        self._entered = None

    def totals(self) -> Totals:
        """Return the counts since the counters were made."""
        running = self.now() - self._entered if self._entered is not None else 0.0
        return Totals(
            batches=self.batches,
            rows=self.rows,
            bytes=self.bytes,
            seconds=self._seconds + running,
            wait_s=self.wait_s,
            starved_s=self.starved_s,
            start_s=self.start_s,
            land_s=self.land_s,
            read_s=self.read_s,
            draw_s=self.draw_s,
            held_s=self.held_s,
            write_s=self.write_s,
            late=self.late,
            depth=self._depth,
            n_readers=self._n_readers,
            asynchronous=self._asynchronous,
        )

    def stats(self) -> FeederStats:
        """Return the counts since the counters were made, and the memory of the process."""
        return FeederStats(**vars(self.totals()), memory=ProcessMemory.now())
