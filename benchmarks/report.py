"""The results of streaming as Markdown tables and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

OURS = "pinfeed"
# Ways to use pinfeed are not compared with each other, and not with the best of the others.
_LIMITED = "pinfeed, half the memory"
COLOURS = {
    OURS: "#c8553d",
    _LIMITED: "#e3a18f",
    "loop": "#1b3a57",
    "DataLoader": "#3d6f9e",
    "torchdata.nodes": "#6d9fcc",
    "grain": "#a9c8e6",
    "SPDL": "#c9c9c9",
    "DataLoader, 2 workers": "#888888",
    "litdata": "#555555",
}

Cells = list[dict[str, Any]]


def tables(results: dict[str, Any]) -> str:
    """Return all tables in Markdown: rates, shares of time waited, memory, ceilings."""
    cells = results["cells"]
    plain = [cell for cell in cells if not cell["step"]]
    stepping = [cell for cell in cells if cell["step"]]
    parts = {
        "Rates of whole epochs, in GB/s; those of two processes are added:": rate_table(plain),
        "Where pinfeed is slower than the fastest other:": slower(plain),
        "Share of the time that a loop with a training step waits, first epoch / later epochs:": (
            waited_table(stepping)
        ),
        "Growth of memory in MiB, own / mapped pages of the file:": memory_table(plain),
        "Rates without a loader, in GB/s:": ceiling_table(results["ceilings"]),
    }
    return "\n\n".join(f"{title}\n\n{part}" for title, part in parts.items() if part)


def rate_table(cells: Cells) -> str:
    """Return the rates of pinfeed and of the fastest other in each cell."""
    heads = ["cell", "ceiling"]
    for epoch in ("first", "later"):
        heads += [f"pinfeed, {epoch}", "fastest other", "ratio"]
    heads.append("pinfeed / ceiling")
    lines = []
    for cell in cells:
        line = [cell["cell"], _text(cell["ceiling"])]
        ours = cell["contestants"].get(OURS, {})
        for epoch in ("first", "later"):
            name, rate = best_other(cell, epoch)
            shown = f"{_text(rate)} ({name})" if name else ""
            line += [_text(ours.get(epoch)), shown, _text(_ratio(ours.get(epoch), rate))]
        reached = ours.get("later") or ours.get("first")
        lines.append([*line, _text(_ratio(reached, cell["ceiling"]))])
    return _table(heads, lines)


def slower(cells: Cells) -> str:
    """List the cells in which another contestant is faster than pinfeed, with the ratios."""
    lines = []
    for cell in cells:
        ours = cell["contestants"].get(OURS, {})
        ratios = {
            epoch: _ratio(ours.get(epoch), best_other(cell, epoch)[1])
            for epoch in ("first", "later")
        }
        lost = [f"{epoch} {ratio:.2f}" for epoch, ratio in ratios.items() if ratio and ratio < 1]
        if lost:
            lines.append(f"- {cell['cell']}: {', '.join(lost)}")
    return "\n".join(lines)


def waited_table(cells: Cells) -> str:
    """Return the share of time that each loop with a step waited, and its GB/s."""
    names = names_in(cells)
    lines = []
    for cell in cells:
        shown = [_waited(cell["contestants"].get(name)) for name in names]
        lines.append([cell["cell"], _text(cell["ceiling"]), *shown])
    return _table(["cell", "ceiling, GB/s", *names], lines)


def memory_table(cells: Cells) -> str:
    """Return the growth of memory by kind: of its own / mapped pages of files, in MiB."""
    names = names_in(cells)
    lines = []
    for cell in cells:
        shown = [_memory(cell["contestants"].get(name)) for name in names]
        lines.append([cell["cell"], *shown])
    return _table(["cell", *names], lines)


def ceiling_table(ceilings: dict[str, list[dict[str, Any]]]) -> str:
    """Return the medians of the ceilings of each kind of rows, in GB/s."""
    keys = dict.fromkeys(key for repeats in ceilings.values() for key in repeats[0])
    shown = [key for key in keys if not key.startswith("all ") and key != "step_s"]
    lines = []
    for kind, repeats in ceilings.items():
        rates = [_text(_median_of(repeats, key)) for key in shown]
        step_s = _median_of(repeats, "step_s") or 0.0
        lines.append([kind, *rates, f"{step_s * 1e3:.1f}"])
    return _table(["rows", *shown, "step, ms"], lines)


def _median_of(repeats: list[dict[str, Any]], key: str) -> float | None:
    return statistics.median(rates[key] for rates in repeats) if key in repeats[0] else None


def best_other(cell: dict[str, Any], epoch: str) -> tuple[str, float | None]:
    """Return the name and rate of the fastest contestant that is not pinfeed."""
    rates = {
        name: found[epoch]
        for name, found in cell["contestants"].items()
        if not name.startswith(OURS) and found[epoch] is not None
    }
    name = max(rates, key=rates.__getitem__, default="")
    return name, rates.get(name)


def names_in(cells: Cells) -> list[str]:
    """Return the names of the contestants of these cells, in the order of the colours."""
    found = {name for cell in cells for name in cell["contestants"]}
    return [name for name in COLOURS if name in found]


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if len(rows) > 2 else ""


def _waited(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    shares = [found[key] for key in ("waited_first", "waited_later") if found[key] is not None]
    return " / ".join(f"{share:.0%}" for share in shares)


def _memory(found: dict[str, Any] | None) -> str:
    if found is None or "anonymous_mib" not in found:
        return ""
    return f"{found['anonymous_mib']:.0f} / {found['file_mib']:.0f}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def save_picture(results: dict[str, Any], path: Path, environment: str) -> None:
    """Draw the results into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, results)
    figure.supxlabel(textwrap.fill(environment, 80), fontsize=8)
    figure.savefig(path, dpi=110)


def draw(figure: Any, results: dict[str, Any]) -> None:
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
    import matplotlib as mpl

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
