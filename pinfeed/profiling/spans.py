"""Spans: what took time, when; and what can be told from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pinfeed.profiling.stats import Totals

Lane = Literal["read", "copy", "wait", "lend", "compute", "land", "device", "write"]

LANES: tuple[Lane, ...] = ("read", "copy", "wait", "lend", "compute", "land", "device", "write")
"""What a span can be: rows read, and copied to the device; the loop waiting for a batch, taking it, computing, and within that waiting for
write-backs to land; an asynchronous device doing what the loop gave it to do; rows written back."""

THREADS: dict[str, tuple[Lane, ...]] = {
    "read": ("read",),
    "copy": ("copy",),
    "loop": ("wait", "lend", "compute", "land"),
    "device": ("device",),
    "write": ("write",),
}
"""Who does what: spans of one thread come one after the other (but for ``land``, which is a part of ``compute``)."""

# Of the time of a batch.
_NOTABLE_WAIT = 0.1


class Span(NamedTuple):
    """One thing that took time."""

    lane: Lane
    batch: int
    """Its number in the epoch; of the first, where several small ones are read together."""
    start_s: float
    """Seconds since the first batch was asked for."""
    end_s: float
    loop: int = 0
    """Which loop over the feeder, from 0."""
    n_batches: int = 1
    rows: int = 0
    bytes: int = 0


def clipped(spans: Iterable[Span], start_s: float, end_s: float) -> list[Span]:
    """The parts of spans that are between two moments."""
    return [
        span._replace(start_s=max(start_s, span.start_s), end_s=min(end_s, span.end_s))
        for span in spans
        if span.end_s > start_s and span.start_s < end_s
    ]


def extent(spans: Iterable[Span]) -> tuple[float, float]:
    """When the first span begins, and the last one ends."""
    found = list(spans)
    return min(span.start_s for span in found), max(span.end_s for span in found)


def middle(spans: Sequence[Span], n_batches: int) -> tuple[float, float]:
    """A stretch of so many batches, from the middle of the loop in the middle; all of it, where it is not much longer."""
    asked = [span for span in spans if span.lane == "wait"]
    if len(asked) <= n_batches:
        return extent(spans)
    loop = asked[len(asked) // 2].loop
    of_one = [span for span in spans if span.loop == loop]
    asked = [span for span in of_one if span.lane == "wait"]
    if len(asked) <= n_batches:
        return extent(of_one)
    first = (len(asked) - n_batches) // 2
    return asked[first].start_s, asked[first + n_batches].start_s


def tracks(spans: Sequence[Span]) -> list[int]:
    """A track for each span, so that no two of a lane overlap on one: several readers work at the same time."""
    ends: dict[str, list[float]] = {lane: [] for lane in LANES}
    found = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start_s):
        span, taken = spans[i], ends[spans[i].lane]
        found[i] = next(
            (track for track, end in enumerate(taken) if end <= span.start_s), len(taken)
        )
        taken[found[i] : found[i] + 1] = [span.end_s]
    return found


def starved(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """When there was nothing to compute with: the device's gaps, if it was seen; else the loop's waits."""
    device = sorted(
        (span for span in spans if span.lane == "device"), key=lambda span: span.start_s
    )
    if not device:
        return [(span.start_s, span.end_s) for span in spans if span.lane in ("wait", "land")]
    found, free = [], _begun(spans)
    for span in device:
        since = free.get(span.loop, span.start_s)
        if span.start_s > since:
            found.append((since, span.start_s))
        free[span.loop] = max(since, span.end_s)
    return found


def _begun(spans: Iterable[Span]) -> dict[int, float]:
    """When each loop asked for its first batch."""
    found: dict[int, float] = {}
    for span in spans:
        if span.lane == "wait":
            found[span.loop] = min(span.start_s, found.get(span.loop, span.start_s))
    return found


def totals(
    spans: Sequence[Span], start_s: float, end_s: float, *, depth: int, n_readers: int
) -> Totals:
    """What would have been counted between two moments."""
    within = clipped(spans, start_s, end_s)
    spent = dict.fromkeys(LANES, 0.0)
    for span in within:
        spent[span.lane] += span.end_s - span.start_s
    lent = [span for span in within if span.lane == "lend"]
    seconds = spent["wait"] + spent["lend"] + spent["compute"]
    starved_s = sum(
        min(end, end_s) - max(start, start_s)
        for start, end in starved(spans)
        if end > start_s and start < end_s
    )
    starved_s -= 0.0 if spent["device"] else spent["land"]
    waits = [span for span in within if span.lane == "wait"]
    begun = set(_begun(spans).values())
    first_s = sum(span.end_s - span.start_s for span in waits if span.start_s in begun)
    return Totals(
        batches=len(lent),
        rows=sum(span.rows for span in lent),
        bytes=sum(span.bytes for span in lent),
        seconds=seconds,
        wait_s=starved_s,
        starved_s=starved_s,
        start_s=min(first_s, starved_s),
        land_s=0.0 if spent["device"] else spent["land"],
        read_s=spent["read"],
        # Each of them has to wait for it.
        held_s=spent["copy"] * n_readers,
        write_s=spent["write"],
        late=sum(
            span.end_s - span.start_s > _NOTABLE_WAIT * seconds / max(1, len(lent))
            for span in waits
        ),
        depth=depth,
        n_readers=n_readers,
        watched="device" if spent["device"] else "loop",
    )


def ready(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """How many batches were read and not yet lent, whenever that changed."""
    steps = [(span.end_s, 0, span.loop, span.n_batches) for span in spans if span.lane == "read"]
    steps += [(span.start_s, 1, span.loop, -1) for span in spans if span.lane == "lend"]
    found = []
    count = 0
    current = None
    for at_s, _, loop, change in sorted(steps):
        if loop != current:
            # What an earlier loop had not been lent when it was left is gone.
            count, current = 0, loop
        count += change
        found.append((at_s, max(0, count)))
    return found
