"""bottleneck_of(): the part of the pipeline that held up a loop, from its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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
    on_host_s = totals.host_transform_s
    on_device_s = totals.device_transform_s
    # The work of a device continues while the next batch is on the host.
    functions_s = on_host_s + on_device_s
    if totals.watched == "device":
        functions_s = max(on_host_s, on_device_s)
    rest_s = max(totals.read_s, totals.copy_wait_s) / totals.n_readers
    if functions_s <= rest_s or functions_s < BUSY_READERS * totals.seconds:
        return None
    return "host_transform" if on_host_s > on_device_s else "device_transform"
