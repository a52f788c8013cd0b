"""DepthChoice: chooses by measurement whether a loop prefetches or is the synchronous loop.

Prefetching costs work: threads wake up for every batch, and compete with the training step for the
cores. If the rows of a batch are few and short, it costs more than it saves. This depends on the
training step, so both ways are timed on the user's own loop. Their results are the same, bit for
bit, so that a loop can change from one to the other at any batch.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics

from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.profiling.starvation import milliseconds

WARM_UP_BATCHES = 5
"""First batches of every loop, which are not timed."""
STRETCH_BATCHES = 6
"""Least number of consecutive batches that are timed as one."""
MIN_ROUNDS = 2
"""Rounds after which the choice is made if no stretch of one way took as long as one of the other.

A round is a stretch of each way. A pause in the training step makes one stretch long, not two.
"""
MAX_ROUNDS = 5
"""Rounds after which the choice is made by the medians."""
WORTHWHILE = 0.95
"""Share of the time with prefetching that the synchronous loop must not exceed to be chosen."""

logger = logging.getLogger("pinfeed")


class DepthChoice:
    """Choice between prefetching and the synchronous loop, for all epochs of a runner.

    The training thread calls every method.

    Args:
        schedule: Schedule of a loop that prefetches, which says whether the choice is measured. If
            not, it is the choice.
    """

    def __init__(self, schedule: PrefetchSchedule) -> None:
        self._schedule = schedule
        self.is_measuring = schedule.is_measured
        """Whether the choice is still to be made."""
        self.is_synchronous = schedule.depth == 0
        """Whether the next batch is gathered when the loop asks for it."""
        # Seconds of a batch in each stretch.
        self._ahead_s: list[float] = []
        self._synchronous_s: list[float] = []
        self._n_untimed = 0
        self._n_timed = 0
        self._start_s = 0.0

    @property
    def schedule(self) -> PrefetchSchedule:
        """Schedule of the next epoch."""
        if self._schedule.is_measured and self.is_synchronous and not self.is_measuring:
            return dataclasses.replace(self._schedule, depth=0, n_readers=1)
        return self._schedule

    @property
    def excuses_waiting(self) -> bool:
        """Whether a loop that waits for batches does so for the sake of the measurement."""
        return self._schedule.is_measured and (self.is_measuring or self.is_synchronous)

    @property
    def reason(self) -> str:
        """The depth, and the measured times; empty if the choice is not measured."""
        return str(self) if self._schedule.is_measured else ""

    def __str__(self) -> str:
        """Describe the depth and why it was chosen, for the ``repr`` of a feeder."""
        ahead = f"{self._schedule.depth} ahead"
        if not self._schedule.is_measured:
            return ahead
        if self.is_measuring:
            return f"{ahead}, not measured yet"
        ahead_ms = milliseconds(statistics.median(self._ahead_s))
        synchronous_ms = milliseconds(statistics.median(self._synchronous_s))
        if self.is_synchronous:
            return f"0 ahead: {synchronous_ms} per batch, {ahead_ms} with {ahead}"
        return f"{ahead}: {ahead_ms} per batch, {synchronous_ms} with 0 ahead"

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._skip(WARM_UP_BATCHES)

    def count(self, n_batches: int, now: float) -> bool:
        """Count batches whose training steps have ended; return whether the choice is made now.

        Args:
            n_batches: Number of batches.
            now: Time at which the loop asked for the batch after them.
        """
        if not self.is_measuring:
            return False
        if self._n_untimed > 0:
            self._n_untimed -= n_batches
            self._start_s = now
            return False
        self._n_timed += n_batches
        if self._n_timed < STRETCH_BATCHES:
            return False
        times = self._synchronous_s if self.is_synchronous else self._ahead_s
        times.append((now - self._start_s) / self._n_timed)
        if self.is_synchronous:
            self._judge()
            if not self.is_measuring:
                return True
        self.is_synchronous = not self.is_synchronous
        self._skip(self._n_in_transition() * self._schedule.batches_per_slot)
        return False

    def _n_in_transition(self) -> int:
        """Return the number of slots that are lent before the loop runs evenly again.

        A synchronous loop lends the slots that were filled ahead, and then completes write-backs. A
        loop that prefetches again fills its slots, and may queue as many batches on the device.
        """
        n_slots = self._schedule.n_slots
        return n_slots + 1 if self.is_synchronous else 2 * n_slots

    def _skip(self, n_batches: int) -> None:
        """Begin a stretch after ``n_batches`` that are not timed."""
        self._n_untimed = n_batches
        self._n_timed = 0

    def _judge(self) -> None:
        """Make the choice if the times of all rounds so far are enough for it."""
        ahead_s = self._ahead_s
        synchronous_s = self._synchronous_s
        if len(synchronous_s) < MIN_ROUNDS:
            return
        if max(ahead_s) <= min(synchronous_s):
            self._settle(is_synchronous=False)
        elif max(synchronous_s) < WORTHWHILE * min(ahead_s):
            self._settle(is_synchronous=True)
        elif len(synchronous_s) == MAX_ROUNDS:
            medians_s = [statistics.median(times) for times in (synchronous_s, ahead_s)]
            self._settle(is_synchronous=medians_s[0] < WORTHWHILE * medians_s[1])

    def _settle(self, *, is_synchronous: bool) -> None:
        self.is_measuring = False
        self.is_synchronous = is_synchronous
        logger.info("depth=None chose %s", self)
