"""Pictures of the measurements of one call."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import new_file

Cells = list[dict[str, Any]]
_COLORS = {"chosen": "#3a7d44", "direct": "#2b6ca3", "staged": "#d1495b"}
_CEILINGS = {"kernel": "--", "copy_engine": "-"}
_MODELS = {"ResNet-18 as the step": "*", "train_rows with a network": "P"}
_GOAL = 1.03
# These cells are no points of a picture.
_LIMITS = ("ceilings", "link")


def draw(results: Sequence[Path], out: Path, prefix: str) -> list[Path]:
    """Draw every picture that the results have data for, and report failures."""
    records = [json.loads(path.read_text()) for path in results]
    cells = {record["part"]: record["cells"] for record in records}
    # One picture shows both, and another one compares all ways to move long rows.
    cells["overlap"] = cells.get("overlap", []) + cells.get("slowdown", [])
    cells["movers"] = cells.get("movers", []) + cells.get("batch-copies", [])
    environment = next((record["environment"] for record in records if "environment" in record), "")
    pictures: dict[str, tuple[str, Callable[[Cells, Any], object]]] = {
        "rows": ("rows", draw_rows),
        "overlap": ("overlap", draw_overlap),
        "movers": ("movers", draw_movers),
        "tables": ("tables", draw_tables),
        "cache": ("cache", draw_tables),
    }
    written = []
    for part, (name, draw_it) in pictures.items():
        try:
            if path := _draw(cells.get(part, []), draw_it, out, f"{prefix}-{name}", environment):
                written.append(path)
        except Exception:
            print(f"the picture of {name} was not drawn:", flush=True)
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
    """Draw the throughput of the largest batches by row size, with the ceilings."""
    limits = {cell["table_gb"]: cell for cell in cells if cell["what"] == "ceilings"}
    rows = [cell for cell in cells if cell["what"] == "rows"]
    lines = sorted({(cell["table_gb"], cell["order"]) for cell in rows})
    colors = {table_gb: f"C{i}" for i, table_gb in enumerate(sorted({line[0] for line in lines}))}
    for axes, way in zip(figure.subplots(1, 2), ("gather", "scatter"), strict=True):
        for table_gb, order in lines:
            of_line = [
                cell for cell in rows if (cell["table_gb"], cell["order"]) == (table_gb, order)
            ]
            points = _largest(of_line, f"{way}_gb_per_s")
            style = "-" if order == "sorted" else ":"
            label = f"{table_gb:g} GB, {order}"
            axes.plot(
                *zip(*points, strict=True), style, color=colors[table_gb], marker=".", label=label
            )
        for table_gb, of_table in limits.items():
            for name, style in _CEILINGS.items():
                ceiling = of_table[f"{way}_{name}"]
                color = colors.get(table_gb, "black")
                axes.axhline(ceiling, color=color, linestyle=style, linewidth=0.6)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a row")
        axes.set_ylabel("GB/s")
        # Horizontal lines do not extend the axis, so the ceilings are included here.
        most = [
            *(of_table[f"{way}_{name}"] for of_table in limits.values() for name in _CEILINGS),
            axes.get_ylim()[1],
        ]
        axes.set_ylim(0, 1.06 * max(most))
        title = f"{way}: rows in large batches; lines: blocks by copy engine, by a kernel (dashed)"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)


def _largest(cells: Cells, field: str) -> list[tuple[int, float]]:
    """Return row sizes with the throughput of the largest batch."""
    found: dict[int, float] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["count"])):
        found[cell["row_nbytes"]] = cell[field]
    return sorted(found.items())


def draw_overlap(cells: Cells, figure: Any) -> None:
    """Draw the share of transfers that is hidden, and the slowdown of matrix products."""
    left, middle, right = figure.subplots(1, 3)
    _draw_row_sizes(cells, left)
    _draw_hidden(cells, middle)
    _draw_slowdown(cells, right)


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


def _draw_slowdown(cells: Cells, axes: Any) -> None:
    """Draw the time of matrix products during a transfer, relative to their time alone."""
    slowdowns = [cell for cell in cells if cell["what"] == "products during a transfer"]
    for number, n_threads in enumerate((512, 32)):
        kernels = sorted(
            (cell["n_blocks"], cell["during_to_alone"])
            for cell in slowdowns
            if cell.get("n_threads") == n_threads
        )
        if kernels:
            axes.plot(
                *zip(*kernels, strict=True),
                "-" if number == 0 else "--",
                marker="o",
                color=_COLORS["direct"],
                label=f"rows by blocks of {n_threads} threads",
            )
    for cell in slowdowns:
        if cell["by"] == "copy engine":
            axes.axhline(
                cell["during_to_alone"], color=_COLORS["staged"], label="a block by the copy engine"
            )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("blocks of the kernel")
    axes.set_title("large products during a transfer / alone", loc="left", fontsize=10)
    if slowdowns:
        axes.legend(frameon=False, fontsize=8)


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
