"""Draw the figures of the benchmark pages, and write their tables, from benchmarks/results/.

Every figure and table shows how many times as fast pinfeed is as another way: the time of the other
way divided by that of pinfeed, or pinfeed's rate divided by the other one. Below 1, pinfeed is
slower. Run it from the root of the repository: ``python -m docs.pictures.measured``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from tabulate import tabulate

from benchmarks.streaming import compared

HERE = Path(__file__).parent
PAGES = HERE.parent / "benchmarks"
RESULTS = HERE.parent.parent / "benchmarks" / "results"
COLOURS = ("#1b3a57", "#c8553d", "#6d9fcc", "#7a9a4e", "#b58900", "#8e6bb5", "#888888")
MARKERS = "osD^vP*"


@dataclass
class Topic:
    """The figures of one page.

    Attributes:
        heads: Headings of the first column and of the column of pinfeed's own figures.
        rows: For each line its name, pinfeed's own figure, and how many times as fast pinfeed is
            as each other way.
    """

    heads: tuple[str, str]
    rows: list[tuple[str, str, dict[str, float | None]]] = field(default_factory=list)

    @property
    def ways(self) -> list[str]:
        return list(dict.fromkeys(way for _, _, ratios in self.rows for way in ratios))

    def table(self) -> str:
        """Return the table in Markdown."""
        lines = [
            [name, own, *(shown(ratios.get(way)) for way in self.ways)]
            for name, own, ratios in self.rows
        ]
        return tabulate(lines, [*self.heads, *self.ways], "github", disable_numparse=True)

    def draw(self, figure: Figure) -> None:
        """Draw a mark for each ratio on a logarithmic axis, with a line at 1."""
        figure.set_size_inches(5.2, 1.6 + 0.3 * len(self.rows))
        axis = figure.subplots()
        values = [value for _, _, ratios in self.rows for value in ratios.values() if value]
        low, high = min(*values, 0.8) / 1.15, max(*values, 1.25) * 1.15
        axis.axvspan(low, 1, color="#f3f3f3", linewidth=0)
        axis.axvline(1, color="black", linewidth=1)
        for number, way in enumerate(self.ways):
            points = [
                (value, line)
                for line, (_, _, ratios) in enumerate(self.rows)
                if (value := ratios.get(way))
            ]
            style = {"color": COLOURS[number], "marker": MARKERS[number], "s": 38, "zorder": 3}
            axis.scatter(*zip(*points, strict=True), label=way, **style)
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        ticks = [one for one in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low < one < high]
        axis.set_xticks(ticks, [f"{one:g}" for one in ticks], fontsize=9)
        axis.set_xticks([], minor=True)
        names = [re.sub(r"\[(.*)\]\(.*\)", r"\1", name) for name, _, _ in self.rows]
        axis.set_yticks(range(len(self.rows)), names, fontsize=9)
        axis.set_ylim(len(self.rows) - 0.5, -0.5)
        axis.grid(axis="y", color="#e5e5e5")
        figure.supxlabel("pinfeed: times as fast (grey: slower)", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9, frameon=False)


def shown(value: float | None) -> str:
    """Return a ratio with two or three digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def streaming(name: str = "streaming") -> Topic:
    """Compare rates of later epochs, or of the only epoch of a cold file."""
    heads = ("rows, file, order", "pinfeed, GB/s")
    return Topic(heads, compared(load(f"{name}-cpu-2-cores")["results"]))


def images() -> Topic:
    """Compare the rates of augmented images, and the times to the first batch."""
    topic = Topic(("measurement", "pinfeed"))
    for name, ways in load("images-cpu-2-cores")["results"]["runs"].items():
        if name.startswith(("MiB", "µs")):
            continue
        key = "per_s" if name.startswith("images") else "seconds"
        found = {way: statistics.median(run[key] for run in runs) for way, runs in ways.items()}
        ours = found.pop("pinfeed, wrap_dataset")
        found.pop("pinfeed, wrap_loader")
        # A way may make samples or whole batches; the faster one counts.
        ratios: dict[str, float | None] = {}
        for way, value in found.items():
            ratio = ours / value if key == "per_s" else value / ours
            name_of_way = way.removesuffix(", whole batches")
            ratios[name_of_way] = min(ratio, ratios.get(name_of_way) or ratio)
        unit = "per s" if key == "per_s" else "s"
        short = name.replace("images per s, ", "").replace("s to the first", "first")
        topic.rows.append((short, f"{ours:.3g} {unit}", ratios))
    return topic


def small_batches() -> Topic:
    """Compare the time of a batch with that of the bare loader."""
    topic = Topic(("loop", "pinfeed, µs per batch"))
    for part in load("small-batches-cpu-2-cores")["results"]:
        ways = part["ways"]
        ours = next(way for way in ways if way.endswith("depth=None"))
        ratios = {
            "whole batches" if "BatchSampler" in way else way.split(", ")[0]: found
            for way, found in ((way, ways[ours]["ratio"] / ways[way]["ratio"]) for way in ways)
            if way.startswith(("DataLoader", "plain")) and "tensors" not in way
        }
        name = f"{part['group'].replace('a DataLoader', 'wrapped loader')}, {part['step']}"
        named = {
            {"whole batches": "DataLoader of whole batches", "DataLoader": "the bare loader"}.get(
                way, way
            ): ratio
            for way, ratio in ratios.items()
        }
        topic.rows.append((name, f"{ways[ours]['us']:.0f}", dict(named)))
    return topic


def tables() -> Topic:
    """Compare steps that train rows of tables: medians over the sizes and shares of rows."""
    topic = Topic(("ids per batch, step", "pinfeed, ms"))
    cells = load("rows-cpu-2-cores")["results"]["cells"]
    names = {
        "synchronous": "depth=0",
        "whole table": "nn.Embedding",
        "FBGEMM": "FBGEMM",
        "gather+copy": "loop by hand",
    }
    for n_ids in sorted({cell["n_ids"] for cell in cells}):
        for key, step in (("small_ms", "small step"), ("large_ms", "large step")):
            found = [cell[key] for cell in cells if cell["n_ids"] == n_ids]
            # Without a depth from the user, a loop on the CPU is synchronous for few ids.
            ratios = {
                name: statistics.median(one[way] / one["prefetch"] for one in found if way in one)
                for way, name in names.items()
                if any(way in one for one in found)
            }
            ours = statistics.median(one["prefetch"] for one in found)
            topic.rows.append((f"{n_ids:,}, {step}", f"{ours:.3g}", dict(ratios)))
    return topic


def programs() -> Topic:
    """Compare ported programs with their originals."""
    topic = Topic(("program", "pinfeed, ms per batch"))
    for program in _programs():
        ours = program["ways"]["pinfeed"]
        ratios = {
            "without a step": ours["times_as_fast"],
            "with its training step": ours["step_times_as_fast"],
        }
        topic.rows.append((program["title"], f"{ours['ms']:.2f}", ratios))
    return topic


def _programs() -> Iterable[Any]:
    for path in sorted(RESULTS.glob("programs-*.json")):
        yield from json.loads(path.read_text())["results"]


def host() -> Topic:
    """Compare the CPU time of all threads for a batch, on a simulated driver."""
    topic = Topic(("batch", "pinfeed, µs of all threads"))
    for cell in load("host-cpu-2-cores")["results"]:
        ways = {way: one["all_us"] for way, one in cell["ways"].items()}
        ours = ways.pop("pinfeed")
        names = {"by hand": "a side stream by hand", "to": ".to() in the loop"}
        ratios = {names[way]: value / ours for way, value in ways.items() if way in names}
        if ratios:
            topic.rows.append((cell["cell"], f"{ours:.0f}", dict(ratios)))
    return topic


def gpu() -> Topic:
    """Compare times on one NVIDIA H200 with the synchronous loop and with simpler ways."""
    topic = Topic(("what", "pinfeed"))
    synchronous, simpler = "pinfeed, depth=0", "the fastest way without pinfeed"
    cells = load("gpu-nvidia-h200-tables-1")["cells"]
    loops: dict[tuple[str, str], dict[str, float]] = {}
    for cell in cells:
        if cell["what"] == "step":
            ways = loops.setdefault((cell["table"], cell["model"]), {})
            ways[cell["contestant"]] = cell["step_ms"]
    for (table, model), ways in loops.items():
        ours = ways["prefetch"]
        # A whole table on the GPU is what these tables are too large for.
        others = [ways[way] for way in ("UVA gathers", "SpeedTorch's", "gather+copy")]
        ratios = {synchronous: ways["synchronous"] / ours, simpler: min(others) / ours}
        topic.rows.append((f"table, {_short(table)}, {model} model", f"{ours:.2f} ms", ratios))
    speedtorch = next(cell for cell in cells if cell["what"].startswith("SpeedTorch's table"))
    ours = speedtorch["pinfeed, depth 2"]
    others = [v for way, v in speedtorch.items() if isinstance(v, float) and "pinfeed" not in way]
    others.remove(speedtorch["took_s"])
    ratios = {synchronous: speedtorch["pinfeed, depth 0"] / ours, simpler: min(others) / ours}
    topic.rows.append(("SpeedTorch's own case", f"{ours:.2f} ms", ratios))
    topic.rows += _loops_on_gpu(simpler)
    return topic


def _loops_on_gpu(simpler: str) -> Iterable[tuple[str, str, dict[str, float | None]]]:
    """Yield small batches, loaders, fetched rows, samples and offloaded activations."""
    cells = load("gpu-nvidia-h200-loops-1")["cells"]
    dicts = [cell for cell in cells if cell["what"] == "a dict of small tensors"]
    for ours, other in zip(dicts[::2], dicts[1::2], strict=True):
        kind = "page-locked" if ours["pinned"] else "pageable"
        tensors = f"{ours['tensors']} tensor" + "s" * (ours["tensors"] > 1)
        ratio = other["batch_us"] / ours["batch_us"]
        name = f"wrap_loader, {tensors}, {kind}"
        yield name, f"{ours['batch_us'] / 1e3:.2f} ms", {simpler: ratio}
    found = {cell["by"]: cell["batch_ms"] for cell in cells if cell["what"].startswith("a Data")}
    ratio = min(found["DataLoader, .to(non_blocking)"], found["a side stream by hand"])
    ours = found["wrap_loader"]
    yield "wrap_loader, a DataLoader", f"{ours:.2f} ms", {simpler: ratio / ours}
    found = {
        cell["by"]: cell["batch_ms"]
        for cell in load("gpu-nvidia-h200-fetch-1")["cells"]
        if cell["ids"] == "uniform"
    }
    for way in ("fetch, page-locked", "fetch, file"):
        yield way, f"{found[way]:.2f} ms", {simpler: found["x[ids].to(device)"] / found[way]}
    found = {
        cell["by"]: cell["images_per_s"] for cell in load("gpu-nvidia-h200-samples-1")["cells"]
    }
    other, ours = found["DataLoader with workers, .to(non_blocking)"], found["wrap_dataset"]
    yield "samples, 8 threads", f"{ours:,.0f} per s", {simpler: ours / other}
    steps = {
        cell["mode"]: cell["step_ms"]
        for cell in load("gpu-nvidia-h200-large-batches-1")["cells"]
        if cell["what"] == "Offload, step" and cell["batch"] == 64
    }
    ours = steps["Offload"]
    yield "Offload, 64 sequences", f"{ours:.0f} ms", {simpler: steps["plain"] / ours}


def _short(table: str) -> str:
    """Return a shorter name of a table, such as "512 B, 8,192 ids, half shared"."""
    found = re.fullmatch(r"rows of (\d+ B), (\d+) ids, (\d+)% repeated(.*)", table)
    assert found is not None
    more = ", half repeated" * (found[3] != "0") + ", half shared" * bool(found[4])
    return f"{found[1]}, {int(found[2]):,} ids{more}"


def memory() -> Topic:
    """Compare predicted with measured peaks of training steps."""
    topic = Topic(("model, batch", "measured, MiB"))
    for peak in load("budget-cpu-2-cores")["results"]["peaks"]:
        name = f"{peak['model']}, {peak['batch']:,}"
        ratios = {"predicted / measured": peak["ratio"]}
        topic.rows.append((name, f"{peak['measured_mib']:.0f}", ratios))
    return topic


def overview() -> Topic:
    """Summarize each topic, in comparison with the fastest other way of each case."""
    topic = Topic(("topic", "cases"))
    for name, title in SUMMARIZED.items():
        values = []
        for _, _, ratios in TOPICS[name]().rows:
            others = [ratio for ratio in ratios.values() if ratio]
            # A program is compared with its original twice, without and with a training step.
            values += others if name == "programs" else [min(others)]
        found = {"best": max(values), "median": statistics.median(values), "worst": min(values)}
        link = f"[{title}]({name}.md)"
        topic.rows.append((link, str(len(values)), dict(found)))
    return topic


SUMMARIZED = {
    "streaming": "Streaming a file",
    "larger-than-memory": "Files larger than memory",
    "images": "Augmented images",
    "small-batches": "Small batches",
    "tables": "Training rows of tables",
    "programs": "Ported programs",
    "host": "Host work per batch",
    "gpu": "One NVIDIA H200",
}
TOPICS: dict[str, Callable[[], Topic]] = {
    "index": overview,
    "streaming": streaming,
    "larger-than-memory": lambda: streaming("streaming-larger"),
    "images": images,
    "small-batches": small_batches,
    "tables": tables,
    "memory": memory,
    "programs": programs,
    "host": host,
    "gpu": gpu,
}


def with_table(page: str, topic: Topic) -> str:
    """Return the text of a page with the table of its topic between the two marks."""
    marks = "<!-- measured -->", "<!-- end of measured -->"
    before, rest = page.split(marks[0])
    return f"{before}{marks[0]}\n{topic.table()}\n{marks[1]}{rest.split(marks[1])[1]}"


STORED = re.compile(
    r"^( *)<!-- (benchmarks/results/[\w-]+\.md) -->\n.*?^ *<!-- end of results -->\n",
    re.DOTALL | re.M,
)


def with_stored_tables(page: str) -> str:
    """Return the text of a page with the tables of the files that its marks name."""

    def between_marks(found: re.Match[str]) -> str:
        margin, name = found.groups()
        table = (RESULTS.parent.parent / name).read_text().strip()
        lines = [f"<!-- {name} -->", "", *table.splitlines(), "", "<!-- end of results -->"]
        return "".join(f"{margin}{line}".rstrip() + "\n" for line in lines)

    return STORED.sub(between_marks, page)


def main() -> None:
    # A fixed salt gives the same file for the same picture.
    mpl.rcParams["svg.hashsalt"] = "pinfeed"
    for name, make in TOPICS.items():
        topic = make()
        page = PAGES / f"{name}.md"
        page.write_text(with_table(page.read_text(), topic))
        figure = Figure(layout="constrained")
        FigureCanvasSVG(figure)
        topic.draw(figure)
        figure.savefig(HERE / f"measured-{name}.svg", metadata={"Date": None})
    for page in HERE.parent.rglob("*.md"):
        page.write_text(with_stored_tables(page.read_text()))


if __name__ == "__main__":
    main()
