"""DepthChoice: measures whether prefetching is faster than the synchronous loop.

Prefetching costs work: threads wake up for every batch, and compete with the training step for the
cores. If a batch has few and short rows, prefetching costs more than it saves. This depends on the
training step, so DepthChoice times prefetching and the synchronous loop in the user's training
loop. Their results are equal bit for bit, so a loop can change from one to the other at any batch.

A schedule may say that only short batches are timed both ways. A loop with longer batches
prefetches, and never stalls because of the measurement, which begins when batches become short. If
batches become longer after the synchronous loop was chosen, the measurement begins again.

If epochs have few batches, whole epochs are timed, with starting and ending their threads.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics

from pinfeed.memory.units import duration
from pinfeed.pipeline.schedule import PrefetchSchedule

WARM_UP_BATCHES = 5
"""Number of first batches of every loop that are not timed; at least as many as all slots hold."""
STRETCH_BATCHES = 6
"""Minimum number of consecutive batches in a stretch, which is timed as a whole.

A stretch has at least as many batches as all slots hold. If several reader threads fill slots, some
slots follow each other at once, and others are late.
"""
SHORT_STRETCH_BATCHES = 24
"""Minimum number of batches in a stretch if only short batches are timed.

Six short batches take less time than the operating system may give to another program.
"""
MIN_ROUNDS = 2
"""Number of rounds after which the choice is made, if all stretches of one way were faster.

A round times one stretch with prefetching and one without. A pause in the training step makes one
stretch long, not two. For the same reason, the loop gives up a chosen depth of 0 after this number
of long stretches in a row.
"""
MAX_ROUNDS = 5
"""Number of rounds after which the medians decide."""
WORTHWHILE = 0.95
"""Share of the time of the preferred way below which the other way is chosen.

Prefetching is preferred. If only short batches are timed, the synchronous loop is preferred,
because threads also take time of other cores, which the measurement does not see.
"""

logger = logging.getLogger("pinfeed")


class DepthChoice:
    """Choice between prefetching and the synchronous loop, for all epochs of a runner.

    The consumer thread calls every method.

    Args:
        schedule: Schedule of the loop if it prefetches. It says whether the choice is measured;
            otherwise its depth is the choice.
    """

    def __init__(self, schedule: PrefetchSchedule) -> None:
        self.schedule = schedule
        """Schedule of the loop if it prefetches."""
        n_in_slots = schedule.n_slots * schedule.batches_per_slot
        self._n_warm_up = max(WARM_UP_BATCHES, n_in_slots)
        least = SHORT_STRETCH_BATCHES if schedule.measures_short_only else STRETCH_BATCHES
        self._n_stretch = max(least, n_in_slots)
        self.is_measuring = schedule.measures_depth
        """Whether the choice is not made yet."""
        self.is_synchronous = schedule.depth == 0
        """Whether the next batch is gathered when the loop requests it, also in the next loop."""
        self._has_chosen_synchronous = False
        # Whether batches are timed: until the choice is made, and then to see that they stay short.
        self._is_timing = schedule.measures_depth
        # Seconds of a batch in each stretch, without stretches of long batches.
        self._ahead_s: list[float] = []
        self._synchronous_s: list[float] = []
        # Number of long stretches in a row until now, and seconds of a batch in the last one.
        self._n_long = 0
        self._long_s = 0.0
        # Whether each epoch is one stretch, because the last epoch was too short for several.
        self._are_epochs_short = False
        self._has_stretch = False
        self._n_untimed = 0
        self._n_timed = 0
        self._start_s = 0.0

    @property
    def depth(self) -> int:
        """Number of batches that the loop prefetches now, or that the next loop begins with."""
        return 0 if self.is_synchronous else self.schedule.depth

    @property
    def is_wait_expected(self) -> bool:
        """Whether the measurement is the reason that the loop waits for batches.

        The measurement of short batches takes too little time to excuse waits while prefetching.
        """
        schedule = self.schedule
        if not schedule.measures_depth:
            return False
        if self.is_synchronous:
            return not self._has_chosen_synchronous
        return self.is_measuring and not schedule.measures_short_only

    @property
    def reason(self) -> str:
        """The depth, and the measured times; empty if the choice is not measured."""
        return str(self) if self.schedule.measures_depth else ""

    def __str__(self) -> str:
        """Describe the depth and why it was chosen, for the ``repr`` of a feeder."""
        depth = f"depth={self.schedule.depth}"
        if not self.schedule.measures_depth:
            return depth
        if self.is_measuring and self._n_long:
            limit = duration(self.schedule.measured_below_s)
            long = duration(self._long_s)
            return f"{depth}: {long} per batch; depth=0 is timed only below {limit}"
        if self.is_measuring:
            return f"{depth}, not measured yet"
        ahead_time = duration(statistics.median(self._ahead_s))
        synchronous_time = duration(statistics.median(self._synchronous_s))
        if self._has_chosen_synchronous:
            return f"depth=0: {synchronous_time} per batch, {ahead_time} with {depth}"
        return f"{depth}: {ahead_time} per batch, {synchronous_time} with depth=0"

    def measured_depth(self) -> int | None:
        """Return the depth that was chosen by measurement; None until then."""
        return None if self.is_measuring else self.depth

    def may_continue(self) -> bool:
        """Return whether the loop may read the next epoch before it ends this one.

        Short epochs are timed as a whole. They would share the time of these reads.
        """
        return not self.is_measuring or self._n_long > 0

    def settle_on_prefetching(self) -> None:
        """Prefetch from the next loop on, and measure no more, because a crew copies the rows."""
        self.schedule = dataclasses.replace(self.schedule, measures_depth=False)
        self._settle(is_synchronous=False)

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._has_stretch = False
        self._skip(self._n_warm_up)

    def end(self, n_batches: int, seconds: float) -> None:
        """Note that an epoch has ended with its last batch.

        An epoch with too few batches for a stretch is a stretch itself. The first such epoch is not
        timed.

        Args:
            n_batches: Number of batches.
            seconds: Time of the epoch, with starting and joining the threads.
        """
        if not self._is_timing or not n_batches:
            return
        was_short = self._are_epochs_short
        self._are_epochs_short = not self._has_stretch
        if was_short and self._are_epochs_short:
            self._add(seconds / n_batches)

    def count(self, n_batches: int, now: float) -> None:
        """Count batches whose training steps have ended.

        Args:
            n_batches: Number of batches.
            now: Time at which the loop requested the next batch.
        """
        if not self._is_timing:
            return
        if self._n_untimed > 0:
            self._n_untimed -= n_batches
            self._start_s = now
            return
        self._n_timed += n_batches
        if self._n_timed < self._n_stretch:
            return
        batch_s = (now - self._start_s) / self._n_timed
        self._start_s = now
        self._n_timed = 0
        self._has_stretch = True
        self._add(batch_s)

    def _add(self, batch_s: float) -> None:
        """Add the time of a batch in a stretch, and begin the next stretch."""
        if self.is_measuring and self.is_synchronous:
            self._synchronous_s.append(batch_s)
            self._judge()
        elif batch_s > self.schedule.measured_below_s:
            self._n_long += 1
            self._long_s = batch_s
            if not self.is_measuring and self._n_long == MIN_ROUNDS:
                self._restart()
            return
        else:
            self._n_long = 0
            if self.is_measuring:
                self._ahead_s.append(batch_s)
        if self.is_measuring:
            self._change()

    def _change(self) -> None:
        """Begin a stretch of the next way, after the batches of the transition.

        A synchronous loop first lends the prefetched slots, and completes write-backs. A loop that
        prefetches again fills its slots, and may queue as many batches on the device.
        """
        self.is_synchronous = len(self._ahead_s) > len(self._synchronous_s)
        n_slots = self.schedule.n_slots
        n_in_transition = n_slots + 1 if self.is_synchronous else 2 * n_slots
        self._skip(n_in_transition * self.schedule.batches_per_slot)

    def _restart(self) -> None:
        """Forget the choice of the synchronous loop, because its batches have become long."""
        took = duration(self._long_s)
        logger.info("depth=None prefetches again, because batches take %s", took)
        self.is_measuring = True
        self._has_chosen_synchronous = False
        self._are_epochs_short = False
        self._ahead_s.clear()
        self._synchronous_s.clear()
        self._change()

    def _skip(self, n_batches: int) -> None:
        """Begin a stretch after ``n_batches`` that are not timed."""
        self._n_untimed = n_batches
        self._n_timed = 0

    def _judge(self) -> None:
        """Make the choice if the times of all rounds so far suffice."""
        ahead_s = self._ahead_s
        synchronous_s = self._synchronous_s
        if len(synchronous_s) < MIN_ROUNDS:
            return
        is_usual = self.schedule.measures_short_only
        usual_s, other_s = (synchronous_s, ahead_s) if is_usual else (ahead_s, synchronous_s)
        if max(usual_s) <= min(other_s):
            self._settle(is_synchronous=is_usual)
        elif max(other_s) < WORTHWHILE * min(usual_s):
            self._settle(is_synchronous=not is_usual)
        elif len(synchronous_s) == MAX_ROUNDS:
            is_other = statistics.median(other_s) < WORTHWHILE * statistics.median(usual_s)
            self._settle(is_synchronous=is_usual is not is_other)

    def _settle(self, *, is_synchronous: bool) -> None:
        self.is_measuring = False
        self._has_chosen_synchronous = is_synchronous
        self._is_timing = is_synchronous and self.schedule.measures_short_only
        self.is_synchronous = is_synchronous
        logger.info("depth=None chose %s", self)
