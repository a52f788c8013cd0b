"""What was measured on a GPU, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def picture(results: dict[str, Any], path: Path, environment: str) -> None:
    """Three panels: rows to the device and back by their size, beside the ceilings; and how well the transfer hides behind a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(19, 6), layout="constrained")
    limits = results["ceilings, GB/s"]
    for panel, way, kernel, engine in (
        (axes[0], "gather", "kernel, read", "copy engine, to the device"),
        (axes[1], "scatter", "kernel, write", "copy engine, to the host"),
    ):
        largest = {}  # of each size, the batch of the most rows
        for cell in sorted(results["rows"], key=lambda cell: int(cell["count"])):
            largest[cell["table_gb"], cell["order"], cell["row_nbytes"]] = cell[f"{way}_gb_per_s"]
        lines = sorted({(table_gb, order) for table_gb, order, _ in largest})
        for table_gb, order in lines:
            line = sorted((nbytes, rate) for (gb, how, nbytes), rate in largest.items() if (gb, how) == (table_gb, order))
            panel.plot(*zip(*line, strict=True), "-" if order == "sorted" else ":", marker=".", label=f"table of {table_gb:g} GB, {order}")
        for name in (kernel, engine):
            panel.axhline(limits[name], color="black", linewidth=0.8)
            panel.annotate(f"{name}, in sequence", (0.01, limits[name]), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("bytes of a row")
        panel.set_ylabel("GB/s")
        panel.set_ylim(bottom=0)
        panel.set_title(f"{way}: rows of page-locked tables, by kernels, in large batches", loc="left", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    for write, color in ((False, "#2b6ca3"), (True, "#d1495b")):
        cells = [cell for cell in results["overlap"] if cell["write"] == write]
        points = [(cell["compute/transfer"], cell["both/max"]) for cell in cells]
        axes[2].plot(*zip(*points, strict=True), marker="o", color=color, label="rows come and go" if write else "rows come")
    axes[2].axhline(1, color="black", linewidth=0.8)
    axes[2].set_xscale("log", base=2)
    axes[2].set_xlabel("time of the step, in transfers")
    axes[2].set_title("time of both at once, to the longer of the two", loc="left", fontsize=10)
    axes[2].legend(frameon=False, fontsize=8)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(environment, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
