"""The bottleneck of a loop: what held the loop up, what to change, and the warning that says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pinfeed.memory.units import duration, human
from pinfeed.profiling.lock_share import LockSampler, more_threads_in_words

if TYPE_CHECKING:
    from pinfeed.profiling.counters import Counters
    from pinfeed.profiling.stats import Totals

Bottleneck = Literal[
    "computing",
    "reading",
    "host_transform",
    "copying",
    "device_transform",
    "writing",
    "overhead",
    "unevenness",
    "start",
    "loop",
    "depth",
]
"""The part of the pipeline that the others wait for.

``overhead``: batches are ready in time, but pinfeed takes long to hand them over. ``start``: loops
are short, and their first batch cannot be prefetched. ``loop``: the loop does too little work to
overlap with reading. ``depth``: nothing is prefetched.
"""

NOTABLE = 0.05
"""Share of the time; a loop that waits for less computes as fast as it can."""
STARVED = 0.2
"""Share of the time; a loop that waits for more has a data stall."""
LIGHT_LOOP = 0.1
"""Share of the time; a loop that works for less does too little to overlap with reading."""
BUSY_READERS = 0.6
"""Share of the time; reader threads that are busy for less are fast enough on average."""

WARM_UP_BATCHES = 5
"""First batches of every loop, which prove nothing because they were not prefetched in time."""
STRETCH_S = 5.0
"""Minimum time within loops, in seconds, that is evaluated."""
STRETCH_BATCHES = 20
"""Minimum number of batches that is evaluated."""

# Reading the counters takes some microseconds, so it is not done for every batch.
_CHECK_S = 1.0

_SENTENCES: dict[Bottleneck, str] = {
    "computing": "computing is the bottleneck",
    "reading": "reading is the bottleneck",
    "host_transform": "host_transform is the bottleneck",
    "copying": "copying to the device is the bottleneck",
    "device_transform": "device_transform is the bottleneck",
    "writing": "writing back is the bottleneck",
    "overhead": "mostly for pinfeed's own work on each batch, not for data",
    "unevenness": "some batches are late, although reading is fast enough on average",
    "start": "mostly for the first batch of each loop, which cannot be prefetched",
    "loop": "the loop does too little work to overlap with reading",
    "depth": "nothing is prefetched (depth=0)",
}

_HINTS: dict[Bottleneck, str] = {
    "device_transform": "The loop waits for your device_transform, which takes longer than the "
    "training step. Make it cheaper, or do its work once before training.",
    "copying": "Copy fewer bytes (a smaller dtype, uint8 images that are converted on the device), "
    "or keep the rows in a PinnedStore, which GPU kernels can read directly.",
    "writing": "The store's writes are slower than the loop. Rows in memory are written faster "
    "than rows in a file, and fewer written values take less time.",
    "overhead": "Larger batches need less of this work per row.",
    "unevenness": "A higher depth keeps more batches ready for when one is late.",
    "start": "Each loop waits for its first batch. Run longer loops, with more batches per epoch.",
    "depth": "depth=2 prefetches two batches.",
}

_CHEAPER_ON_HOST = (
    "Otherwise, make it cheaper, or do its work once before training, or in the worker processes "
    "of a DataLoader."
)

_WITHOUT_THREADS = "depth=0 needs no threads, which compete with the training step for the cores."

_OR_TRANSFORM = "If device_transform takes long, which timeline=True shows, make it cheaper."

logger = logging.getLogger("pinfeed")


def bottleneck_of(totals: Totals) -> Bottleneck:
    """Return the part of the pipeline that the others wait for."""
    if totals.starved < NOTABLE:
        return "computing"
    if totals.write_wait_s > totals.wait_s + totals.overhead_s:
        return "writing"
    if totals.depth == 0:
        return _longest_stage(totals) if totals.is_measured else "depth"
    if totals.first_batch_s > totals.starved_s / 2:
        return "start"
    is_light = totals.compute_s < LIGHT_LOOP * totals.seconds and not totals.asynchronous
    if totals.overhead_s > totals.wait_s and not is_light:
        return "overhead"
    if (function := _slow_function(totals)) is not None:
        return function
    if totals.copy_wait_s > totals.read_s:
        return "copying"
    if is_light:
        return "loop"
    return "reading" if totals.readers_busy >= BUSY_READERS else _late_stage(totals)


def verdict_of(totals: Totals) -> str:
    """Return a sentence that says how long the loop waited, and why."""
    if not totals.seconds:
        return "no loop has run"
    bottleneck = bottleneck_of(totals)
    because = _SENTENCES[bottleneck]
    if bottleneck == "depth" and totals.measures_depth:
        because = "pinfeed timed the loop without prefetching, to choose the depth (depth=0)"
    if bottleneck == "reading" and totals.starved < STARVED:
        because = "reading takes about as long as computing"
    is_transform = bottleneck in ("host_transform", "device_transform")
    if is_transform and totals.depth and _slow_function(totals) is None:
        because = f"some batches are late, because {bottleneck} takes long for them"
    if bottleneck == "copying" and totals.device_transform_s and totals.watched == "loop":
        because = "copying to the device, or device_transform after it, is the bottleneck"
    if totals.depth == 0 and totals.is_measured:
        because += "; prefetching was measured to be slower (depth=0)"
    return f"the {totals.watched} waited {totals.starved:.0%} of the time: {because}"


def _late_stage(totals: Totals) -> Bottleneck:
    """Return the transform for which most of the time in late batches was spent, if any."""
    if 2 * totals.late_host_transform_s > totals.wait_s:
        return "host_transform"
    if 2 * totals.late_device_transform_s > totals.wait_s:
        return "device_transform"
    return "unevenness"


def _longest_stage(totals: Totals) -> Bottleneck:
    """Return the stage that takes most of the time of a synchronous loop's requests."""
    seconds: dict[Bottleneck, float] = {
        "reading": totals.read_s,
        "host_transform": totals.host_transform_s,
        "copying": totals.copy_wait_s,
        "device_transform": totals.device_transform_s,
        "overhead": totals.overhead_s,
    }
    return max(seconds, key=lambda stage: seconds[stage])


def _slow_function(totals: Totals) -> Literal["host_transform", "device_transform"] | None:
    """Return the transform that the loop waits for; None if it waits for other work."""
    on_host_s = totals.host_transform_s / totals.n_transform_threads
    on_device_s = totals.device_transform_s
    # The work of a device continues while the next batch is on the host. If several threads call
    # host_transform, another thread calls device_transform.
    functions_s = on_host_s + on_device_s
    if totals.watched == "device" or totals.n_transform_threads > 1:
        functions_s = max(on_host_s, on_device_s)
    rest_s = max(totals.read_s, totals.copy_wait_s) / totals.n_readers
    if functions_s <= rest_s or functions_s < BUSY_READERS * totals.seconds:
        return None
    return "host_transform" if on_host_s > on_device_s else "device_transform"


class StarvationMonitor:
    """Monitor of the counters of running loops; the consumer thread calls it.

    Args:
        counters: The counts of the loops.
        hint: Returns what to change if reading is too slow, given the share of the reading time
            that the source takes to make batches.
        depth_caution: Returns why no other depth is advised; empty if there is no such reason.

    Attributes:
        next_check: Number of batches at which to call ``check`` again.
    """

    def __init__(
        self,
        counters: Counters,
        hint: Callable[[float], str],
        depth_caution: Callable[[], str] = str,
    ) -> None:
        self._counters = counters
        self._hint = hint
        self._depth_caution = depth_caution
        # Counts of the stretch to evaluate, which may span several loops; None if it begins.
        self._stretch: Totals | None = None
        # Counts at the last check of the running loop; None before the first.
        self._last: Totals | None = None
        self._next_check_s = 0.0
        # Samples the interpreter's lock before a warning of host_transform; None otherwise.
        self._sampler: LockSampler | None = None
        self._has_warned = False
        self.next_check = math.inf

    def begin(self) -> None:
        """Watch a loop that begins."""
        if not self._has_warned:
            self.next_check = self._counters.batches + WARM_UP_BATCHES

    def check(self) -> None:
        """Read the counters, unless the last check is too recent."""
        self.next_check = self._counters.batches + STRETCH_BATCHES
        now = self._counters.now()
        if self._last is None:
            self._last = self._counters.totals()
        elif now < self._next_check_s:
            return
        else:
            self._evaluate()
        self._next_check_s = now + _CHECK_S

    def end(self, *, is_excused: bool = False) -> None:
        """Note that a loop ends, and evaluate it.

        Args:
            is_excused: Whether the loop has waited because of a measurement; it is not evaluated
                then.
        """
        if self._last is not None and not self._has_warned and not is_excused:
            self._evaluate(is_last=True)
        self._stop_sampling()
        self._last = None
        self.next_check = math.inf

    def _evaluate(self, *, is_last: bool = False) -> None:
        """Evaluate the stretch if it is long enough by now; warn of a data stall.

        Before a warning of ``host_transform``, the interpreter's lock is sampled until the next
        check, unless this is the last one.
        """
        assert self._last is not None
        totals = self._counters.totals()
        stretch = totals - self._last
        if self._stretch is not None:
            stretch += self._stretch
        self._stretch = stretch
        self._last = totals
        if stretch.seconds < STRETCH_S or stretch.batches < STRETCH_BATCHES:
            return
        if stretch.starved > STARVED:
            samples = stretch.bottleneck == "host_transform" and stretch.depth
            if samples and self._sampler is None and not is_last:
                self._sampler = LockSampler()
                return
            lock_share = self._stop_sampling()
            text = explanation(stretch, self._hint, self._depth_caution, lock_share)
            logger.warning("%s", text)
            self._has_warned = True
            self.next_check = math.inf
        self._stretch = None

    def _stop_sampling(self) -> float | None:
        """End the sampler; return the share of time in which threads held the lock, if known."""
        sampler = self._sampler
        self._sampler = None
        return None if sampler is None else sampler.stop()


def explanation(
    totals: Totals,
    hint: Callable[[float], str],
    depth_caution: Callable[[], str] = str,
    lock_share: float | None = None,
) -> str:
    """Return the verdict, the numbers behind it, and advice.

    Args:
        totals: Counts of the stretch.
        hint: As for ``StarvationMonitor``.
        depth_caution: As for ``StarvationMonitor``.
        lock_share: Share of the time in which threads held the interpreter's lock; None if unknown.
    """
    cause = totals.bottleneck
    if cause == "host_transform":
        change = _host_transform_hint(totals, lock_share)
    else:
        source_share = totals.source_s / totals.read_s if totals.read_s else 0.0
        change = _HINTS.get(cause) or hint(source_share)
    if cause == "host_transform" and totals.asynchronous:
        # On the CPU, device_transform would use the same cores.
        change += " On the GPU, device_transform can do its work."
    if cause == "copying" and totals.device_transform_s:
        change += f" {_OR_TRANSFORM}"
    if cause in ("depth", "unevenness"):
        change = depth_caution() or change
    if cause == "overhead" and not totals.is_measured and not depth_caution():
        change += f" {_WITHOUT_THREADS}"
    verdict = totals.verdict.replace("of the time", f"of the last {totals.seconds:.1f} s", 1)
    return f"{verdict[0].upper()}{verdict[1:]}. {_numbers(totals, cause)} {change}"


def _host_transform_hint(totals: Totals, lock_share: float | None) -> str:
    """Return advice for a loop that waits for ``host_transform``."""
    n_threads = totals.n_transform_threads
    at_a_time = "one batch" if n_threads == 1 else f"up to {n_threads} batches"
    hint = f"The loop waits for your host_transform, which runs for {at_a_time} at a time."
    if totals.depth:
        hint += f" {more_threads_in_words(n_threads, lock_share)}"
    return f"{hint} {_CHEAPER_ON_HOST}"


def _numbers(totals: Totals, cause: Bottleneck) -> str:
    """Return sentences with the times of a batch and the load of the reader threads."""
    n = max(1, totals.batches)
    works = "queues its device work" if totals.asynchronous else "works on it"
    threads = f"{totals.n_readers} reader thread{'s' * (totals.n_readers > 1)}"
    # The bytes of objects that are no tensors are unknown.
    size = f" ({human(totals.bytes / n)})" if totals.bytes else ""
    numbers = (
        f"A batch of {totals.rows / n:,.0f} rows{size} takes "
        f"{duration(totals.read_s / n)} to read, and the loop {works} for "
        f"{duration(totals.compute_s / n)}. With {threads}, {totals.readers_busy:.0%} "
        f"busy, and depth={totals.depth}, {totals.late} of {totals.batches} batches were late."
    )
    if transforms := totals.transforms_in_words:
        numbers += f" Transforms take, per batch: {transforms}."
    if cause == "overhead":
        numbers += f" pinfeed's own work takes {duration(totals.overhead_s / n)} per batch."
    if cause == "writing":
        numbers += f" Writing rows back takes {duration(totals.write_s / n)} per batch."
    if cause == "copying":
        wait = duration(totals.copy_wait_s / n)
        numbers += f" Reader threads wait for copies for {wait} per batch."
    return numbers
