"""The overhead of pinfeed per batch, in loops that do nothing over sources that do nothing.

Run it from the root:

    # half a minute
    python -m benchmarks.overhead

The time between two batches is measured by a clock around the iterator, without the time of
``write_back``. The mean is the time of the whole loop, threads started and ended included, divided
by its batches. CPU time includes the kernel's work to wake threads, which does not need the
interpreter's lock. A bare executor, which hands over nothing, is the lower bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from benchmarks.environment import environment, save
from pinfeed import ArrayStore, Feeder, wrap_loader

N_BATCHES = 3000
DEPTHS = (0, 1, 2)

Figures = dict[str, float]
"""Microseconds of a batch by the name of the figure."""


class Nothing(ArrayStore):
    """A store whose gather does nothing."""

    def gather(self, rows: Any, out: Any) -> None:
        pass


def bare(depth: int, n: int) -> Iterator[None]:
    """Run the minimum of a prefetching loop: one future per batch."""
    with ThreadPoolExecutor(1) as executor:
        futures = deque(executor.submit(lambda: None) for _ in range(depth))
        for _ in range(n):
            futures.append(executor.submit(lambda: None))
            yield futures.popleft().result()


def measured(batches: Iterable[Any], step: Callable[[Any], object] = lambda batch: None) -> Figures:
    """Return the times between two batches, the mean of the loop, and the CPU time of threads."""
    gaps_s = []
    others_s = _others_s()
    consumer_s = time.thread_time()
    begin_s = last_s = time.perf_counter()
    for batch in batches:
        gaps_s.append(time.perf_counter() - last_s)
        step(batch)
        last_s = time.perf_counter()
    mean_s = (time.perf_counter() - begin_s) / len(gaps_s)
    p50_s, p90_s = np.percentile(gaps_s, [50, 90])
    found = {
        "p50": float(p50_s),
        "p90": float(p90_s),
        "mean": mean_s,
        "training_cpu": (time.thread_time() - consumer_s) / len(gaps_s),
        "others_cpu": (_others_s() - others_s) / len(gaps_s),
    }
    return {key: round(seconds * 1e6, 1) for key, seconds in found.items()}


def _others_s() -> float:
    """Return the CPU seconds of all threads except this one."""
    return time.process_time() - time.thread_time()


def ways(device: str, depth: int, n: int = N_BATCHES) -> dict[str, Callable[[], Figures]]:
    """Return the measurements of loops of ``n`` batches at a depth."""

    def fed(source: Any, **options: Any) -> Figures:
        with Feeder(source, batch_size=16, depth=depth, device=device, **options) as feeder:
            return measured(feeder)

    def written(**options: Any) -> Figures:
        store = ArrayStore(np.zeros((n * 16, 4), np.float32))
        with Feeder(store, batch_size=16, depth=depth, device=device, **options) as feeder:
            return measured(feeder.batches(), lambda batch: batch.write_back(batch.data))

    def wrapped() -> Figures:
        loader = [(torch.zeros(1), torch.zeros(1))] * n
        with wrap_loader(loader, depth=depth, device=device) as wrapper:
            return measured(wrapper)

    array = np.zeros((n * 16, 4), np.float32)
    array.flags.writeable = False
    found = {
        "a feeder, empty source": lambda: fed(Nothing(array)),
        "with a timeline": lambda: fed(Nothing(array), timeline=True),
        "16 rows of 16 B": lambda: fed(ArrayStore(array)),
        "four empty sources": lambda: fed((Nothing(array),) * 4),
        "with `write_back`": written,
        "with `write_back` and a timeline": lambda: written(timeline=True),
        "`wrap_loader`": wrapped,
    }
    if depth:
        found["a bare executor, for comparison"] = lambda: measured(bare(depth, n))
    return found


def measure(devices: Iterable[str], n_rounds: int, n: int = N_BATCHES) -> dict[str, Any]:
    """Return the medians of rounds by device and cell; a cell is a way and a depth."""
    found: dict[str, Any] = {}
    for device in devices:
        cells = found[device] = {}
        for depth in DEPTHS:
            for name, way in ways(device, depth, n).items():
                rounds = [way() for _ in range(n_rounds)]
                cells[f"{name}, depth {depth}"] = {
                    key: round(statistics.median(one[key] for one in rounds), 1)
                    for key in rounds[0]
                }
    return found


TABLES = {
    "The time between two batches, in µs (median, 90th percentile)": ("p50", "p90"),
    "The time of the whole loop divided by its batches, in µs": ("mean",),
    "CPU time of a batch, in µs (consumer thread, all other threads)": (
        "training_cpu",
        "others_cpu",
    ),
}


def report(results: dict[str, Any]) -> str:
    """Return the figures as Markdown tables: a row for each way and a column for each depth."""
    parts = []
    for device, cells in results.items():
        for title, keys in TABLES.items():
            names = dict.fromkeys(cell.rpartition(", depth ")[0] for cell in cells)
            rows = [
                [name, *(_text(cells, name, depth, keys) for depth in DEPTHS)] for name in names
            ]
            headers = ["", *(f"depth {depth}" for depth in DEPTHS)]
            table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
            parts.append(f"{title}{f', {device}' * (device != 'cpu')}:\n\n{table}")
    return "\n\n".join(parts)


def _text(cells: dict[str, Figures], name: str, depth: int, keys: tuple[str, ...]) -> str:
    figures = cells.get(f"{name}, depth {depth}")
    return ", ".join(f"{figures[key]:.0f}" for key in keys) if figures else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short loops; saves nothing")
    arguments = parser.parse_args()
    print(environment())
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    n = 200 if arguments.quick else N_BATCHES
    results = measure(devices, arguments.rounds, n)
    print(report(results))
    if not arguments.quick:
        path = save("overhead", results)
        path.with_suffix(".md").write_text(report(results) + "\n")
        print(path)


if __name__ == "__main__":
    main()
