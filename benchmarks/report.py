"""The results of streaming as a table and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

_COLUMNS = (
    ("cell", 34),
    ("ceiling", 8),
    ("pinfeed", 8),
    ("to ceiling", 11),
    ("first", 6),
    ("  best other", 36),
    ("GB/s", 6),
    ("pinfeed x", 10),
    ("first x", 8),
    ("x DataLoader", 13),
    ("memory +MiB", 12),
    ("plan", 6),
    ("other +MiB", 11),
)


def table(records: list[dict[str, Any]], ceilings: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of the cells, and below it the ceilings, as fixed-width text."""
    lines = [_line([title for title, _ in _COLUMNS]), *(_line(_row(record)) for record in records)]
    lines += [
        (
            "GB/s; of a warm file that of the later epochs, and that of the first. "
            "x: how many times as fast as the best other pinfeed is."
        ),
        "first x: the same of first epochs, against the best of those.",
        (
            "memory: growth of the peak of resident memory in the process of the loop, "
            "workers not counted; plan: what feeder.plan announces."
        ),
        "",
        "Ceilings, GB/s:",
    ]
    for kind, repeats in ceilings.items():
        medians = {
            name: statistics.median(rates[name] for rates in repeats)
            for name in repeats[0]
            if not name.startswith("all ")
        }
        step_ms = medians.pop("step_s") * 1e3
        lines.append(
            f"{kind:6} "
            + ", ".join(f"{name} {value:.2f}" for name, value in medians.items())
            + f"; step {step_ms:.1f} ms"
        )
    return "\n".join(lines)


def _line(texts: list[str]) -> str:
    return "".join(
        f"{text:{'<' if width > 30 else '>'}{width}}"
        for text, (_, width) in zip(texts, _COLUMNS, strict=True)
    )


def _row(record: dict[str, Any]) -> list[str]:
    rates = record["rates"]
    first = record["first"]
    grown = record["growth_mib"]
    best = record["best"]
    ours = rates.get("pinfeed")
    dataloader = record["dataloader"]
    other_firsts = [value for name, value in first.items() if name != "pinfeed"]
    best_first = max(other_firsts, default=None)
    return [
        record["cell"],
        _text(record["ceiling"]),
        _text(ours),
        _text(_ratio(ours, record["ceiling"])),
        _text(first.get("pinfeed")),
        f"  {best or '-'}",
        _text(rates.get(best)),
        _text(_ratio(ours, rates.get(best))),
        _text(_ratio(first.get("pinfeed"), best_first)),
        _text(_ratio(ours, dataloader)),
        _text(grown.get("pinfeed"), 0),
        _text(record["plan_mib"], 0),
        _text(grown.get(best), 0),
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def picture(records: list[dict[str, Any]], path: Path, environment: str) -> None:
    """Draw the share of the ceiling that each contestant reaches, as bars.

    Each kind of rows and state of the page cache has a panel.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        kind, state, _ = record["cell"].split(", ")
        panels.setdefault((kind, state), []).append(record)
    kinds, states = (list(dict.fromkeys(key[i] for key in panels)) for i in range(2))
    names = list(dict.fromkeys(name for record in records for name in record["rates"]))
    names.sort(key=lambda name: name != "pinfeed")
    figure, axes = plt.subplots(
        len(kinds),
        len(states),
        figsize=(8 * len(states), 3.4 * len(kinds) + 1),
        squeeze=False,
        layout="constrained",
    )
    for (i, kind), (j, state) in ((a, b) for a in enumerate(kinds) for b in enumerate(states)):
        _panel(axes[i][j], f"{kind} rows, {state} file", panels.get((kind, state), []), names)
    figure.suptitle(
        f"Streaming a .npy: share of what the machine can do without a loader\n{environment}",
        fontsize=10,
    )
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, title: str, records: list[dict[str, Any]], names: list[str]) -> None:
    from matplotlib import colormaps

    width = 0.85 / len(names)
    for k, name in enumerate(names):
        shares = [record["rates"].get(name, 0) / record["ceiling"] for record in records]
        color = (
            "#d1495b"
            if name == "pinfeed"
            else colormaps["Blues"](0.95 - 0.75 * (k - 1) / max(1, len(names) - 1))
        )
        bars = axes.bar(
            [i + k * width for i in range(len(records))], shares, width, label=name, color=color
        )
        if name == "pinfeed":
            labels = [f"{record['rates'].get(name, 0):.1f}" for record in records]
            axes.bar_label(bars, labels, fontsize=8, color=color)
    groups = [
        f"{record['cell'].split(', ')[2]}\nceiling {record['ceiling']:.1f} GB/s"
        for record in records
    ]
    axes.set_xticks([i + 0.425 - width / 2 for i in range(len(records))], groups, fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("share of the ceiling")
    axes.spines[["top", "right"]].set_visible(False)
