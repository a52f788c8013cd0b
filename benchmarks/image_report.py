"""The results of images as a Markdown table and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.image_loaders import WHOLE

OURS = "pinfeed"
COLOURS = {
    "pinfeed, wrap_dataset": "#c8553d",
    "pinfeed, wrap_loader": "#e3a18f",
    "DataLoader": "#1b3a57",
    "DataLoader, 2 workers": "#3d6f9e",
    "SPDL": "#6d9fcc",
    "grain": "#a9c8e6",
    "torchdata.nodes": "#888888",
}

Results = dict[str, Any]
Figures = dict[str, float]

FACTORS = {"per_s": 1.0, "seconds": 1.0, "nbytes": 1 / (1 << 20), "us": 1.0}
"""The main figures of runs, and the factors of the units in the names of their cells."""


def summary(runs: dict[str, dict[str, list[Figures]]], steps_s: list[float]) -> Results:
    """Return the medians of the runs of each cell, for the better variant of each library.

    Args:
        runs: Runs by the names of the cell and of the contestant.
        steps_s: Seconds of the training step alone, in each round.
    """
    cells = []
    for cell, by_name in runs.items():
        contestants = {}
        for library, names in variants(by_name).items():
            # The worse variant takes part in the first round only.
            n_most = max(len(by_name[name]) for name in names)
            names = [name for name in names if len(by_name[name]) == n_most]
            best = max(names, key=lambda name: merit(cell, by_name[name]))
            contestants[library] = medians(by_name[best]) | {"whole": best.endswith(WHOLE)}
        cells.append({"cell": cell, "contestants": contestants})
    return {"cells": cells, "step_s": statistics.median(steps_s), "runs": runs}


def variants(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the variants of each library."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.removesuffix(WHOLE), []).append(name)
    return found


def merit(cell: str, runs: list[Figures]) -> float:
    """Return a number that is larger for the better contestant of a cell."""
    value = medians(runs)["value"]
    return value if is_rate(cell) else -value


def medians(runs: list[Figures]) -> Figures:
    """Return the median, the least and the largest value of runs, and the median time waited."""
    key = next(key for key in FACTORS if key in runs[0])
    values = [run[key] * FACTORS[key] for run in runs]
    found = {"value": statistics.median(values), "least": min(values), "most": max(values)}
    if "waited" in runs[0]:
        found["waited"] = statistics.median(run["waited"] for run in runs)
    return found


def is_rate(cell: str) -> bool:
    """Return whether a larger figure is better."""
    return cell.startswith("images per s")


def best_peer(cell: Results) -> tuple[str, float | None]:
    """Return the name and the figure of the best contestant that is not pinfeed."""
    peers = {
        name: figures["value"]
        for name, figures in cell["contestants"].items()
        if not name.startswith(OURS)
    }
    best = max if is_rate(cell["cell"]) else min
    name = best(peers, key=peers.__getitem__, default="")
    return name, peers.get(name)


def table(results: Results) -> str:
    """Return the figures of all contestants, and the ratio of pinfeed to the best peer."""
    names = list(dict.fromkeys(name for cell in results["cells"] for name in cell["contestants"]))
    lines = []
    for cell in results["cells"]:
        found = cell["contestants"]
        shown = [_text(found.get(name)) for name in names]
        peer, figure = best_peer(cell)
        ratios = [
            f"{found[name]['value'] / figure:.2f}"
            for name in names
            if name.startswith(OURS) and name in found and figure
        ]
        compared = f"{' and '.join(ratios)} ({peer})" if ratios else ""
        lines.append([cell["cell"], *shown, compared])
    heads = ["", *names, "ratio to the best peer"]
    figures = tabulate(lines, heads, tablefmt="github", disable_numparse=True)
    note = (
        f"\\* Threads make whole batches, which was faster than samples. The training step alone "
        f"takes {results['step_s'] * 1e3:.0f} ms."
    )
    title = "Share of the time that a loop with a training step waits:"
    return "\n\n".join([figures, note, title, waits(results)])


def waits(results: Results) -> str:
    """Return the shares of time that loops with a training step wait for batches."""
    stepping = [cell for cell in results["cells"] if "step" in cell["cell"]]
    names = list(dict.fromkeys(name for cell in stepping for name in cell["contestants"]))
    lines = []
    for cell in stepping:
        found = cell["contestants"]
        shares = [f"{found[name]['waited']:.0%}" if name in found else "" for name in names]
        lines.append([cell["cell"].removeprefix("images per s, "), *shares])
    return tabulate(lines, ["", *names], tablefmt="github", disable_numparse=True)


def _text(figures: Figures | None) -> str:
    if figures is None:
        return ""
    value = figures["value"]
    return (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + " \\*" * bool(figures["whole"])


def save_picture(results: Results, path: Path, environment: str) -> None:
    """Draw the results into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, results)
    figure.supxlabel(textwrap.fill(environment, 80), fontsize=8)
    figure.savefig(path, dpi=110)


def draw(figure: Any, results: Results) -> None:
    """Draw the images per second of each cell, with the range of the rounds."""
    cells = [cell for cell in results["cells"] if is_rate(cell["cell"])]
    figure.set_size_inches(5.2, 2.2 * len(cells))
    for axis, cell in zip(figure.subplots(len(cells), 1, squeeze=False)[:, 0], cells, strict=True):
        names = [name for name in COLOURS if name in cell["contestants"]][::-1]
        for place, name in enumerate(names):
            figures = cell["contestants"][name]
            axis.barh(place, figures["value"], color=COLOURS[name])
            axis.hlines(place, figures["least"], figures["most"], color="black", linewidth=1)
        axis.set_yticks(range(len(names)), names, fontsize=9)
        axis.tick_params(axis="x", labelsize=9)
        axis.set_title(cell["cell"], fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
