"""draw(): draws the picture of a timeline, with overlapping work and waits of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pinfeed.errors import MissingDependency
from pinfeed.memory.units import human, human_rate
from pinfeed.profiling.bottleneck import NOTABLE
from pinfeed.profiling.plot_bars import (
    BAND,
    COLOURS,
    FAINT,
    INK,
    LANE_NAMES,
    N_BINS,
    QUIET,
    SIGNAL,
    Row,
    covered,
    draw_bars,
    draw_shares,
    number_bars,
    place,
    usual_width,
)
from pinfeed.profiling.spans import THREADS, Lane, Span, clipped, extent, stalled, starved
from pinfeed.validation.suggestions import install_line

_WIDTH_IN = 13.0
_DPI = 100
# Narrower bars cannot be told apart. The picture then shows how much of each moment they take.
_LEAST_BARS_IN = 0.02


@dataclass(frozen=True)
class _Stretch:
    """The part of a run that the picture shows.

    Attributes:
        spans: Spans of the part.
        start_s: Start of the part, in seconds.
        end_s: End of the part, in seconds.
        depth: Number of batches that were prefetched.
    """

    spans: list[Span]
    start_s: float
    end_s: float
    depth: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def unit(self) -> float:
        """Units of the time axis per second: milliseconds for a short stretch."""
        return 1e3 if self.seconds < 10 else 1.0

    @property
    def by_device(self) -> bool:
        """Whether the picture shows waits of the device, not of the loop."""
        return any(span.lane == "device" for span in self.spans)

    @property
    def watched(self) -> str:
        """Name of the row that shows whether data was late."""
        return "device" if self.by_device else "loop"


def draw(
    spans: Sequence[Span], start_s: float, end_s: float, depth: int, path: str | IO[bytes]
) -> None:
    """Draw the spans between two moments, and how much the loop waited in the whole run.

    Args:
        spans: The spans of the whole run.
        start_s: Start of the drawn stretch, in seconds on the clock of the spans.
        end_s: End of the stretch.
        depth: Number of batches that were prefetched.
        path: Path of the picture, whose ending decides the format; or an open file, for a PNG.

    Raises:
        MissingDependency: If matplotlib is not installed.
    """
    stretch = _Stretch(clipped(spans, start_s, end_s), start_s, end_s, depth)
    run = extent(spans)
    rows, bars = place(stretch.spans, start_s, stretch.unit)
    is_part = stretch.seconds < 0.95 * (run[1] - run[0])
    figure, axes, run_axes = _make_figure(rows[-1].bottom, with_run=is_part)
    per_inch = stretch.seconds * stretch.unit / _WIDTH_IN
    widest = max(usual_width(bars, lane) for lane in ("read", "compute", "device"))
    is_fine = widest > _LEAST_BARS_IN * per_inch
    if is_fine:
        draw_bars(axes, bars, stretch.by_device, per_inch)
    else:
        draw_shares(axes, bars, stretch.by_device)
    _draw_gaps(axes, rows, stretch)
    _label_rows(axes, rows, stretch)
    if run_axes is not None:
        _draw_run(run_axes, spans, run, stretch)
    _write_title(axes, spans, stretch)
    _add_legend(figure, stretch, is_fine)
    # The width of the axes is known only after this.
    figure.draw_without_rendering()
    if is_fine:
        number_bars(axes, bars)
    figure.savefig(path, format=None if isinstance(path, str) else "png")


def _make_figure(height: float, *, with_run: bool) -> tuple[Any, Any, Any]:
    """Make a figure with axes for the rows, and with axes or None for the whole run."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency(f"a picture needs matplotlib; {install_line('plot')}") from None
    heights = [height, 0.5] if with_run else [height]
    size = (_WIDTH_IN, sum(heights) + 1.1 + 0.7 * len(heights))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    return figure, all_axes[0], all_axes[1] if with_run else None


def _draw_gaps(axes: Any, rows: Sequence[Row], stretch: _Stretch) -> None:
    """Draw the data stalls, as a band behind all rows and on the row of the device."""
    gaps = [
        ((start - stretch.start_s) * stretch.unit, (end - start) * stretch.unit)
        for start, end in starved(stretch.spans)
    ]
    band = (-0.12, rows[-1].bottom + 0.24)
    axes.broken_barh(gaps, band, facecolors=BAND, linewidth=0, zorder=0)
    if stretch.by_device:
        box = next(row for row in rows if row.name == "device").box(0)
        axes.broken_barh(gaps, box, facecolors=SIGNAL, linewidth=0, zorder=2)


def _label_rows(axes: Any, rows: Sequence[Row], stretch: _Stretch) -> None:
    """Set the limits of the axes, and label each row with its name and load."""
    axes.set_xlim(0, stretch.seconds * stretch.unit)
    axes.set_ylim(rows[-1].bottom + 0.12, -0.12)
    _set_labels(axes, [((row.top + row.bottom) / 2, _label(row, stretch)) for row in rows])
    unit = "milliseconds" if stretch.unit > 1 else "seconds"
    text = f"{unit}, starting {stretch.start_s:.2f} s after the first request"
    axes.set_xlabel(text, color=FAINT, fontsize=9)


def _label(row: Row, stretch: _Stretch) -> str:
    """Return a row's name and the share of the time that it worked or, if watched, waited."""
    if row.name == stretch.watched:
        return f"{row.name}\nwaits {stalled(stretch.spans):.0%}"
    several = f" × {row.n_tracks}" if row.n_tracks > 1 else ""
    busy_s = sum(
        span.end_s - span.start_s
        for span in stretch.spans
        if span.lane in THREADS[row.name] and span.lane not in ("wait", "write_wait")
    )
    return f"{row.name}{several}\nbusy {busy_s / stretch.seconds / row.n_tracks:.0%}"


def _draw_run(
    axes: Any, spans: Sequence[Span], run: tuple[float, float], stretch: _Stretch
) -> None:
    """Draw a strip of the whole run: the share of waits, and a frame around the part above."""
    edges = np.linspace(*run, N_BINS + 1)
    axes.axvspan(*run, color="#eeeeee", linewidth=0, zorder=0)
    axes.stairs(covered(starved(spans), edges) / np.diff(edges), edges, fill=True, color=SIGNAL)
    frame = (stretch.start_s, stretch.end_s)
    axes.axvspan(*frame, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=4)
    axes.set_xlim(*run)
    axes.set_ylim(0, 1)
    _set_labels(axes, [(0.5, "whole run\nwaiting")])
    axes.set_xlabel("seconds; the frame marks the interval above", color=FAINT, fontsize=9)


def _write_title(axes: Any, spans: Sequence[Span], stretch: _Stretch) -> None:
    """Write the share of waits as the title, and the batches and rates below it."""
    lent = [span for span in stretch.spans if span.lane == "lend"]
    n_in_all = sum(span.lane == "lend" for span in spans)
    share = stalled(stretch.spans)
    time = "the time" if len(lent) == n_in_all else "this interval"
    axes.set_title(
        f"The {stretch.watched} waited {share:.0%} of {time}",
        loc="left",
        fontsize=15,
        fontweight="bold",
        color=SIGNAL if share >= NOTABLE else INK,
        pad=30,
    )
    axes.annotate(
        f"{_describe_batches(lent, n_in_all, stretch.seconds)}; depth={stretch.depth}",
        (0, 1),
        (0, 10),
        xycoords="axes fraction",
        textcoords="offset points",
        color=FAINT,
        fontsize=10,
    )


def _describe_batches(lent: Sequence[Span], n_in_all: int, seconds: float) -> str:
    """Return the numbers and the mean size of the batches that the loop received, and rates."""
    if not lent:
        return "no batch"
    rows = sum(span.rows for span in lent)
    nbytes = sum(span.bytes for span in lent)
    size = f" and {human(nbytes / len(lent))}" if nbytes else ""
    moved = f", {human_rate(nbytes / seconds)}" if nbytes else ""
    return (
        f"batches {lent[0].batch} to {lent[-1].batch}; {n_in_all:,} in all, "
        f"{rows / len(lent):,.0f} rows{size} each; {rows / seconds:,.0f} rows/s{moved}"
    )


def _add_legend(figure: Any, stretch: _Stretch, is_fine: bool) -> None:
    from matplotlib.patches import Patch

    def colour(lane: Lane) -> str:
        return QUIET if lane == "wait" and stretch.by_device else COLOURS[lane]

    lanes = {span.lane for span in stretch.spans}
    handles = [
        Patch(color=colour(lane), label=name) for lane, name in LANE_NAMES.items() if lane in lanes
    ]
    if stretch.by_device:
        handles.append(Patch(color=SIGNAL, label="the device waits for a batch"))
    if is_fine:
        label = "one batch, from read to step"
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=1.5, label=label))
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


def _set_labels(axes: Any, labels: Sequence[tuple[float, str]]) -> None:
    """Write names on the left, and remove all lines except the time axis."""
    positions = [at for at, _ in labels]
    axes.set_yticks(positions, [text for _, text in labels], color=INK, fontsize=10)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", colors=FAINT, labelsize=9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")
