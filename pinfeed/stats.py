"""What a feeder measured: totals, and on request a timeline of every batch."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from .blocks import locked_bytes
from .config import human
from .errors import ArgumentError, MissingDependency
from .memory import resident_bytes

LANES = ("read", "copy", "write", "wait", "compute")
"""What a span can be: rows gathered, rows copied to the device, rows written back; the loop waiting, the loop's own work."""

_COLOURS = {"read": "#4878a8", "copy": "#6aa84f", "write": "#8e63a8", "wait": "#cc4125", "compute": "#e69138"}


class Span(NamedTuple):
    """One thing that took time."""

    lane: str
    batch: int
    start_s: float
    """Seconds since the first batch was asked for."""
    end_s: float


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of the process, the feeder's and everybody else's, in bytes."""

    anonymous: int
    """Not mapped from a file, nor page-locked."""
    file: int
    """Mapped from files: libraries, and memory maps as far as they were touched. pinfeed maps no data."""
    pinned: int
    """Page-locked by pinfeed; and shared memory, as which the kernel counts what CUDA allocates page-locked."""
    peak: int
    """The most that the sum has been since the process began."""

    @classmethod
    def now(cls) -> ProcessMemory:
        """As it is."""
        found, locked = resident_bytes(), locked_bytes()
        return cls(found["anonymous"] - locked, found["file"], found["shared"] + locked, found["peak"])

    def __str__(self) -> str:
        return f"anonymous {human(self.anonymous)}, file {human(self.file)}, pinned {human(self.pinned)}, peak {human(self.peak)}"


@dataclass(frozen=True)
class FeederStats:
    """Totals since the feeder was made."""

    batches: int
    rows: int
    bytes: int
    """Bytes lent to the loop."""
    seconds: float
    """Time within loops."""
    wait_s: float
    """Time in which a loop waited for a batch."""
    read_s: float
    """Time in which readers gathered rows, the sum over the threads."""
    write_s: float
    """Time in which the writer wrote rows back."""
    memory: ProcessMemory
    """When this was asked for."""

    @property
    def starved(self) -> float:
        """Share of the time in which the loop waited for data."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.rows} rows in {self.seconds:.2f} s: {self.rows_per_s:,.0f} rows/s, {self.gb_per_s:.2f} GB/s, "
            f"starved {self.starved:.1%} of the time; memory: {self.memory}"
        )


class Meter:
    """Counts. Each number belongs to one thread: ``write_s`` to the writer, the others to the consumer.

    Args:
        timeline: Keep a span for everything that took time.
    """

    def __init__(self, *, timeline: bool = False) -> None:
        self.timeline = Timeline() if timeline else None
        self.batches = self.rows = self.bytes = 0
        self.wait_s = self.read_s = self.write_s = 0.0
        self._seconds = 0.0
        self._zero: float | None = None
        self._entered: float | None = None  # when the loop under way began

    def now(self) -> float:
        """The time."""
        return time.perf_counter()

    def enter(self) -> float:
        """A loop begins; the time, the first of which is the zero of the timeline."""
        self._entered = now = time.perf_counter()
        if self._zero is None:
            self._zero = now
        return now

    def lent(self, batch: int, rows: int, nbytes: int, asked: float) -> float:
        """A batch that the loop asked for at ``asked`` is lent; the time."""
        now = self.span("wait", batch, asked)
        self.batches, self.rows, self.bytes, self.wait_s = (
            self.batches + 1,
            self.rows + rows,
            self.bytes + nbytes,
            self.wait_s + now - asked,
        )
        return now

    def leave(self) -> None:
        """The loop has ended."""
        if self._entered is not None:
            self._seconds += time.perf_counter() - self._entered
        self._entered = None

    def span(self, lane: str, batch: int, start: float) -> float:
        """Something that began at ``start`` ends; the time."""
        now = time.perf_counter()
        if self.timeline is not None:
            zero = self._zero or 0.0
            self.timeline.spans.append(Span(lane, batch, start - zero, now - zero))
        return now

    def stats(self) -> FeederStats:
        running = time.perf_counter() - self._entered if self._entered is not None else 0.0
        totals = self.batches, self.rows, self.bytes, self._seconds + running, self.wait_s, self.read_s, self.write_s
        return FeederStats(*totals, ProcessMemory.now())


class Timeline:
    """Spans in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def save(self, path: str | os.PathLike[str], *, last_s: float | None = None) -> None:
        """Write a picture (.png, .svg, .pdf; needs matplotlib) or a trace for Perfetto and chrome://tracing (.json).

        Args:
            path: Its ending decides.
            last_s: Only the last so many seconds.

        Raises:
            MissingDependency: A picture was asked for and there is no matplotlib.
            ArgumentError: There is nothing to draw.
        """
        name = os.fspath(path)
        if not self.spans:
            raise ArgumentError("the timeline is empty: iterate a feeder made with timeline=True first")
        first = max(span.end_s for span in self.spans) - last_s if last_s is not None else 0.0
        spans = [span._replace(start_s=max(first, span.start_s)) for span in self.spans if span.end_s > first]
        if name.endswith(".json"):
            with open(name, "w") as file:
                json.dump({"traceEvents": [_event(span, track) for span, track in zip(spans, _tracks(spans), strict=True)]}, file)
        else:
            _draw(spans, name)


def _tracks(spans: list[Span]) -> list[int]:
    """A track for each span, so that no two of a lane overlap on one: several readers work at the same time."""
    ends: dict[str, list[float]] = {lane: [] for lane in LANES}
    tracks = dict.fromkeys(spans, 0)
    for span in sorted(spans, key=lambda span: span.start_s):
        free = [track for track, end in enumerate(ends[span.lane]) if end <= span.start_s]
        tracks[span] = free[0] if free else len(ends[span.lane])
        ends[span.lane][tracks[span] : tracks[span] + 1] = [span.end_s]
    return [tracks[span] for span in spans]


def _event(span: Span, track: int) -> dict[str, Any]:
    start_us, length_us = span.start_s * 1e6, (span.end_s - span.start_s) * 1e6
    tid = 100 * LANES.index(span.lane) + track
    return {"name": f"{span.lane} {span.batch}", "ph": "X", "pid": 0, "tid": tid, "ts": start_us, "dur": length_us}


def _draw(spans: list[Span], path: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency('a picture needs matplotlib: pip install "pinfeed[plot]"') from None
    lanes = [lane for lane in LANES if lane != "write" or any(span.lane == lane for span in spans)]
    figure = Figure(figsize=(14, 0.7 * len(lanes) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    begin = min(span.start_s for span in spans)
    tracks = _tracks(spans)
    heights = {lane: 0.8 / (1 + max((t for s, t in zip(spans, tracks, strict=True) if s.lane == lane), default=0)) for lane in lanes}
    bars: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for span, track in zip(spans, tracks, strict=True):  # neighbouring batches differ in shade, so that a person can tell them apart
        bar = (span.start_s - begin) * 1e3, (span.end_s - span.start_s) * 1e3
        bars.setdefault((span.lane, track, span.batch % 2), []).append(bar)
    for (lane, track, shade), of_one in bars.items():
        bottom = lanes.index(lane) - 0.4 + track * heights[lane]
        axes.broken_barh(of_one, (bottom, heights[lane]), facecolors=_COLOURS[lane], alpha=0.6 + 0.4 * shade)
    total = max(span.end_s for span in spans) - begin
    labels = [f"{lane} {sum(s.end_s - s.start_s for s in spans if s.lane == lane) / total:.0%}" for lane in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, total * 1e3)
    axes.set_xlabel("milliseconds; each bar is one batch")
    figure.savefig(path, dpi=120)
