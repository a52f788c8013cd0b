"""Draw what a batch of each order holds: a mixed, a bucketed and a packed batch.

The batches are those of a feeder. Run it from the root of the repository:
``python docs/pictures/orders.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import pinfeed

HERE = Path(__file__).parent
# The colours of sources, and of documents.
COLOURS = ("#4878a8", "#e69138", "#6aa84f", "#8e63a8", "#4aa8a8")
PADDING = "#eeeeee"
LENGTH = 12
"""Elements of a packed sequence, and of the longest row."""
N_CELLS = 2 * LENGTH + 8
LENGTHS = np.array([3, 11, 7, 4, 12, 6, 10, 5, 8, 2, 9, 3, 4, 10, 6, 8])
DOCUMENT_LENGTHS = np.array([4, 3, 6, 5, 3])


def main() -> None:
    # A fixed salt gives the same file for the same picture.
    mpl.rcParams["svg.hashsalt"] = "pinfeed"
    mpl.rcParams["font.family"] = "DejaVu Sans"
    draw().savefig(HERE / "orders.svg", metadata={"Date": None})


def draw() -> Figure:
    figure = Figure(figsize=(8.2, 4.9), layout="constrained")
    FigureCanvasSVG(figure)
    # Each panel has this height in cells.
    heights = (5, 7, 7.5)
    panels = figure.subplots(3, 1, height_ratios=heights)
    for axes, height, draw_batches in zip(
        panels, heights, (mixed_batch, padded_batches, packed_batch), strict=True
    ):
        draw_batches(axes)
        axes.set_xlim(-5, N_CELLS)
        axes.set_ylim(height - 2.3, -2.3)
        axes.axis("off")
    return figure


def mixed_batch(axes: Any) -> None:
    """Draw two batches of 10 rows from two sources."""
    sources = {"web": np.arange(70), "code": np.arange(30)}
    order = pinfeed.rows.mixed(sources, {"web": 7, "code": 3})
    rows = order.bind(100, epoch=0)(np.arange(20))
    numbers = order.source_of(rows).reshape(2, 10)
    title(axes, "mixed, 7 : 3", "the rows of two batches of 10; every batch has the shares")
    for y, batch in enumerate(numbers.tolist()):
        for x, number in enumerate(batch):
            cell(axes, x, y, COLOURS[number], order.names[number][0])
    for number, name in enumerate(order.names):
        cell(axes, 13, number, COLOURS[number], name[0])
        label(axes, 14.4, number, f"a row of {name!r}")


def padded_batches(axes: Any) -> None:
    """Draw a padded batch of shuffled rows, and one of rows of similar lengths."""
    order = pinfeed.rows.bucketed(LENGTHS, batch_size=4, seed=1)
    parts = (
        ("shuffled", pinfeed.rows.shuffled(1), 0),
        ("bucketed", order, LENGTH + 6),
    )
    tokens = np.arange(LENGTHS.sum())
    offsets = np.concatenate(([0], LENGTHS.cumsum()))
    store = pinfeed.RaggedStore(tokens, offsets, layout="padded", padding=-1)
    for name, rows, left in parts:
        with pinfeed.Feeder(store, batch_size=4, rows=rows, device="cpu") as feeder:
            batch, _ = next(iter(feeder))
        n_padded = int((batch < 0).sum())
        title(axes, name, f"{n_padded} of {batch.numel()} elements are padding", left)
        for y, row in enumerate(batch.tolist()):
            for x, token in enumerate(row):
                colour = PADDING if token < 0 else COLOURS[y]
                cell(axes, left + x, y, colour, "" if token < 0 else "abcd"[y])


def packed_batch(axes: Any) -> None:
    """Draw the four parts of a packed batch of two sequences."""
    tokens = np.arange(DOCUMENT_LENGTHS.sum())
    offsets = np.concatenate(([0], DOCUMENT_LENGTHS.cumsum()))
    documents = pinfeed.RaggedStore(tokens, offsets, layout="packed")
    rows = pinfeed.rows.packed(DOCUMENT_LENGTHS, LENGTH, batch_size=2)
    with pinfeed.Feeder(documents, rows=rows, device="cpu") as feeder:
        (batch,) = feeder
    title(axes, "packed", f"two sequences of {LENGTH}; a colour is a document, and grey is padding")
    letters = [["abcde"[i] if i >= 0 else "" for i in row] for row in batch.document_ids.tolist()]
    parts = {
        "values": letters,
        "document_ids": batch.document_ids.tolist(),
        "position_ids": batch.position_ids.tolist(),
    }
    for y, (name, sequences) in enumerate(parts.items()):
        label(axes, -0.3, 1.2 * y, name, align="right")
        for number, row in enumerate(sequences):
            for x, text in enumerate(row):
                document = int(batch.document_ids[number, x])
                colour = COLOURS[document] if document >= 0 else PADDING
                cell(axes, number * (LENGTH + 1) + x, 1.2 * y, colour, str(text))
    label(axes, -0.6, 4, "cu_seqlens", align="right")
    for bound in batch.cu_seqlens.tolist():
        # The end of the first sequence is the begin of the second one, in the gap between them.
        x = bound + (bound > LENGTH) + 0.5 * (bound == LENGTH)
        axes.plot([x, x], [3.05, 3.5], color="black", linewidth=1)
        label(axes, x, 4, str(bound), align="center")


def title(axes: Any, name: str, what: str, left: float = 0) -> None:
    axes.text(left, -1.7, name, fontsize=10, weight="bold", va="center")
    axes.text(left, -1.0, what, fontsize=8.5, va="center")


def cell(axes: Any, x: float, y: float, colour: str, text: str) -> None:
    axes.broken_barh([(x, 1)], (y - 0.45, 0.9), facecolors=colour, edgecolors="white")
    dark = "#555555" if colour == PADDING else "white"
    axes.text(x + 0.5, y, text, ha="center", va="center", fontsize=8, color=dark)


def label(axes: Any, x: float, y: float, text: str, align: str = "left") -> None:
    axes.text(x, y, text, fontsize=8.5, va="center", ha=align)


if __name__ == "__main__":
    main()
