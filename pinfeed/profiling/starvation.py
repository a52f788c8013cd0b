"""StarvationMonitor: warns, once, of a loop that starves: of the likely cause, and what to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from pinfeed.memory.units import human
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.stats import STARVED, Bottleneck, Totals

WARM_UP_BATCHES = 5
"""The first batches of every loop prove nothing: nothing was read ahead of them."""
STRETCH_S, STRETCH_BATCHES = 5.0, 20
"""What it takes to judge: so much time within loops, and so many batches."""

# Cheap as it is, it takes some microseconds.
_LOOK_S = 1.0

_HINTS: dict[Bottleneck, str] = {
    "copying": "Fewer bytes help (a smaller dtype, uint8 images that are converted on the device), or rows in a PinnedStore, which the GPU "
    "can read itself.",
    "writing": "The store's writes are slower than the loop: rows in memory (PinnedStore, ArrayStore) take them faster than a file does, "
    "and None in place of what stays as it is leaves less to write.",
    "unevenness": "A higher depth has more batches ready when one comes late; small batches had better be larger.",
    "start": "Longer loops have fewer beginnings: more batches in an epoch, or several epochs in one loop.",
    "depth": "depth=2 reads two batches ahead, with the same results.",
}

logger = logging.getLogger("pinfeed")


class StarvationMonitor:
    """Looks at the counters while loops run. In the consumer's thread.

    Args:
        counters: Counts.
        hint: Of the source: what to change where reading is too slow, given the share of it that
            goes into making loads.
    """

    def __init__(self, counters: Counters, hint: Callable[[float], str]) -> None:
        self._counters = counters
        self._hint = hint
        # Of the stretch that is being judged, which may be of several loops.
        self._seen = Totals()
        self._since: Totals | None = None
        self._next_s = 0.0
        self._warned = False
        self.look_at = math.inf
        """The number of batches at which to look again."""

    def begin(self) -> None:
        """A loop begins."""
        if not self._warned:
            self.look_at = self._counters.batches + WARM_UP_BATCHES

    def look(self) -> None:
        """Take down what was counted, once in a while."""
        self.look_at = self._counters.batches + STRETCH_BATCHES
        now = self._counters.now()
        if self._since is None:
            self._since = self._counters.totals()
        elif now < self._next_s:
            return
        else:
            self._judge()
        self._next_s = now + _LOOK_S

    def end(self) -> None:
        """The loop has ended."""
        if self._since is not None and not self._warned:
            self._judge()
        self._since = None
        self.look_at = math.inf

    def _judge(self) -> None:
        """Judge the stretch, if it is long enough by now; warn if it starved."""
        assert self._since is not None
        totals = self._counters.totals()
        self._seen = totals - self._since + self._seen
        self._since = totals
        if self._seen.seconds < STRETCH_S or self._seen.batches < STRETCH_BATCHES:
            return
        if self._seen.starved > STARVED:
            logger.warning("%s", explanation(self._seen, self._hint))
            self._warned = True
            self.look_at = math.inf
        self._seen = Totals()


def explanation(totals: Totals, hint: Callable[[float], str]) -> str:
    """The verdict, the numbers that it is made of, and what to change."""
    n, cause = max(1, totals.batches), totals.bottleneck
    works = f"the loop {'gives the device its work' if totals.asynchronous else 'works'} for {_ms(totals.compute_s / n)} on it"
    numbers = (
        f"A batch of {totals.rows / n:,.0f} rows ({human(totals.bytes / n)}) takes {_ms(totals.read_s / n)} to read, and {works}; "
        f"with {totals.n_readers} reading thread{'s' * (totals.n_readers > 1)}, {totals.readers_busy:.0%} busy, and depth={totals.depth}, "
        f"{totals.late} of {totals.batches} batches were late."
    )
    if cause == "writing":
        numbers += f" Rows took {_ms(totals.write_s / n)} a batch to write back."
    if cause == "copying":
        numbers += f" Readers were held up by copies for {_ms(totals.held_s / n)} a batch."
    change = _HINTS.get(cause) or hint(totals.draw_s / totals.read_s if totals.read_s else 0.0)
    verdict = totals.verdict.replace("of the time", f"of the last {totals.seconds:.1f} s", 1)
    return f"starved: {verdict}. {numbers} {change}"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms:,.0f} ms"
