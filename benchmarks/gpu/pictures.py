"""Pictures of the measurements of one call."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import new_file
from benchmarks.gpu.results import load

Cells = list[dict[str, Any]]
_COLORS = {"chosen": "#3a7d44", "direct": "#2b6ca3", "staged": "#d1495b"}
_MODELS = {"ResNet-18 as the step": "*", "train_rows with a network": "P"}
_GOAL = 1.03
# These cells are no points of a picture.
_LIMITS = ("ceilings", "link")


def draw(results: Sequence[Path], out: Path, prefix: str) -> list[Path]:
    """Draw every picture that the results have data for, and report failures.

    Results that do not say what they were measured with are not drawn.
    """
    records = []
    for path in results:
        try:
            records.append(load(path))
        except ValueError as error:
            print(f"not drawn: {error}", flush=True)
    cells = {record["part"]: record["cells"] for record in records}
    # One picture compares all ways to move long rows.
    cells["movers"] = cells.get("movers", []) + cells.get("batch-copies", [])
    environment = next((record["environment"] for record in records if "environment" in record), "")
    pictures: dict[str, Callable[[Cells, Any], object]] = {
        "row-kernel": draw_rows,
        "slowdown": draw_slowdown,
        "overlap": draw_overlap,
        "movers": draw_movers,
        "decisive-tables": draw_tables,
        "tables": draw_tables,
        "cache": draw_tables,
    }
    written = []
    for part, draw_it in pictures.items():
        try:
            if path := _draw(cells.get(part, []), draw_it, out, f"{prefix}-{part}", environment):
                written.append(path)
        except Exception:
            print(f"the picture of {part} was not drawn:", flush=True)
            traceback.print_exc()
    return written


def _draw(
    cells: Cells, draw_it: Callable[[Cells, Any], object], out: Path, stem: str, environment: str
) -> Path | None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [cell for cell in cells if "error" not in cell and "skipped" not in cell]
    if all(cell.get("what") in _LIMITS for cell in measured):
        return None
    figure = plt.figure(figsize=(15, 6), layout="constrained")
    try:
        draw_it(measured, figure)
        figure.suptitle(environment, fontsize=8)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        path = new_file(out, stem, ".png")
        figure.savefig(path, dpi=100)
    finally:
        plt.close(figure)
    return path


def draw_rows(cells: Cells, figure: Any) -> None:
    """Draw the throughput of gathers by row size, for each table and order."""
    tables = sorted({cell["table_mib"] for cell in cells})
    for axes, table_mib in zip(figure.subplots(1, len(tables), sharey=True), tables, strict=True):
        of_table = [cell for cell in cells if cell["table_mib"] == table_mib]
        for order in dict.fromkeys(cell["order"] for cell in of_table):
            points = sorted(
                (cell["row_nbytes"], max(cell["gb_per_s"].values()))
                for cell in of_table
                if cell["order"] == order
            )
            axes.plot(*zip(*points, strict=True), marker=".", label=order)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a row")
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.set_title(f"table of {table_mib:,} MiB", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)


def draw_overlap(cells: Cells, figure: Any) -> None:
    """Draw the share of transfers that is hidden."""
    left, right = figure.subplots(1, 2)
    _draw_row_sizes(cells, left)
    _draw_hidden(cells, right)


def _draw_row_sizes(cells: Cells, axes: Any) -> None:
    """Draw the time of a loop by row size, relative to the longer of its step and its transfer."""
    loops = [
        cell
        for cell in cells
        if cell["what"] == "products as the step"
        and (cell["factor"], cell["route"]) == (1, "chosen")
    ]
    for number, (size, write) in enumerate(sorted({(c["size"], c["write"]) for c in loops})):
        points = sorted(
            (cell["row_nbytes"], cell["both_to_longer"])
            for cell in loops
            if (cell["size"], cell["write"]) == (size, write)
        )
        label = f"products of {size}, {'read and write' if write else 'read'}"
        style = "--" if write else "-"
        axes.plot(*zip(*points, strict=True), style, color=f"C{number}", marker="o", label=label)
    axes.axhline(_GOAL, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a row")
    axes.set_title(f"both together / the longer one; goal {_GOAL}", loc="left", fontsize=10)
    if loops:
        axes.legend(frameon=False, fontsize=8)


def _draw_hidden(cells: Cells, axes: Any) -> None:
    """Draw the time of a loop, relative to the longer one of its step and its transfer."""
    loops = [
        cell
        for cell in cells
        if cell["what"] == "products as the step" and cell["row_nbytes"] == 4096
    ]
    for route, write in sorted({(cell["route"], cell["write"]) for cell in loops}):
        points = sorted(
            (cell["compute_to_transfer"], cell["both_to_longer"])
            for cell in loops
            if (cell["route"], cell["write"]) == (route, write)
        )
        label = f"{route}, {'read and write' if write else 'read'}"
        style = "--" if write else "-"
        axes.plot(*zip(*points, strict=True), style, color=_COLORS[route], marker="o", label=label)
    for cell in cells:
        if marker := _MODELS.get(cell["what"]):
            point = cell["compute_to_transfer"], cell["both_to_longer"]
            name = cell["what"].removesuffix(" as the step")
            if "n_ids" in cell:
                name += f", {cell['n_ids']} ids, {cell['shared']:.0%} shared"
            label = f"{cell['route']}, {name}"
            axes.plot(*point, marker, color=_COLORS[cell["route"]], markersize=10, label=label)
    axes.axhline(_GOAL, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("step time / transfer time")
    axes.set_title("both together / the longer one, by the step", loc="left", fontsize=10)
    if axes.lines[1:]:
        axes.legend(frameon=False, fontsize=8)


def draw_slowdown(cells: Cells, figure: Any) -> None:
    """Draw the time of steps and of transfers together, relative to alone, by mover."""
    names = list(dict.fromkeys((cell["step"], cell["row_nbytes"]) for cell in cells))
    movers = list(dict.fromkeys(cell["by"] for cell in cells))
    titles = {
        "step_during_to_alone": "the step during transfers / alone",
        "move_during_to_alone": "a transfer during steps / alone",
    }
    for axes, (field, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for number, name in enumerate(names):
            of_name = [
                cell
                for cell in cells
                if (cell["step"], cell["row_nbytes"]) == name and field in cell
            ]
            places = [movers.index(cell["by"]) + 0.1 * number for cell in of_name]
            label = f"{name[0]}, rows of {name[1]:,} B"
            axes.plot(places, [cell[field] for cell in of_name], "o", label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(movers)), movers, rotation=20, fontsize=7)
        axes.set_title(title, loc="left", fontsize=10)
    figure.axes[0].legend(frameon=False, fontsize=8)


def draw_tables(cells: Cells, figure: Any) -> None:
    """Draw milliseconds of a step of every contestant on every table, with both models."""
    steps = [cell for cell in cells if cell["what"] == "step"]
    names = list(dict.fromkeys(cell["contestant"] for cell in steps))
    tables = list(dict.fromkeys(cell["table"] for cell in steps))
    width = 0.8 / len(names)
    # A call that ran out of time may have measured one model only.
    models = list(dict.fromkeys(cell["model"] for cell in steps))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for number, name in enumerate(names):
            of_name = [
                cell for cell in steps if (cell["contestant"], cell["model"]) == (name, model)
            ]
            places = [tables.index(cell["table"]) + (number + 0.5) * width for cell in of_name]
            values = [cell["step_ms"] for cell in of_name]
            bars = axes.bar(places, values, width, label=name, color=f"C{number}")
            axes.bar_label(bars, fmt="%.2f", fontsize=6, rotation=90, padding=2)
        labels = [table.replace(", ", "\n") for table in tables]
        axes.set_xticks([place + 0.4 for place in range(len(tables))], labels, fontsize=7)
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_ylabel("ms of a step")
        title = f"rows of a table in host memory, trained with Adam; {model} model"
        axes.set_title(title, loc="left", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8, frameon=False)


def draw_movers(cells: Cells, figure: Any) -> None:
    """Draw the throughput of every way to move long rows, and its time with products."""
    ways = list(dict.fromkeys((cell["by"], cell["n_blocks"]) for cell in cells))
    sizes = sorted({cell["row_nbytes"] for cell in cells})
    width = 0.8 / len(ways)
    titles = {
        "gather_gb_per_s": "GB/s to the device",
        "joint_to_longer": f"rows and products together / the longer one; goal {_GOAL}",
    }
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for number, (by, n_blocks) in enumerate(ways):
            of_way = [cell for cell in cells if (cell["by"], cell["n_blocks"]) == (by, n_blocks)]
            places = [sizes.index(cell["row_nbytes"]) + (number + 0.5) * width for cell in of_way]
            label = by if n_blocks is None else f"{by}, {n_blocks} blocks"
            bars = axes.bar(places, [cell[name] for cell in of_way], width, label=label)
            axes.bar_label(bars, fmt="%.2f", fontsize=6, rotation=90, padding=2)
        labels = [f"{size:,} B" for size in sizes]
        axes.set_xticks([place + 0.4 for place in range(len(sizes))], labels, fontsize=8)
        axes.margins(y=0.15)
        axes.set_title(title, loc="left", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8, frameon=False)
