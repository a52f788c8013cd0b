"""The host's work for each batch of loops on a GPU, measured without a GPU.

pinfeed's CUDA device runs on a driver whose calls take the time of a real driver's calls, and whose
copies take the time of a link. Run it from the root:

    # two minutes, on two cores
    python -m benchmarks.host
    # one short round of some cells; saves nothing
    python -m benchmarks.host --quick --only "loader, two"

The ways of a cell run in turn in each round. A figure is the best one of all rounds, and includes
the begin and the end of the loop. Before, copies move bytes, and the batches of all ways are
compared with those of a loop that copies nothing. Copies of measured loops move nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.environment import environment, save
from benchmarks.host.cells import Cell, Way, cells
from benchmarks.host.gpu import simulated_gpu

N_CHECKED = 24

Figures = dict[str, float]


def device_of(cell: Cell, *, moves: bool) -> contextlib.AbstractContextManager[Any]:
    on_gpu = cell.device == "cuda"
    return simulated_gpu(moves=moves) if on_gpu else contextlib.nullcontext(cell.device)


def check(cell: Cell, way: Way) -> None:
    """Compare the batches of a way with the expected ones.

    Raises:
        AssertionError: If they differ.
    """
    with device_of(cell, moves=True) as device:
        batches = zip(way(device, N_CHECKED), cell.expected("cpu", N_CHECKED), strict=True)
        for pair in batches:
            found, expected = ([one] if isinstance(one, torch.Tensor) else one for one in pair)
            are_equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
            assert are_equal, f"{cell.name}: batches differ"
            for tensor in found:
                tensor.add_(1)
        cell.check()


def timed(cell: Cell, way: Way, n: int) -> Figures:
    """Return microseconds of a batch, and voluntary context switches of all threads."""
    gaps_s = []
    with device_of(cell, moves=False) as device:
        batches = way(device, n)
        n_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        first_s = stepped_s = cell.steps_s()
        all_s = time.process_time()
        training_s = time.thread_time()
        last_s = time.perf_counter()
        for _ in batches:
            before_s, stepped_s = stepped_s, cell.steps_s()
            gaps_s.append(time.perf_counter() - last_s - (stepped_s - before_s))
            cell.step()
            last_s = time.perf_counter()
        training_s = time.thread_time() - training_s
        all_s = time.process_time() - all_s
        n_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - n_switches
    return {
        "training_us": (training_s - (stepped_s - first_s)) / n * 1e6,
        "all_us": (all_s - (stepped_s - first_s)) / n * 1e6,
        "gap_us": statistics.median(gaps_s) * 1e6,
        "switches": n_switches / n,
    }


def measure(cell: Cell, n_rounds: int, n: int) -> dict[str, Figures]:
    """Return the best figures of each way of a cell."""
    for way in cell.ways.values():
        check(cell, way)
    rounds = [
        {name: timed(cell, way, n) for name, way in cell.ways.items()} for _ in range(n_rounds)
    ]
    best = {}
    for name in cell.ways:
        best[name] = {
            key: round(min(one[name][key] for one in rounds), 2) for key in rounds[0][name]
        }
    if cell.goal.startswith("+"):
        # The goal is a difference from the way without pinfeed, or without the option.
        ours, other = best.values()
        ours["extra_us"] = round(ours["gap_us"] - other["gap_us"], 2)
    return best


def report(results: list[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    rows = []
    for result in results:
        ours, *others = result["ways"].items()
        extra = f", {ours[1]['extra_us']:+.0f}" if "extra_us" in ours[1] else ""
        compared = ", ".join(f"{name} {_text(figures)}" for name, figures in others)
        switches = f"{ours[1]['switches']:.1f}"
        rows.append([result["cell"], _text(ours[1]) + extra, result["goal"], switches, compared])
    headers = ("µs of a batch", "pinfeed", "goal", "switches", "compared with")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _text(figures: Figures) -> str:
    return "{training_us:.0f} / {all_us:.0f} ({gap_us:.0f})".format(**figures)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of a cell's name; saves nothing")
    parser.add_argument("--quick", action="store_true", help="one short round; saves nothing")
    parser.add_argument("--json", action="store_true", help="print a line for each way of a cell")
    given = parser.parse_args(arguments)
    n_rounds, divisor = (1, 20) if given.quick else (given.rounds, 1)
    torch.set_num_threads(1)
    # A loop without a step always waits for data, and pinfeed would warn.
    logging.getLogger("pinfeed").setLevel(logging.ERROR)
    results = []
    for cell in cells():
        if given.only in cell.name:
            ways = measure(cell, n_rounds, cell.n_batches // divisor)
            results.append({"cell": cell.name, "goal": cell.goal, "ways": ways})
    if given.json:
        for result in results:
            for way, figures in result["ways"].items():
                print(json.dumps({"cell": result["cell"], "way": way, **figures}))
        return
    print(f"{environment()}\n\n{report(results)}")
    if not (given.quick or given.only):
        path = save("host", results)
        path.with_suffix(".md").write_text(report(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
