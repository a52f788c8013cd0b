"""Counters: counts while a loop runs.

Cheap enough for every batch; what it found is in stats.py and timeline.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pinfeed.profiling.stats import FeederStats, ProcessMemory, Totals
from pinfeed.profiling.timeline import Timeline


class Counters:
    """Counts.

    Each number belongs to one thread: ``write_s`` to the writer, the others to the consumer.

    Args:
        timeline: Keeps a span for everything that took time; None to keep none.
        now: The clock, in seconds; the device's events tell the same.
    """

    def __init__(
        self, *, timeline: Timeline | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.timeline = timeline
        self.now = now
        self.batches = self.rows = self.bytes = self.late = 0
        self.wait_s = self.starved_s = self.start_s = self.land_s = self.read_s = self.draw_s = (
            self.held_s
        ) = self.write_s = 0.0
        self._seconds = 0.0
        # When the loop under way began.
        self._entered: float | None = None
        # Whether its first batch is still to come.
        self._is_first = False
        self._depth = 0
        self._n_readers = 1
        self._asynchronous = False

    def enter(self, depth: int, n_readers: int, *, asynchronous: bool) -> float:
        """A loop begins; the time."""
        self._depth = depth
        self._n_readers = n_readers
        self._asynchronous = asynchronous
        self._entered = (now := self.now())
        self._is_first = True
        if self.timeline is not None:
            self.timeline.begin(now, depth, n_readers)
        return now

    def lent(self, rows: int, nbytes: int, asked: float, *, late: bool, idle: bool) -> float:
        """A batch that the loop asked for at ``asked`` is lent; the time.

        Args:
            rows: Of the batch.
            nbytes: Of the batch.
            asked: When the loop did.
            late: Whether it was not ready then.
            idle: Whether the device had nothing to do when it was.
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
        """The loop has waited since ``start`` for write-backs to land, before it could write ``batch`` back."""
        now = self.now()
        if idle:
            self.land_s += now - start
        if self.timeline is not None:
            self.timeline.add("land", batch, start, now)

    def leave(self) -> None:
        """The loop has ended."""
        if self._entered is not None:
            self._seconds += self.now() - self._entered
        self._entered = None

    def totals(self) -> Totals:
        """Since the counters were made."""
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
        """The same, and the memory of the process."""
        return FeederStats(**vars(self.totals()), memory=ProcessMemory.now())
