"""draw(): spans as a picture, in which one sees what overlaps, and where the loop waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import MissingDependency
from pinfeed.memory.units import human
from pinfeed.profiling.spans import THREADS, Lane, Span, clipped, extent, starved, tracks
from pinfeed.profiling.stats import WORTH_A_WORD, Totals

_COLOURS: dict[Lane, str] = {
    "read": "#5b8db8",
    "copy": "#6bb0a6",
    "wait": "#d7263d",
    "lend": "#3d3d3d",
    "compute": "#e9b44c",
    "land": "#8c1c2b",
    "device": "#cf8a3a",
    "write": "#9a7fb8",
}
_WORDS: dict[Lane, str] = {
    "read": "reading",
    "copy": "copying to the device",
    "wait": "the loop waits for a batch",
    "lend": "is handed it",
    "compute": "computes",
    "land": "waits for write-backs",
    "device": "the device computes",
    "write": "writing back",
}
_SIGNAL = _COLOURS["wait"]
_BAND = "#fbe3e6"
_QUIET = "#d9d9d9"
_INK = "#222222"
_FAINT = "#777777"
_WIDTH_IN = 13.0
_ROW_IN = 0.6
_TRACK_IN = 0.36
_GAP_IN = 0.32
_DPI = 100
_N_BINS = 400
# Narrower ones cannot be told apart: then it is drawn how much of each moment they take.
_LEAST_BARS_IN = 0.02
# A bit more than a pixel: anything narrower would not be seen.
_NARROWEST_IN = 0.0125
_EDGED_IN = 0.04


@dataclass(frozen=True)
class _Row:
    """Where the spans of a thread, or of several that do the same, are drawn."""

    name: str
    top: float
    n_tracks: int

    @property
    def height(self) -> float:
        """Of a track."""
        return _ROW_IN if self.n_tracks == 1 else _TRACK_IN

    @property
    def bottom(self) -> float:
        return self.top + self.n_tracks * self.height

    def box(self, track: int) -> tuple[float, float]:
        """Top and height of what is drawn on a track."""
        return self.top + track * self.height + 0.03, self.height - 0.06


@dataclass(frozen=True)
class _Bar:
    """A span, and where it is drawn: times in the axis's unit."""

    span: Span
    row: _Row
    track: int
    start: float
    width: float


def draw(
    spans: Sequence[Span], start_s: float, end_s: float, found: Totals, path: str | IO[bytes]
) -> None:
    """Draw what happened between two moments, and how much the loop waited in the whole run.

    Args:
        spans: Of the whole run.
        start_s: Of the stretch, on the clock of the spans.
        end_s: Of the stretch.
        found: What was counted in the stretch.
        path: Path of the picture, whose ending says of which kind it is; or an open file, for a
            PNG.

    Raises:
        MissingDependency: There is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency('a picture needs matplotlib: pip install "pinfeed[plot]"') from None
    stretch, run = clipped(spans, start_s, end_s), extent(spans)
    unit = 1e3 if end_s - start_s < 10 else 1.0
    rows, bars = _placed(stretch, start_s, unit)
    heights = [rows[-1].bottom, *[0.5] * (end_s - start_s < 0.95 * (run[1] - run[0]))]
    figure = Figure(
        figsize=(_WIDTH_IN, sum(heights) + 1.1 + 0.7 * len(heights)), dpi=_DPI, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    gaps = [((start - start_s) * unit, (end - start) * unit) for start, end in starved(stretch)]
    axes.broken_barh(gaps, (-0.12, rows[-1].bottom + 0.24), facecolors=_BAND, linewidth=0, zorder=0)
    per_in = (end_s - start_s) * unit / _WIDTH_IN
    is_fine = (
        max(_usual_width(bars, lane) for lane in ("read", "compute", "device"))
        > _LEAST_BARS_IN * per_in
    )
    if is_fine:
        _draw_bars(axes, bars, found.watched == "device", per_in)
    else:
        _draw_shares(axes, bars, found.watched == "device")
    if found.watched == "device":
        axes.broken_barh(
            gaps,
            next(row for row in rows if row.name == "device").box(0),
            facecolors=_SIGNAL,
            linewidth=0,
            zorder=2,
        )
    axes.set_xlim(0, (end_s - start_s) * unit)
    axes.set_ylim(rows[-1].bottom + 0.12, -0.12)
    _finish(
        axes,
        [
            ((row.top + row.bottom) / 2, _label(row, stretch, end_s - start_s, found))
            for row in rows
        ],
    )
    axes.set_xlabel(
        f"{'milli' * (unit > 1)}seconds, from {start_s:.2f} s after the first batch was asked for",
        color=_FAINT,
        fontsize=9,
    )
    if below:
        _draw_run(below[0], spans, run, (start_s, end_s))
    _explain(figure, axes, spans, stretch, found, is_fine)
    # It is known now how wide the axes are.
    figure.draw_without_rendering()
    if is_fine:
        _number(axes, bars)
    figure.savefig(path, format=None if isinstance(path, str) else "png")


def _placed(spans: Sequence[Span], start_s: float, unit: float) -> tuple[list[_Row], list[_Bar]]:
    """Rows from top to bottom, in the order in which a batch goes through them, and what is on them."""
    placed = list(zip(spans, tracks(spans), strict=True))
    rows: list[_Row] = []
    bars: list[_Bar] = []
    for name, lanes in THREADS.items():
        here = [
            (span, track if name == "read" else 0) for span, track in placed if span.lane in lanes
        ]
        if here:
            row = _Row(
                name,
                rows[-1].bottom + _GAP_IN if rows else 0.0,
                1 + max(track for _, track in here),
            )
            rows.append(row)
            bars += [
                _Bar(
                    span,
                    row,
                    track,
                    (span.start_s - start_s) * unit,
                    (span.end_s - span.start_s) * unit,
                )
                for span, track in here
            ]
    return rows, bars


def _usual_width(bars: Sequence[_Bar], lane: Lane) -> float:
    """Median of the widths of a lane's bars; 0 without bars."""
    widths = [bar.width for bar in bars if bar.span.lane == lane]
    return float(np.median(widths)) if widths else 0.0


def _colour(span: Span, by_device: bool) -> str:
    """Neighbouring batches differ in shade.

    Where the device is seen to wait, it is no matter whether the loop does.
    """
    if span.lane == "wait" and by_device:
        return _QUIET
    colour = _COLOURS[span.lane]
    if span.lane in ("wait", "lend", "land") or span.batch // span.n_batches % 2:
        return colour
    return "#" + "".join(
        f"{255 - round(0.7 * (255 - int(colour[i : i + 2], 16))):02x}" for i in (1, 3, 5)
    )


def _draw_bars(axes: Any, bars: Sequence[_Bar], by_device: bool, per_in: float) -> None:
    """A bar for each span, wide enough to be seen; of narrow ones in one place the longest lies on top, and all of them on the others.

    Args:
        axes: Where to draw.
        bars: The spans.
        by_device: Whether it is the device whose waiting is shown.
        per_in: Length of an inch, in the axis's unit.
    """
    alike: dict[tuple[str, _Row, int, float], list[tuple[float, float]]] = {}
    for bar in bars:
        of_edged = bar.width / (_EDGED_IN * per_in)
        layer = 2.0 if of_edged >= 1 else 2.5 + int(10 * of_edged) / 100
        key = (
            _colour(bar.span, by_device),
            bar.row,
            bar.track,
            3.0 if bar.span.lane == "land" else layer,
        )
        alike.setdefault(key, []).append((bar.start, max(bar.width, _NARROWEST_IN * per_in)))
    for (colour, row, track, layer), of_one in alike.items():
        # An edge would cover a narrow bar; and in the loop, much is narrow.
        edge = 0.7 if layer == 2.0 and row.name != "loop" else 0.0
        axes.broken_barh(
            of_one,
            row.box(track),
            facecolors=colour,
            edgecolors="white",
            linewidth=edge,
            zorder=layer,
        )


def _draw_shares(axes: Any, bars: Sequence[_Bar], by_device: bool) -> None:
    """How much of each moment a lane takes: the height of a track is all of it."""
    edges = np.linspace(0.0, max(bar.start + bar.width for bar in bars), _N_BINS + 1)
    alike: dict[tuple[_Row, int], dict[Lane, list[_Bar]]] = {}
    for bar in bars:
        if bar.span.lane != "land":
            # A part of compute.
            alike.setdefault((bar.row, bar.track), {}).setdefault(bar.span.lane, []).append(bar)
    for (row, track), lanes in alike.items():
        (top, height), filled = row.box(track), np.zeros(_N_BINS)
        for of_one in lanes.values():
            share = _covered(
                [(bar.start, bar.start + bar.width) for bar in of_one], edges
            ) / np.diff(edges)
            # What takes hardly any of a moment is a line all the same.
            share = np.where(share > 0, np.maximum(share, _NARROWEST_IN / height), 0.0)
            low, filled = filled, np.minimum(filled + share, 1.0)
            colour = _colour(of_one[0].span._replace(batch=1, n_batches=1), by_device)
            axes.stairs(
                top + height * (1 - filled),
                edges,
                baseline=top + height * (1 - low),
                fill=True,
                color=colour,
                zorder=2,
            )


def _label(row: _Row, spans: Sequence[Span], seconds: float, found: Totals) -> str:
    """A name, and how much of the time it was busy; or, of what was watched, waited."""
    several = f" × {row.n_tracks}" if row.n_tracks > 1 else ""
    if row.name == found.watched:
        return f"{row.name}\nwaits {found.starved:.0%}"
    busy = sum(
        span.end_s - span.start_s
        for span in spans
        if span.lane in THREADS[row.name] and span.lane not in ("wait", "land")
    )
    return f"{row.name}{several}\nbusy {busy / seconds / row.n_tracks:.0%}"


def _draw_run(
    axes: Any, spans: Sequence[Span], run: tuple[float, float], stretch: tuple[float, float]
) -> None:
    """A strip of the whole run: the share of the time in which the loop waited, and where the stretch is."""
    edges = np.linspace(*run, _N_BINS + 1)
    axes.axvspan(*run, color="#eeeeee", linewidth=0, zorder=0)
    axes.stairs(_covered(starved(spans), edges) / np.diff(edges), edges, fill=True, color=_SIGNAL)
    axes.axvspan(*stretch, facecolor="none", edgecolor=_INK, linewidth=1.4, zorder=4)
    axes.set_xlim(*run)
    axes.set_ylim(0, 1)
    _finish(axes, [(0.5, "whole run\nwaiting")])
    axes.set_xlabel("seconds; framed: the stretch above", color=_FAINT, fontsize=9)


def _covered(
    intervals: Sequence[tuple[float, float]], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How much of each bin the intervals cover, shape (len(edges) - 1,); they do not overlap."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    starts, ends = np.array(sorted(intervals)).T
    # At each end, how much was covered by then.
    before = np.cumsum(ends - starts)
    times, sums = (
        np.stack([starts, ends], 1).ravel(),
        np.stack([before - (ends - starts), before], 1).ravel(),
    )
    return np.diff(np.interp(edges, times, sums, left=0.0, right=sums[-1]))


def _explain(
    figure: Any,
    axes: Any,
    spans: Sequence[Span],
    stretch: Sequence[Span],
    found: Totals,
    is_fine: bool,
) -> None:
    """Title, what is seen, and the legend."""
    from matplotlib.patches import Patch

    lent = [span for span in stretch if span.lane == "lend"]
    which = (
        f"batches {lent[0].batch} to {lent[-1].batch}; {sum(span.lane == 'lend' for span in spans):,} in all"
        if lent
        else "no batch"
    )
    moved = f" and {human(found.bytes / len(lent))}" if lent and found.bytes else ""
    size = f", {found.rows / len(lent):,.0f} rows{moved} each" if lent else ""
    of_all = (
        "" if found.batches == sum(span.lane == "lend" for span in spans) else "in this stretch "
    )
    title = f"{of_all}{found.verdict}"
    title = title[0].upper() + title[1:]
    colour = _SIGNAL if found.starved >= WORTH_A_WORD else _INK
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", color=colour, pad=30)
    facts = f"{which}{size}; {found.depth} ahead; {found.rates}"
    axes.annotate(
        facts,
        (0, 1),
        (0, 10),
        xycoords="axes fraction",
        textcoords="offset points",
        color=_FAINT,
        fontsize=10,
    )
    there = {span.lane for span in stretch}
    words = dict(_WORDS)
    quiet = found.watched == "device"
    handles = [
        Patch(color=_QUIET if lane == "wait" and quiet else _COLOURS[lane], label=words[lane])
        for lane in words
        if lane in there
    ]
    handles += [Patch(color=_SIGNAL, label="the device waits for a batch")] * quiet
    handles += [
        Patch(facecolor="none", edgecolor=_INK, linewidth=1.5, label="one batch on its way")
    ] * is_fine
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9.5,
        handlelength=1.0,
        columnspacing=1.6,
    )
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.12)


def _number(axes: Any, bars: Sequence[_Bar]) -> None:
    """Write the number of the batch on bars that have room for it, and frame those of one batch."""
    lent = [bar.span for bar in bars if bar.span.lane == "lend"]
    followed = lent[len(lent) // 2] if lent else None
    left, right = axes.get_xlim()
    pixels = axes.get_window_extent().width / (right - left)
    for bar in bars:
        span, last = bar.span, bar.span.batch + bar.span.n_batches - 1
        if span.lane in ("wait", "lend", "land"):
            continue
        top, height = bar.row.box(bar.track)
        text = f"{span.batch}–{last}" if last > span.batch else f"{span.batch}"
        is_followed = (
            followed is not None
            and span.loop == followed.loop
            and span.batch <= followed.batch <= last
        )
        if bar.width * pixels > 7 * len(text) + 5:
            middle, weight = (
                (bar.start + bar.width / 2, top + height / 2),
                "bold" if is_followed else "normal",
            )
            axes.text(
                *middle,
                text,
                ha="center",
                va="center_baseline",
                fontsize=8.5,
                color=_INK,
                fontweight=weight,
                zorder=6,
            )
        if is_followed:
            axes.broken_barh(
                [(bar.start, bar.width)],
                (top, height),
                facecolors="none",
                edgecolors=_INK,
                linewidth=1.6,
                zorder=5,
            )


def _finish(axes: Any, labels: Sequence[tuple[float, str]]) -> None:
    """Names at the left, and no lines but the axis of time."""
    axes.set_yticks(
        [at for at, _ in labels], [label for _, label in labels], color=_INK, fontsize=10
    )
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", colors=_FAINT, labelsize=9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")
