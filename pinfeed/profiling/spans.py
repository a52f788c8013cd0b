"""Span: one piece of work in a loop, with the functions that compute statistics from spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Lane = Literal[
    "read",
    "host_transform",
    "copy",
    "device_transform",
    "wait",
    "lend",
    "compute",
    "write_wait",
    "device",
    "write",
]
"""The kind of a span:

- ``read``: a thread reads rows: a reader thread or one of an engine.
- ``host_transform``: the function runs. For a batch of a loader, this is a part of ``read``.
- ``copy``: rows are copied to the device.
- ``device_transform``: the function runs, or an asynchronous device does the work that it queued.
- ``wait``: the loop has requested a batch, which is not ready.
- ``lend``: the batch is ready, and pinfeed hands it to the loop; this is pinfeed's overhead.
- ``compute``: the training step runs.
- ``write_wait``: the training step waits until earlier rows are written back; a part of
  ``compute``.
- ``device``: an asynchronous device does the work that the loop queued.
- ``write``: the writer thread, or the device itself, writes rows back.
"""

THREADS = ("read", "host_transform", "copy", "device_transform", "loop", "device", "write")
"""Names of threads, from top to bottom. All but the loop do the work of one lane.

Transforms run in background threads or in a stream of the device, and are shown separately.
"""
_OF_LOOP: tuple[Lane, ...] = ("wait", "lend", "compute", "write_wait")
"""Lanes of the loop, which do not overlap, except ``write_wait`` and ``compute``."""
_SHARED = ("read", "host_transform")
"""Names for which several threads may work at the same time."""

WAITING: tuple[Lane, ...] = ("wait", "lend", "write_wait")
"""Lanes of the loop in which it does not compute."""


class Span(NamedTuple):
    """One piece of work in a loop, with its start and end."""

    lane: Lane
    batch: int
    """Number of the batch in its epoch, or of the first batch if several are read together."""
    start_s: float
    """Seconds since the request for the first batch."""
    end_s: float
    loop: int = 0
    """Number of the loop over the feeder, from 0."""
    n_batches: int = 1
    rows: int = 0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s

    @property
    def numbers(self) -> str:
        """Number of the batch, or of the first and the last one, for people."""
        last = self.batch + self.n_batches - 1
        return f"{self.batch}-{last}" if last > self.batch else f"{self.batch}"


class CacheCounts(NamedTuple):
    """Rows of a table with a cache on the device, in one batch."""

    table: str
    """Name of the table."""
    batch: int
    """Number of the batch."""
    lookups: int
    """Rows that the batch looks up."""
    hits: int
    """Looked-up rows that were in the cache; the others were read from their stores."""
    bytes_read: int
    """Bytes of the rows that were read."""


def clipped(spans: Iterable[Span], start_s: float, end_s: float) -> list[Span]:
    """Return the parts of spans that are between two moments."""
    return [
        span._replace(start_s=max(start_s, span.start_s), end_s=min(end_s, span.end_s))
        for span in spans
        if span.end_s > start_s and span.start_s < end_s
    ]


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """Return when the first span begins and when the last one ends."""
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def middle(spans: Sequence[Span], n_batches: int) -> tuple[float, float]:
    """Return start and end of ``n_batches`` batches in the middle of the middle loop.

    A run or a middle loop without more batches is returned as a whole.
    """
    waits = [span for span in spans if span.lane == "wait"]
    if len(waits) <= n_batches:
        return extent(spans)
    loop = waits[len(waits) // 2].loop
    of_loop = [span for span in spans if span.loop == loop]
    waits = [span for span in of_loop if span.lane == "wait"]
    if len(waits) <= n_batches:
        return extent(of_loop)
    first = (len(waits) - n_batches) // 2
    return waits[first].start_s, waits[first + n_batches].start_s


def _tracks(spans: Sequence[Span]) -> list[int]:
    """Return a track for each span so that no two spans overlap on one track."""
    ends: list[float] = []
    found = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start_s):
        free = (track for track, end in enumerate(ends) if end <= spans[i].start_s)
        found[i] = next(free, len(ends))
        ends[found[i] : found[i] + 1] = [spans[i].end_s]
    return found


def by_thread(spans: Sequence[Span]) -> dict[str, list[tuple[Span, int]]]:
    """Return the spans of each thread that has some, each with its track.

    Several threads may read, or call ``host_transform``, at the same time. Their spans then need
    several tracks.
    """
    rows: dict[str, list[Span]] = {name: [] for name in THREADS}
    for span in spans:
        rows["loop" if span.lane in _OF_LOOP else span.lane].append(span)
    return {
        name: list(zip(row, _tracks(row) if name in _SHARED else [0] * len(row), strict=True))
        for name, row in rows.items()
        if row
    }


def starved(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return start and end of each data stall.

    These are the gaps in the device's work if it was recorded, and otherwise the loop's waits.
    """
    on_device = [span for span in spans if span.lane == "device"]
    if not on_device:
        return [(span.start_s, span.end_s) for span in spans if span.lane in WAITING]
    gaps = []
    # The end of the device's work so far, by loop.
    idle_since = _loop_starts(spans)
    for span in sorted(on_device, key=lambda span: span.start_s):
        since = idle_since.get(span.loop, span.start_s)
        if span.start_s > since:
            gaps.append((since, span.start_s))
        idle_since[span.loop] = max(since, span.end_s)
    return gaps


def _loop_starts(spans: Iterable[Span]) -> dict[int, float]:
    """Return the time at which each loop requested its first batch."""
    found: dict[int, float] = {}
    for span in spans:
        if span.lane == "wait":
            found[span.loop] = min(span.start_s, found.get(span.loop, span.start_s))
    return found


def stalled(spans: Sequence[Span]) -> float:
    """Return the share of the time within loops that data stalls take, from 0 to 1."""
    loop_s = sum(span.seconds for span in spans if span.lane in ("wait", "lend", "compute"))
    stalls_s = sum(end_s - start_s for start_s, end_s in starved(spans))
    return stalls_s / loop_s if loop_s else 0.0


def ready(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """Return the number of batches that were read and not yet lent, after each change."""
    steps = [(span.end_s, 0, span.loop, span.n_batches) for span in spans if span.lane == "read"]
    steps += [(span.start_s, 1, span.loop, -1) for span in spans if span.lane == "lend"]
    found = []
    count = 0
    current = None
    for at_s, _, loop, change in sorted(steps):
        if loop != current:
            # An earlier loop drops its prefetched batches when it ends.
            count = 0
            current = loop
        count += change
        found.append((at_s, max(0, count)))
    return found
