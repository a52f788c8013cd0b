"""draw(): draws the picture of a timeline, with overlapping work and waits of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from pinfeed.errors import MissingDependency
from pinfeed.memory.units import human, human_rate
from pinfeed.profiling.spans import (
    WAITING,
    Lane,
    Span,
    by_thread,
    clipped,
    extent,
    stalled,
    starved,
)
from pinfeed.validation.suggestions import install_line

_LOOKS: dict[Lane, tuple[str, str]] = {
    "read": ("#5b8db8", "reading"),
    "host_transform": ("#3f6f9c", "host_transform"),
    "copy": ("#6bb0a6", "copying to the device"),
    "device_transform": ("#3f8f7d", "device_transform"),
    "wait": ("#d7263d", "the loop waits for a batch"),
    "lend": ("#3d3d3d", "receives a batch (overhead)"),
    "compute": ("#e9b44c", "training step"),
    "write_wait": ("#8c1c2b", "waits for write-backs"),
    "device": ("#cf8a3a", "the device computes"),
    "write": ("#9a7fb8", "writing back"),
}
"""Colour and meaning of each lane."""
# Time in which the watched thread waits, on its own row and behind the other rows.
_SIGNAL = _LOOKS["wait"][0]
_BAND = "#fbe3e6"
# Waits that cost nothing, because the device computes.
_QUIET = "#d9d9d9"
_INK = "#222222"
_FAINT = "#777777"
# Share of waits from which the title is red. A loop that waits less needs no attention.
_ALARMING = 0.2

_WIDTH_IN = 13.0
_TRACK_IN = 0.45
# Slightly more than a pixel, because a narrower bar would be invisible.
_NARROWEST_IN = 0.0125
# Bars of more batches would overlap if they were widened, and show more work than there was.
_MOST_WIDENED = 300
_CHARACTER_IN = 0.09

_Rows = Mapping[str, Sequence[tuple[Span, int]]]
"""Spans of each thread, from top to bottom, and the track of each span."""


def draw(
    spans: Sequence[Span], start_s: float, end_s: float, depth: int, path: str | IO[bytes]
) -> None:
    """Draw the spans between two moments, and the waits of the loop in the whole run.

    Args:
        spans: The spans of the whole run.
        start_s: Start of the drawn stretch, in seconds on the clock of the spans.
        end_s: End of the stretch.
        depth: Number of batches that were prefetched.
        path: Path of the picture, whose ending decides the format; or an open file, for a PNG.

    Raises:
        MissingDependency: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency(
            f"a picture needs matplotlib; {install_line('matplotlib')}"
        ) from None
    shown = clipped(spans, start_s, end_s)
    rows = by_thread(shown)
    height = sum(map(_n_tracks, rows.values())) + 0.5 * len(rows)
    figure = Figure(figsize=(_WIDTH_IN, _TRACK_IN * height + 2.8), layout="constrained")
    axes, run_axes = figure.subplots(2, 1, height_ratios=[_TRACK_IN * height, 0.5])
    for one in (axes, run_axes):
        one.tick_params(axis="x", colors=_FAINT, labelsize=9)
        one.tick_params(axis="y", length=0, pad=8)
        one.spines[["left", "right", "top"]].set_visible(False)
    _draw_rows(axes, rows, start_s, end_s)
    _draw_run(run_axes, spans, start_s, end_s)
    _write_title(axes, spans, shown, f"depth={depth}")
    _add_legend(figure, shown)
    figure.savefig(path, format=None if isinstance(path, str) else "png")


def colour_of(span: Span, by_device: bool) -> str:
    """Return the colour of a span; adjacent batches differ in shade.

    Args:
        span: The span.
        by_device: Whether the picture shows waits of the device. Waits of the loop are grey then.
    """
    if span.lane == "wait" and by_device:
        return _QUIET
    colour, _ = _LOOKS[span.lane]
    is_even = span.batch // span.n_batches % 2 == 0
    if span.lane in WAITING or not is_even:
        return colour
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{255 - round(0.7 * (255 - channel)):02x}" for channel in channels)


def _n_tracks(row: Sequence[tuple[Span, int]]) -> int:
    return 1 + max(track for _, track in row)


def _watched(spans: Sequence[Span]) -> str:
    """Return the thread that shows whether data was late: the device if it was recorded."""
    return "device" if any(span.lane == "device" for span in spans) else "loop"


def _draw_rows(axes: Any, rows: _Rows, start_s: float, end_s: float) -> None:
    """Draw a row for each thread, with its name and the share of the time that it worked."""
    spans = [span for row in rows.values() for span, _ in row]
    by_device = _watched(spans) == "device"
    inch_s = (end_s - start_s) / _WIDTH_IN
    is_widened = sum(span.lane == "lend" for span in spans) <= _MOST_WIDENED
    narrowest_s = _NARROWEST_IN * inch_s if is_widened else 0.0
    top = 0.0
    labels = {}
    for name, row in rows.items():
        _draw_bars(axes, row, top, narrowest_s, by_device)
        _number_bars(axes, row, top, inch_s)
        if by_device and name == "device":
            _draw_gaps(axes, spans, (top + 0.05, 0.9), _SIGNAL)
        n_tracks = _n_tracks(row)
        labels[top + n_tracks / 2] = _label(name, row, spans, end_s - start_s)
        top += n_tracks + 0.5
    _draw_gaps(axes, spans, (0.0, top - 0.5), _BAND)
    axes.set_xlim(start_s, end_s)
    axes.set_ylim(top - 0.4, -0.1)
    axes.set_yticks(list(labels), list(labels.values()), color=_INK, fontsize=10)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_xlabel("seconds since the first request", color=_FAINT, fontsize=9)


def _draw_bars(
    axes: Any, row: Sequence[tuple[Span, int]], top: float, narrowest_s: float, by_device: bool
) -> None:
    for track in range(_n_tracks(row)):
        spans = [span for span, own_track in row if own_track == track]
        # Waits lie on top of the step that contains them.
        spans.sort(key=lambda span: span.lane != "compute")
        axes.broken_barh(
            [(span.start_s, max(span.seconds, narrowest_s)) for span in spans],
            (top + track + 0.05, 0.9),
            facecolors=[colour_of(span, by_device) for span in spans],
            linewidth=0,
            zorder=2,
            # Bars that are not widened get the width of a pixel or disappear if they are snapped.
            snap=narrowest_s > 0,
        )


def _number_bars(axes: Any, row: Sequence[tuple[Span, int]], top: float, inch_s: float) -> None:
    """Write batch numbers on bars that have room for them."""
    for span, track in row:
        has_room = span.seconds > _CHARACTER_IN * inch_s * (len(span.numbers) + 1)
        if has_room and span.lane not in WAITING:
            place = ((span.start_s + span.end_s) / 2, top + track + 0.5)
            axes.text(*place, span.numbers, ha="center", va="center", fontsize=8.5, zorder=3)


def _draw_gaps(axes: Any, spans: Sequence[Span], box: tuple[float, float], colour: str) -> None:
    """Draw the data stalls in a box, given as its top and its height."""
    gaps = [(start, end - start) for start, end in starved(spans)]
    axes.broken_barh(gaps, box, facecolors=colour, linewidth=0, zorder=1, snap=False)


def _label(name: str, row: Sequence[tuple[Span, int]], spans: list[Span], seconds: float) -> str:
    """Return a row's name and the share of the time that it worked or, if watched, waited."""
    if name == _watched(spans):
        return f"{name}\nwaits {stalled(spans):.0%}"
    n_tracks = _n_tracks(row)
    several = f" × {n_tracks}" if n_tracks > 1 else ""
    busy_s = sum(span.seconds for span, _ in row if span.lane not in ("wait", "write_wait"))
    return f"{name}{several}\nbusy {busy_s / seconds / n_tracks:.0%}"


def _draw_run(axes: Any, spans: Sequence[Span], start_s: float, end_s: float) -> None:
    """Draw a strip with the waits of the whole run, and a frame around the part above."""
    run = extent(spans)
    axes.axvspan(*run, color="#eeeeee", linewidth=0, zorder=0)
    _draw_gaps(axes, spans, (0.0, 1.0), _SIGNAL)
    axes.axvspan(start_s, end_s, facecolor="none", edgecolor=_INK, linewidth=1.4, zorder=4)
    axes.set_xlim(*run)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["whole run\nwaiting"], color=_INK, fontsize=10)
    axes.set_xlabel("seconds; the frame marks the interval above", color=_FAINT, fontsize=9)


def _write_title(axes: Any, spans: Sequence[Span], shown: Sequence[Span], depth: str) -> None:
    """Write the share of waits as the title, and the batches and rates below it."""
    lent = [span for span in shown if span.lane == "lend"]
    n_in_all = sum(span.lane == "lend" for span in spans)
    share = stalled(shown)
    time = "the time" if len(lent) == n_in_all else "this interval"
    axes.set_title(
        f"The {_watched(shown)} waited {share:.0%} of {time}",
        loc="left",
        fontsize=15,
        fontweight="bold",
        color=_SIGNAL if share >= _ALARMING else _INK,
        pad=30,
    )
    start_s, end_s = axes.get_xlim()
    text = f"{_describe_batches(lent, n_in_all, end_s - start_s)}; {depth}"
    axes.annotate(
        text, (0, 1), (0, 10), "axes fraction", "offset points", color=_FAINT, fontsize=10
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


def _add_legend(figure: Any, shown: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    by_device = _watched(shown) == "device"
    lanes = {span.lane for span in shown}
    handles = [
        Patch(color=_QUIET if by_device and lane == "wait" else colour, label=meaning)
        for lane, (colour, meaning) in _LOOKS.items()
        if lane in lanes
    ]
    if by_device:
        handles.append(Patch(color=_SIGNAL, label="the device waits for a batch"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9.5)
