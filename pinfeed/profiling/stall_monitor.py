"""StallMonitor: warns once if a loop waits too much for data."""

from __future__ import annotations

import logging
import math

from pinfeed.profiling.counters import Counters
from pinfeed.profiling.stats import FeederStats

STARVED = 0.2
"""Share of the time; a loop that waits for more has a data stall."""
WARM_UP_BATCHES = 5
"""First batches of a feeder, which prove nothing because they were not prefetched in time."""
STRETCH_S = 5.0
"""Minimum time within loops, in seconds, that is evaluated."""
STRETCH_BATCHES = 20
"""Minimum number of batches that is evaluated."""

logger = logging.getLogger("pinfeed")


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
