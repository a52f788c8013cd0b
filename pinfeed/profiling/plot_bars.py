"""The rows of the timeline's picture, one for each thread: bars of its spans, in their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.profiling.spans import SHARED, THREADS, WAITING, Lane, Span, tracks

COLOURS: dict[Lane, str] = {
    "read": "#5b8db8",
    "host_transform": "#3f6f9c",
    "copy": "#6bb0a6",
    "device_transform": "#3f8f7d",
    "wait": "#d7263d",
    "lend": "#3d3d3d",
    "compute": "#e9b44c",
    "write_wait": "#8c1c2b",
    "device": "#cf8a3a",
    "write": "#9a7fb8",
}
LANE_NAMES: dict[Lane, str] = {
    "read": "reading",
    "host_transform": "host_transform",
    "copy": "copying to the device",
    "device_transform": "device_transform",
    "wait": "the loop waits for a batch",
    "lend": "receives a batch (overhead)",
    "compute": "training step",
    "write_wait": "waits for write-backs",
    "device": "the device computes",
    "write": "writing back",
}
SIGNAL = COLOURS["wait"]
"""Colour of time in which the watched thread waits."""
BAND = "#fbe3e6"
"""Background colour of that time in the rows of the other threads."""
QUIET = "#d9d9d9"
"""Colour of waits that cost nothing, because the device computes."""
INK = "#222222"
FAINT = "#777777"

_ROW_IN = 0.6
_TRACK_IN = 0.36
_GAP_IN = 0.32
N_BINS = 400
# Slightly more than a pixel, because a narrower bar would be invisible.
_NARROWEST_IN = 0.0125
# The white edge of a bar would hide most of a narrower one.
_EDGED_IN = 0.04


@dataclass(frozen=True)
class Row:
    """The place of the spans of one thread, or of several threads that do the same work."""

    name: str
    top: float
    n_tracks: int

    @property
    def height(self) -> float:
        """Height of a track."""
        return _ROW_IN if self.n_tracks == 1 else _TRACK_IN

    @property
    def bottom(self) -> float:
        """Lower end of the row."""
        return self.top + self.n_tracks * self.height

    def box(self, track: int) -> tuple[float, float]:
        """Return top and height of the bars on a track."""
        return self.top + track * self.height + 0.03, self.height - 0.06


@dataclass(frozen=True)
class Bar:
    """A span and its place; start and width are in the unit of the time axis."""

    span: Span
    row: Row
    track: int
    start: float
    width: float


def place(spans: Sequence[Span], start_s: float, unit: float) -> tuple[list[Row], list[Bar]]:
    """Place spans in rows, from top to bottom in the order in which a batch passes the threads.

    Args:
        spans: The spans.
        start_s: The time at the left end of the axis, in seconds.
        unit: Units of the time axis per second.
    """
    placed = list(zip(spans, tracks(spans), strict=True))
    rows: list[Row] = []
    bars: list[Bar] = []
    for name, lanes in THREADS.items():
        of_thread = [
            (span, track if span.lane in SHARED else 0)
            for span, track in placed
            if span.lane in lanes
        ]
        if not of_thread:
            continue
        top = rows[-1].bottom + _GAP_IN if rows else 0.0
        row = Row(name, top, 1 + max(track for _, track in of_thread))
        rows.append(row)
        for span, track in of_thread:
            start = (span.start_s - start_s) * unit
            bars.append(Bar(span, row, track, start, (span.end_s - span.start_s) * unit))
    return rows, bars


def usual_width(bars: Sequence[Bar], lane: Lane) -> float:
    """Return the median width of a lane's bars; 0 without bars."""
    widths = [bar.width for bar in bars if bar.span.lane == lane]
    return float(np.median(widths)) if widths else 0.0


def colour_of(span: Span, by_device: bool) -> str:
    """Return the colour of a span; adjacent batches differ in shade.

    Args:
        span: The span.
        by_device: Whether the picture shows waits of the device. Waits of the loop are grey then.
    """
    if span.lane == "wait" and by_device:
        return QUIET
    colour = COLOURS[span.lane]
    is_even = span.batch // span.n_batches % 2 == 0
    if span.lane in WAITING or not is_even:
        return colour
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{255 - round(0.7 * (255 - channel)):02x}" for channel in channels)


def draw_bars(axes: Any, bars: Sequence[Bar], by_device: bool, per_inch: float) -> None:
    """Draw a bar for each span, wide enough to be visible.

    Narrow bars lie on top of wide ones. If several narrow bars share a place, the longest lies on
    top.

    Args:
        axes: The axes to draw on.
        bars: The spans with their places.
        by_device: Whether the picture shows waits of the device.
        per_inch: Length of an inch, in the unit of the time axis.
    """
    alike: dict[tuple[str, Row, int, float], list[tuple[float, float]]] = {}
    for bar in bars:
        colour = colour_of(bar.span, by_device)
        key = (colour, bar.row, bar.track, _layer(bar, per_inch))
        width = max(bar.width, _NARROWEST_IN * per_inch)
        alike.setdefault(key, []).append((bar.start, width))
    for (colour, row, track, layer), intervals in alike.items():
        # An edge would cover a narrow bar, and the loop has many.
        edge = 0.7 if layer == 2.0 and row.name != "loop" else 0.0
        axes.broken_barh(
            intervals,
            row.box(track),
            facecolors=colour,
            edgecolors="white",
            linewidth=edge,
            zorder=layer,
        )


def _layer(bar: Bar, per_inch: float) -> float:
    """Return the z-order of a bar; 2.0 is that of wide ones, which have an edge."""
    if bar.span.lane == "write_wait":
        return 3.0
    share_of_edged = bar.width / (_EDGED_IN * per_inch)
    return 2.0 if share_of_edged >= 1 else 2.5 + int(10 * share_of_edged) / 100


def draw_shares(axes: Any, bars: Sequence[Bar], by_device: bool) -> None:
    """Draw the share of each moment that a lane takes; the full height of a track is 100%."""
    edges = np.linspace(0.0, max(bar.start + bar.width for bar in bars), N_BINS + 1)
    alike: dict[tuple[Row, int], dict[Lane, list[Bar]]] = {}
    for bar in bars:
        # Spans of "write_wait" are parts of "compute".
        if bar.span.lane != "write_wait":
            alike.setdefault((bar.row, bar.track), {}).setdefault(bar.span.lane, []).append(bar)
    for (row, track), lanes in alike.items():
        top, height = row.box(track)
        filled = np.zeros(N_BINS)
        for of_lane in lanes.values():
            intervals = [(bar.start, bar.start + bar.width) for bar in of_lane]
            share = covered(intervals, edges) / np.diff(edges)
            # A lane with a tiny share of a moment is still shown as a line.
            share = np.where(share > 0, np.maximum(share, _NARROWEST_IN / height), 0.0)
            low = filled
            filled = np.minimum(filled + share, 1.0)
            axes.stairs(
                top + height * (1 - filled),
                edges,
                baseline=top + height * (1 - low),
                fill=True,
                color=colour_of(of_lane[0].span._replace(batch=1, n_batches=1), by_device),
                zorder=2,
            )


def covered(
    intervals: Sequence[tuple[float, float]], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the length of each bin that the intervals cover, shape (len(edges) - 1,).

    Args:
        intervals: Start and end of each; they do not overlap.
        edges: Edges of the bins.
    """
    if not intervals:
        return np.zeros(len(edges) - 1)
    starts, ends = np.array(sorted(intervals)).T
    # The time that was covered by the end of each interval.
    sums = np.cumsum(ends - starts)
    at_times = np.stack([starts, ends], 1).ravel()
    at_sums = np.stack([sums - (ends - starts), sums], 1).ravel()
    return np.diff(np.interp(edges, at_times, at_sums, left=0.0, right=at_sums[-1]))


def number_bars(axes: Any, bars: Sequence[Bar]) -> None:
    """Write batch numbers on bars that have room for them; frame the bars of one batch."""
    lent = [bar.span for bar in bars if bar.span.lane == "lend"]
    followed = lent[len(lent) // 2] if lent else None
    left, right = axes.get_xlim()
    pixels = axes.get_window_extent().width / (right - left)
    for bar in bars:
        if bar.span.lane in WAITING:
            continue
        top, height = bar.row.box(bar.track)
        is_followed = followed is not None and _has_batch(bar.span, followed)
        text = _batch_numbers(bar.span)
        if bar.width * pixels > 7 * len(text) + 5:
            axes.text(
                bar.start + bar.width / 2,
                top + height / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=8.5,
                color=INK,
                fontweight="bold" if is_followed else "normal",
                zorder=6,
            )
        if is_followed:
            axes.broken_barh(
                [(bar.start, bar.width)],
                (top, height),
                facecolors="none",
                edgecolors=INK,
                linewidth=1.6,
                zorder=5,
            )


def _has_batch(span: Span, followed: Span) -> bool:
    """Return whether a span includes the batch of the followed span."""
    offset = followed.batch - span.batch
    return span.loop == followed.loop and 0 <= offset < span.n_batches


def _batch_numbers(span: Span) -> str:
    last = span.batch + span.n_batches - 1
    return f"{span.batch}–{last}" if last > span.batch else f"{span.batch}"
