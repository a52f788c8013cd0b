"""Draw the pictures of the benchmarks, from benchmarks/results/*.json.

Run it from the root of the repository: ``python -m docs.pictures.measured``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks import report

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
MACHINE = "cpu-2-cores"
WAYS = {
    "step alone": "#333333",
    "prefetch": "#c8553d",
    "synchronous": "#1b3a57",
    "FBGEMM": "#7a9a4e",
    "gather+copy": "#6d9fcc",
    "whole table": "#a9c8e6",
}


def main() -> None:
    # A fixed salt gives the same file for the same picture.
    mpl.rcParams["svg.hashsalt"] = "pinfeed"
    for draw in (streaming, rows, memory):
        figure = Figure(layout="constrained")
        FigureCanvasSVG(figure)
        draw(
            figure,
            json.loads((RESULTS / f"{RESULT_OF[draw]}-{MACHINE}.json").read_text())["results"],
        )
        figure.savefig(HERE / f"measured-{draw.__name__}.svg", metadata={"Date": None})


def streaming(figure: Figure, results: dict[str, Any]) -> None:
    """Draw the GB/s, the time waited and the memory of each loader."""
    report.draw(figure, results)


def rows(figure: Figure, results: dict[str, Any]) -> None:
    """Draw the time of a step that trains table rows, relative to the synchronous loop."""
    cells = results["cells"]
    largest = max(
        time / cell[key]["synchronous"]
        for cell in cells
        for key in ("small_ms", "large_ms")
        for time in cell[key].values()
    )
    figure.set_size_inches(5.2, 13)
    panels = figure.subplots(2, 1)
    for axis, (key, title) in zip(
        panels,
        {"small_ms": "a small step", "large_ms": "a step about as long as the transfer"}.items(),
        strict=True,
    ):
        for name, colour in WAYS.items():
            # FBGEMM has one of the two optimizers.
            found = [(i, cell[key]) for i, cell in enumerate(cells) if name in cell[key]]
            ratios = [times[name] / times["synchronous"] for _, times in found]
            style = (
                {"marker": "|", "s": 140, "linewidth": 2}
                if name == "step alone"
                else {"marker": "o", "s": 42}
            )
            places = [i for i, _ in found]
            axis.scatter(ratios, places, color=colour, label=name, zorder=3, **style)
        axis.axvline(1, color=WAYS["synchronous"], linewidth=0.8)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step time / synchronous loop", fontsize=9)
        axis.set_xlim(0, largest + 0.1)
        axis.set_yticks(range(len(cells)), [_short(cell["cell"]) for cell in cells], fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )


def _short(cell: str) -> str:
    """Return a shorter name of a cell, such as "512 B, 8192 ids, 50% repeated"."""
    return (
        cell.removeprefix("rows of ")
        .replace("4096 B", "4 KiB")
        .replace(", 0% repeated", "")
        .replace(" of the rows in the batch before", " shared")
    )


def memory(figure: Figure, results: dict[str, Any]) -> None:
    """Draw the ratios of predicted to measured peaks of training steps."""
    figure.set_size_inches(5.2, 6)
    peaks = results["peaks"]
    axis = figure.subplots()
    for i, peak in enumerate(peaks):
        colour = "#c8553d" if peak["confidence"] == "low" else "#1b3a57"
        axis.barh(i, peak["ratio"], color=colour, height=0.7)
        axis.text(
            1.02,
            i,
            f"{peak['ratio']:.3f}   ({peak['measured_mib']:.0f} MiB)",
            va="center",
            fontsize=9,
        )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(
        range(len(peaks)), [f"{peak['model']}, batch {peak['batch']}" for peak in peaks], fontsize=9
    )
    axis.invert_yaxis()
    axis.set_xlim(0, 1.7)
    axis.set_xticks([0, 0.5, 1])
    axis.set_xlabel(
        "predicted / measured peak\n(measured peak in MiB); red: low confidence",
        fontsize=9,
    )
    axis.spines[["top", "right"]].set_visible(False)


RESULT_OF = {streaming: "streaming", rows: "rows", memory: "budget"}

if __name__ == "__main__":
    main()
