"""The host's work for a batch in loops on a GPU, measured without a GPU.

pinfeed's CUDA device runs on a driver that takes the time of a real driver on the host, and copies
at the rate of a link. Run it from the root:

    # two minutes
    python -m benchmarks.host
    # one round of few batches; saves nothing
    python -m benchmarks.host --quick --only "loader, two"

All loops of a cell run in turn in each round, and a figure is the best one of all rounds. Figures
include starting and ending the loop. First, the batches of each loop are compared with those of a
loop on the host, while copies move bytes. In measured loops, they move nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.environment import environment, save
from benchmarks.host.cells import Cell, Loop, cells
from benchmarks.host.gpu import simulated_gpu

N_CHECKED = 24

Figures = dict[str, float]
"""Microseconds of a batch, and voluntary context switches of all threads."""


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Use one thread in torch, and let pinfeed not warn of loops that always wait for data."""
    n_threads = torch.get_num_threads()
    logger = logging.getLogger("pinfeed")
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
        logger.setLevel(level)


def device_of(cell: Cell, *, moves: bool) -> contextlib.AbstractContextManager[Any]:
    return simulated_gpu(moves=moves) if cell.on_gpu else contextlib.nullcontext("cpu")


def check(cell: Cell) -> None:
    """Compare the batches of all ways with the expected ones.

    Raises:
        AssertionError: If they differ.
    """
    for way, loop in cell.ways.items():
        with device_of(cell, moves=True) as device:
            pairs = zip(loop(device, N_CHECKED), cell.expected("cpu", N_CHECKED), strict=True)
            for batch, expected in pairs:
                for found, value in zip(tensors_of(batch), tensors_of(expected), strict=True):
                    assert torch.equal(found, value), f"{cell.name}, {way}: batches differ"
                    # Batches belong to the loop.
                    found.add_(1)
            if cell.check is not None:
                cell.check()


def tensors_of(batch: Any) -> Sequence[torch.Tensor]:
    return (batch,) if isinstance(batch, torch.Tensor) else batch


def measured(cell: Cell, loop: Loop, n: int) -> Figures:
    """Return the figures of one loop."""
    with device_of(cell, moves=False) as device:
        return timed(loop(device, n), cell.step)


def timed(batches: Iterator[Any], step: Callable[[], object] | None) -> Figures:
    gaps_s = []
    n_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    all_s = time.process_time()
    training_s = time.thread_time()
    last_s = time.perf_counter()
    for _ in batches:
        gaps_s.append(time.perf_counter() - last_s)
        if step is not None:
            step()
        last_s = time.perf_counter()
    training_s = time.thread_time() - training_s
    all_s = time.process_time() - all_s
    n_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - n_switches
    n = len(gaps_s)
    return {
        "training_us": training_s / n * 1e6,
        "all_us": all_s / n * 1e6,
        "gap_us": statistics.median(gaps_s) * 1e6,
        "switches": n_switches / n,
    }


def measure(cell: Cell, n_rounds: int, n: int) -> dict[str, Figures]:
    """Return the best figures of each way of a cell."""
    check(cell)
    rounds: dict[str, list[Figures]] = {way: [] for way in cell.ways}
    for _ in range(n_rounds):
        for way, loop in cell.ways.items():
            rounds[way].append(measured(cell, loop, n))
    return {
        way: {key: round(min(one[key] for one in found), 2) for key in found[0]}
        for way, found in rounds.items()
    }


def report(results: list[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    rows = []
    for result in results:
        ours, *others = result["ways"]
        figures = result["ways"][ours]
        compared = ", ".join(f"{way} {_text(result['ways'][way])}" for way in others)
        rows.append(
            [result["cell"], _text(figures), f"{figures['switches']:.1f}", result["goal"], compared]
        )
    headers = ("", "pinfeed", "switches", "goal", "compared with")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _text(figures: Figures) -> str:
    return "{training_us:.0f} / {all_us:.0f} ({gap_us:.0f})".format(**figures)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the names of cells; saves nothing")
    parser.add_argument("--quick", action="store_true", help="one short round; saves nothing")
    parser.add_argument("--json", action="store_true", help="print a line for each way of a cell")
    given = parser.parse_args(arguments)
    if not given.json:
        print(environment())
    results = []
    with settings():
        for cell in cells():
            if given.only not in cell.name:
                continue
            n_rounds, n = (
                (1, cell.n_batches // 20) if given.quick else (given.rounds, cell.n_batches)
            )
            ways = measure(cell, n_rounds, n)
            results.append({"cell": cell.name, "goal": cell.goal, "ways": ways})
            if given.json:
                for way, figures in ways.items():
                    print(json.dumps({"cell": cell.name, "way": way, **figures}), flush=True)
    if given.json:
        return
    print(report(results))
    if not (given.quick or given.only):
        path = save("host", results)
        path.with_suffix(".md").write_text(report(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
