"""The time between two batches of a loop that does nothing, and the time of its other threads.

The sources have almost nothing to do, so only pinfeed's own work remains. The time between
two batches is measured by a clock around the iterator, without the time of ``write_back``. The mean
is the time of the whole loop, threads started and ended included, divided by its batches.

The other threads are measured in two ways. Their CPU time includes the kernel's work to wake them,
which does not need the interpreter's lock. The time in which they hold the lock is sampled in a
loop of its own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from benchmarks.earlier import Earlier
from benchmarks.lock_sampler import LockSampler
from pinfeed import ArrayStore, Feeder, wrap_loader

N = 3000
N_SAMPLED = 2000
"""Batches of a loop in which the lock is sampled."""
N_ROUNDS = 3
DEPTHS = (0, 1, 2, 4)
EMPTY = "a feeder, empty source"
WRITES = "with `write_back`"
GOALS_US = {
    EMPTY: dict(zip(DEPTHS, (10, 30, 15, 10), strict=True)),
    WRITES: dict(zip(DEPTHS, (25, 60, 60, 60), strict=True)),
}
"""Medians of the time between two batches, for each depth."""
GOAL_LOCK_US = 30
GOAL_LOCK_DEPTH = 2

Figures = dict[str, float]
"""Microseconds of a batch by the name of the figure."""
Body = Callable[[Any], object]
Measure = Callable[[Iterable[Any], Body], Figures]
Results = dict[str, dict[str, Figures]]
"""Figures of the cells of each device; a cell is a way and a depth."""


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


def gaps(batches: Iterable[Any], body: Body) -> Figures:
    """Measure the times between two batches, and the CPU time of the threads.

    Returns:
        Median and 90th percentile of the times, the mean of the whole loop, and the CPU time of
        this thread and of all others.
    """
    gaps_s = []
    others_s = _others_s()
    training_s = time.thread_time()
    begin_s = last_s = time.perf_counter()
    for batch in batches:
        now_s = time.perf_counter()
        gaps_s.append(now_s - last_s)
        body(batch)
        last_s = time.perf_counter()
    end_s = time.perf_counter()
    training_s = time.thread_time() - training_s
    others_s = _others_s() - others_s
    p50_s, p90_s = np.percentile(gaps_s, [50, 90])
    n = len(gaps_s)
    found = {
        "p50": float(p50_s),
        "p90": float(p90_s),
        "mean": (end_s - begin_s) / n,
        "training_cpu": training_s / n,
        "others_cpu": others_s / n,
    }
    return {key: round(seconds * 1e6, 1) for key, seconds in found.items()}


def _others_s() -> float:
    """Return the CPU seconds of all threads except this one."""
    return time.process_time() - time.thread_time()


def lock_held(batches: Iterable[Any], body: Body) -> Figures:
    """Measure how long the interpreter's lock is held, by this thread and by all others.

    The result is empty if the lock cannot be sampled.
    """
    n = 0
    with LockSampler() as sampler:
        for batch in batches:
            body(batch)
            n += 1
    if sampler.training is None or sampler.others is None:
        return {}
    us = sampler.seconds / n * 1e6
    found = {"training_lock": sampler.training * us, "others_lock": sampler.others * us}
    return {key: round(value, 1) for key, value in found.items()}


def ways(
    device: str, depth: int, n: int = N, measure: Measure = gaps
) -> dict[str, Callable[[], Figures]]:
    """Return the measurements at a depth.

    Args:
        device: Name of the device.
        depth: Number of batches to prefetch.
        n: Number of batches.
        measure: Function that runs a loop and measures it.
    """

    def fed(source: Any, *, write: bool = False, **options: Any) -> Figures:
        with Feeder(source, batch_size=16, depth=depth, device=device, **options) as feeder:
            if write:
                return measure(feeder.batches(), lambda batch: batch.write_back(batch.data))
            return measure(feeder, _do_nothing)

    def wrapped() -> Figures:
        loader = [(torch.zeros(1), torch.zeros(1))] * n
        with wrap_loader(loader, depth=depth, device=device) as wrapper:
            return measure(wrapper, _do_nothing)

    array = np.zeros((n * 16, 4), np.float32)
    array.flags.writeable = False

    def written(**options: Any) -> Figures:
        return fed(ArrayStore(np.zeros((n * 16, 4), np.float32)), write=True, **options)

    found: dict[str, Callable[[], Figures]] = {}
    if depth:
        found["a bare executor, for comparison"] = lambda: measure(bare(depth, n), _do_nothing)
    return found | {
        EMPTY: lambda: fed(Nothing(array)),
        "with a timeline": lambda: fed(Nothing(array), timeline=True),
        "16 rows of 16 B": lambda: fed(ArrayStore(array)),
        "four empty sources": lambda: fed((Nothing(array),) * 4),
        WRITES: written,
        "with `write_back` and a timeline": lambda: written(timeline=True),
        "`wrap_loader`": wrapped,
    }


def _do_nothing(batch: Any) -> None:
    pass


def one_cell(device: str, depth: int, name: str, n: int = N) -> Figures:
    """Measure a way at a depth, in a loop of ``n`` batches and in one with samples of the lock."""
    n_sampled = min(n, N_SAMPLED)
    return ways(device, depth, n)[name]() | ways(device, depth, n_sampled, lock_held)[name]()


def measure(
    devices: Iterable[str], earlier: Earlier | None = None, n_rounds: int = N_ROUNDS, n: int = N
) -> dict[str, Results]:
    """Return medians of rounds, by this pinfeed (``"after"``) and an earlier one (``"before"``).

    Both are measured in turn.

    Args:
        devices: Names of the devices.
        earlier: The earlier pinfeed; None measures this one only.
        n_rounds: Number of rounds.
        n: Number of batches of a loop.
    """
    found: dict[str, Results] = {"before": {}, "after": {}} if earlier else {"after": {}}
    for device in devices:
        for depth in DEPTHS:
            for name in ways(device, depth):
                rounds: dict[str, list[Figures]] = {version: [] for version in found}
                for _ in range(n_rounds):
                    rounds["after"].append(one_cell(device, depth, name, n))
                    if earlier is not None:
                        before = earlier.call(f"{__name__}:one_cell", device, depth, name, n)
                        rounds["before"].append(before)
                for version, figures in rounds.items():
                    cells = found[version].setdefault(device, {})
                    cells[f"{name}, depth {depth}"] = _medians(figures)
    return found


def _medians(rounds: list[Figures]) -> Figures:
    return {key: round(statistics.median(one[key] for one in rounds), 1) for key in rounds[0]}


TABLES = {
    "The time between two batches, in µs (median, 90th percentile)": ("p50", "p90"),
    "The time of the whole loop divided by its batches, in µs": ("mean",),
    "CPU time of a batch, in µs (training thread, all other threads)": (
        "training_cpu",
        "others_cpu",
    ),
    "The interpreter's lock, held for a batch, in µs (training thread, all other threads)": (
        "training_lock",
        "others_lock",
    ),
}


def report(results: dict[str, Results]) -> str:
    """Return the figures as Markdown tables, with those of an earlier pinfeed before arrows."""
    parts = []
    for device in results["after"]:
        versions = [by_device[device] for by_device in results.values()]
        for title, keys in TABLES.items():
            heading = f"{title}, {device}" if device != "cpu" else title
            parts.append(f"{heading}:\n\n{_table(versions, keys)}")
    return "\n\n".join(parts)


def _table(versions: list[dict[str, Figures]], keys: tuple[str, ...]) -> str:
    """Return a table with a row for each way and a column for each depth."""
    names = dict.fromkeys(cell.rpartition(", depth ")[0] for cell in versions[-1])
    rows = []
    for name in names:
        cells = [f"{name}, depth {depth}" for depth in DEPTHS]
        shown = [" → ".join(_text(found.get(cell), keys) for found in versions) for cell in cells]
        rows.append([name, *shown])
    headers = ["", *(f"depth {depth}" for depth in DEPTHS)]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _text(figures: Figures | None, keys: tuple[str, ...]) -> str:
    return ", ".join(f"{figures[key]:.0f}" for key in keys if key in figures) if figures else ""


def goals(results: dict[str, Results]) -> str:
    """Compare the figures with the goals, one line for each."""
    checks = [
        (f"{name}, depth {depth}", "median", _median, goal_us)
        for name, by_depth in GOALS_US.items()
        for depth, goal_us in by_depth.items()
    ]
    what = "lock held by other threads, at most"
    checks.append((f"{EMPTY}, depth {GOAL_LOCK_DEPTH}", what, lock_bound, GOAL_LOCK_US))
    lines = []
    for device in results["after"]:
        for cell, what, figure, goal_us in checks:
            found = [figure(by_device[device][cell]) for by_device in results.values()]
            shown = " → ".join(f"{us:.1f}" for us in found)
            verdict = "met" if found[-1] <= goal_us else "missed"
            lines.append(f"{device}: {cell}: {what} {shown} µs, goal {goal_us}: {verdict}")
    return "\n".join(lines)


def _median(figures: Figures) -> float:
    return figures["p50"]


def lock_bound(figures: Figures) -> float:
    """Return an upper bound of the time in which other threads run while they hold the lock.

    The samples also count the time in which other programs interrupt a thread that holds it.
    """
    return min(figures["others_cpu"], figures.get("others_lock", math.inf))
