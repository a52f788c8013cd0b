"""Draw the pictures of the benchmarks, from benchmarks/results/*.json.

Run it from the root of the repository: ``python -m docs.pictures.measured``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
MACHINE = "cpu-2-cores"
COLOURS = {
    "pinfeed": "#c8553d",
    "pinfeed, half the memory": "#e3a18f",
    "loop": "#1b3a57",
    "DataLoader": "#3d6f9e",
    "torchdata.nodes": "#6d9fcc",
    "grain": "#a9c8e6",
    "SPDL": "#c9c9c9",
    "DataLoader, 2 workers": "#888888",
}
Cells = list[dict[str, Any]]
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
    """Draw first and later epochs, cold files, time waited, and memory.

    The panels are in one column, so that a phone shows the text large enough.
    """
    cells = results["cells"]
    plain = [cell for cell in cells if not cell["step"]]
    warm = [cell for cell in plain if cell["state"] == "warm"]
    cold = [cell for cell in plain if cell["state"] == "cold"]
    stepping = [cell for cell in cells if cell["step"]]
    figure.set_size_inches(5.2, 15)
    first, later, cold_axis, waited_first, waited_later, memory = figure.subplots(6, 1)
    _bars(first, warm, lambda found: found["first"], "warm file, first epoch, GB/s")
    _bars(later, warm, lambda found: found["later"], "warm file, later epochs, GB/s")
    later.sharey(first)
    _bars(cold_axis, cold, lambda found: found["first"], "cold file, GB/s")
    for axis, epoch in ((waited_first, "first"), (waited_later, "later")):
        key = f"waited_{epoch}"
        found = [cell for cell in stepping if epoch == "first" or cell["state"] == "warm"]
        epochs = {"first": "first epoch", "later": "later epochs"}[epoch]
        title = f"share of time that a loop with a step waits, {epochs}"
        _bars(axis, found, lambda found, key=key: found[key], title, ceiling=False)
    waited_later.sharey(waited_first)
    _memory_bars(memory, [cell for cell in warm if cell["kind"] == "4 KiB"])
    names = names_in(cells)
    handles = [mpl.patches.Patch(color=COLOURS[name], label=name) for name in names]
    handles.append(mpl.lines.Line2D([], [], color="black", label="ceiling"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9, frameon=False)


def _bars(
    axis: Any,
    cells: Cells,
    value: Callable[[dict[str, Any]], float | None],
    title: str,
    *,
    ceiling: bool = True,
) -> None:
    """Draw a group of bars for each cell, and a line at its ceiling."""
    for place, cell in enumerate(cells):
        for x, width, name in _places(place, cell):
            axis.bar(x, value(cell["contestants"][name]) or 0, width, color=COLOURS[name])
        if ceiling:
            axis.hlines(cell["ceiling"], place - 0.45, place + 0.45, color="black", linewidth=1.5)
    _finish(axis, cells, title)


def _memory_bars(axis: Any, cells: Cells) -> None:
    """Draw the growth of memory as stacked bars: its own below, mapped pages of files above."""
    for place, cell in enumerate(cells):
        for x, width, name in _places(place, cell):
            found = cell["contestants"][name]
            bottom = 0.0
            for key, alpha in (("anonymous_mib", 1.0), ("shared_mib", 0.7), ("file_mib", 0.35)):
                height = max(0.0, found.get(key, 0.0))
                axis.bar(x, height, width, bottom, color=COLOURS[name], alpha=alpha)
                bottom += height
    _finish(axis, cells, "growth of memory, MiB: own (dark), mapped file (pale)")


def _places(place: int, cell: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Return the position, the width and the name of each bar of a cell."""
    names = names_in([cell])
    width = 0.85 / max(1, len(names))
    return [(place - 0.425 + (i + 0.5) * width, width, name) for i, name in enumerate(names)]


def _finish(axis: Any, cells: Cells, title: str) -> None:
    labels = []
    for cell in cells:
        processes = "\n2 proc." if cell["processes"] > 1 else ""
        state = f"\n{cell['state']}" if cell["step"] else ""
        order = cell["order"].replace("block-shuffled", "blocks").replace("sequential", "seq.")
        labels.append(f"{cell['kind']}\n{order}{state}{processes}")
    axis.set_xticks(range(len(cells)), labels, fontsize=9)
    axis.tick_params(axis="y", labelsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def names_in(cells: Cells) -> list[str]:
    """Return the names of the contestants of these cells, in the order of the colours."""
    found = {name for cell in cells for name in cell["contestants"]}
    return [name for name in COLOURS if name in found]


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
        axis.barh(i, peak["ratio"], color="#1b3a57", height=0.7)
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
        "predicted / measured peak\n(measured peak in MiB)",
        fontsize=9,
    )
    axis.spines[["top", "right"]].set_visible(False)


RESULT_OF = {streaming: "streaming", rows: "rows", memory: "budget"}

if __name__ == "__main__":
    main()
