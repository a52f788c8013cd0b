"""Draw the pictures of the protocol: a batch in threads and streams, and forwarding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
# The colours of batches k-1, k, k+1, ...
COLOURS = (
    "#9e9e9e",
    "#4878a8",
    "#e69138",
    "#6aa84f",
    "#8e63a8",
    "#4aa8a8",
)
THREAD, STREAM = "#f4efe4", "#e8eef4"
LANES = (
    ("consumer thread", "never waits for the device", THREAD),
    ("reader thread", "store → staging", THREAD),
    ("read stream", "staging → device", STREAM),
    ("compute stream", "your model", STREAM),
    ("write stream", "device → staging", STREAM),
    ("writer thread", "staging → store", THREAD),
)
LOOP, READER, READ, COMPUTE, WRITE, WRITER = range(len(LANES))
PERIOD, DEPTH = 5.0, 2
BEGIN, END = -12.4, 9.6


def main() -> None:
    # A fixed salt gives the same file for the same picture.
    mpl.rcParams["svg.hashsalt"] = "pinfeed"
    mpl.rcParams["font.family"] = "DejaVu Sans"
    draw_time().savefig(HERE / "time.svg", metadata={"Date": None})
    draw_forwarding().savefig(HERE / "forwarding.svg", metadata={"Date": None})


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.axis("off")
    return figure, axes


def name(batch: int) -> str:
    return "k" if not batch else f"k{batch:+d}".replace("-", "\N{MINUS SIGN}")


def draw_time() -> Figure:
    """Draw a loop with two prefetched batches, whose step takes longer than a transfer."""
    figure, axes = new_figure(12, 7.2)
    for lane, (title, what, colour) in enumerate(LANES):
        axes.broken_barh([(BEGIN, END - BEGIN)], (lane - 0.44, 0.88), facecolors=colour)
        axes.text(
            BEGIN - 0.25,
            lane - (0.12 if what else 0),
            title,
            ha="right",
            va="center",
            fontsize=12,
            weight="bold",
        )
        axes.text(
            BEGIN - 0.25, lane + 0.2, what, ha="right", va="center", fontsize=10, color="#555555"
        )
    for batch in range(-1, 5):
        bars(axes, batch)
    for batch in range(-1, 5):
        arrows(axes, batch, is_labelled=batch == 0)
    axes.set_xlim(BEGIN - 4.2, END + 0.1)
    axes.set_ylim(6.35, -0.75)
    axes.annotate(
        "", (END, 5.85), (BEGIN, 5.85), arrowprops={"arrowstyle": "-|>", "color": "black"}
    )
    axes.text(END, 6.12, "time", ha="right", fontsize=10)
    axes.text(
        BEGIN,
        6.12,
        "An arrow is an event, and points to the waiter.  Batch k has a bold frame.",
        fontsize=10,
        color="#333333",
    )
    return figure


def bars(axes: Any, batch: int) -> None:
    """Draw the bars of a batch, whose step begins at ``PERIOD * batch``."""
    start = PERIOD * batch
    bar(axes, READER, batch, start - DEPTH * PERIOD - 0.9, 2.4, "gather {}")
    bar(axes, LOOP, batch, start - PERIOD - 1.95, 0.9, "queue\n{}")
    bar(axes, READ, batch, start - PERIOD + 0.05, 1.6, "copy {}")
    bar(axes, LOOP, batch, start - 0.95, 0.8, "lend\n{}")
    bar(axes, LOOP, batch, start - 0.1, 1.8, "your code\n{}")
    bar(axes, LOOP, batch, start + 1.75, 0.8, "hold\n{}")
    bar(axes, COMPUTE, batch, start - 0.15, 0.4, "fwd", turned=True)
    bar(axes, COMPUTE, batch, start + 0.3, 3.9, "your step {}")
    bar(axes, COMPUTE, batch, start + 4.25, 0.4, "held", turned=True)
    bar(axes, WRITE, batch, start + 5.0, 1.55, "copy {}")
    bar(axes, WRITER, batch, start + 6.75, 2.1, "scatter {}")


def bar(
    axes: Any,
    lane: int,
    batch: int,
    start: float,
    length: float,
    label: str,
    *,
    turned: bool = False,
) -> None:
    stop = min(END, start + length)
    start = max(BEGIN, start)
    if stop <= start:
        return
    axes.broken_barh(
        [(start, stop - start)],
        (lane - 0.3, 0.6),
        facecolors=COLOURS[batch + 1],
        edgecolors="black",
        linewidth=1.5 * (not batch),
    )
    if stop - start > 0.7 * length:
        style = {"fontsize": 8, "rotation": 90} if turned else {"fontsize": 9, "weight": "bold"}
        axes.text(
            (start + stop) / 2,
            lane,
            label.format(name(batch)),
            ha="center",
            va="center",
            color="white",
            **style,
        )


def arrows(axes: Any, batch: int, *, is_labelled: bool) -> None:
    """Draw an arrow from each event of a batch to its waiter."""
    start = PERIOD * batch
    copied = start - PERIOD + 1.65
    computed = start + 4.65
    arrived = start + 6.55
    arrow(axes, (copied, READ), (start - 0.15, COMPUTE), is_labelled, "copied", (-0.9, 0.0))
    arrow(axes, (computed, COMPUTE), (start + 5.0, WRITE), is_labelled, "ready", (-0.62, 0.03))
    arrow(axes, (arrived, WRITE), (start + 6.75, WRITER), is_labelled, "arrived", (-0.72, 0.03))
    arrow(
        axes,
        (computed, COMPUTE),
        (start + PERIOD + 0.05, READ),
        is_labelled,
        "released",
        (0.85, 0.05),
    )
    arrow(
        axes,
        (copied, READ),
        (start + PERIOD - 0.9, READER),
        is_labelled,
        "copied: staging is free again",
        (0.2, 0.0),
    )


def arrow(
    axes: Any,
    tail: tuple[float, float],
    head: tuple[float, float],
    is_labelled: bool,
    label: str,
    shift: tuple[float, float],
) -> None:
    (x, lane), (to_x, to_lane) = tail, head
    down = 1 if to_lane > lane else -1
    if min(x, to_x) < BEGIN or max(x, to_x) > END:
        return
    style = {
        "arrowstyle": "-|>",
        "color": "black" if is_labelled else "#b0b0b0",
        "linewidth": 1.8 if is_labelled else 0.8,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate(
        "",
        (to_x, to_lane - 0.3 * down),
        (x, lane + 0.3 * down),
        arrowprops=style,
        zorder=5 if is_labelled else 3,
    )
    if is_labelled:
        middle = (x + to_x) / 2 + shift[0], (lane + to_lane) / 2 + shift[1]
        box = {
            "boxstyle": "round,pad=0.15",
            "facecolor": "white",
            "edgecolor": "none",
            "alpha": 0.9,
        }
        axes.text(
            *middle,
            label,
            ha="center",
            va="center",
            fontsize=10.5,
            style="italic",
            bbox=box,
            zorder=6,
        )


def draw_forwarding() -> Figure:
    """Draw the forwarding of a row that batch k+1 contains in its state before batch k."""
    figure, axes = new_figure(10, 3.6)
    table = [(0, 2, "row 2"), (0, 1, "row 5, old"), (0, 0, "row 9")]
    for x, y, label in table:
        cell(axes, x, y, label, "#f4efe4", "black")
    axes.text(0, 2.75, "table in host memory", ha="center", weight="bold")
    cell(axes, 3.4, 2, "row 2, new", COLOURS[1], "white")
    cell(axes, 3.4, 1, "row 5, new", COLOURS[1], "white")
    axes.text(3.4, 2.75, "batch k: trained, write-back queued", ha="center", weight="bold")
    cell(axes, 6.8, 1, "row 5, old → new", COLOURS[2], "white")
    cell(axes, 6.8, 0, "row 9", COLOURS[2], "white")
    axes.text(6.8, 2.75, "batch k+1: prefetched earlier", ha="center", weight="bold")
    pointer(axes, (2.55, 2.1), (0.85, 2.1), "", "#777777")
    pointer(axes, (2.55, 1.1), (0.85, 1.1), "write-back, queued", "#777777")
    pointer(
        axes,
        (4.25, 1.0),
        (5.95, 1.0),
        "forwarded on the device,\nbefore the loop receives k+1",
        "black",
    )
    pointer(
        axes,
        (0.85, -0.05),
        (5.95, -0.05),
        "prefetched: row 9, and row 5 before the update",
        "#777777",
    )
    axes.set_xlim(-1.1, 8)
    axes.set_ylim(-0.6, 3.05)
    return figure


def cell(axes: Any, x: float, y: float, label: str, colour: str, text: str) -> None:
    axes.broken_barh([(x - 0.85, 1.7)], (y - 0.3, 0.6), facecolors=colour, edgecolors="black")
    axes.text(x, y, label, ha="center", va="center", color=text)


def pointer(
    axes: Any, tail: tuple[float, float], head: tuple[float, float], label: str, colour: str
) -> None:
    axes.annotate(
        "", head, tail, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}
    )
    axes.text(
        (tail[0] + head[0]) / 2,
        tail[1] + 0.1,
        label,
        ha="center",
        va="bottom",
        fontsize=8.5,
        color=colour,
    )


if __name__ == "__main__":
    main()
