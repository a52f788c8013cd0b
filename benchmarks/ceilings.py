"""Ceilings of streaming: the best rates of the machine for gathers in memory and file reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import Task
from benchmarks.rowfile import Kind, drop
from pinfeed.cli.measure.bandwidth import (
    gather_rate,
    populate_rate,
    populated,
    random_rate,
    sequential_rate,
)
from pinfeed.cli.measure.page_cache import read_through
from pinfeed.cli.measure.process_memory import touch_memory
from pinfeed.cli.measure.step import ComputingStep

# Seconds of a measurement with random reads.
_RANDOM_S = 0.5
# Memory to touch, as a multiple of the file's size: for the page cache and for buffers.
_TOUCHED = 1.5
_REPEATS = 3


def memory_rates(tasks: Sequence[Task]) -> dict[str, float]:
    """Return GB/s of gathers from a populated memory map into reused buffers, by order."""
    path = tasks[0].path
    read_through([path])
    array = populated(path)
    n_threads = min(4, len(os.sched_getaffinity(0)))
    touch_memory(1 << 28)
    return {
        f"gather, {task.order}": max(
            gather_rate(array, _as_indices(task), n_threads) for _ in range(_REPEATS)
        )
        for task in tasks
    }


def _as_indices(task: Task) -> list[np.ndarray]:
    return [np.r_[rows] for rows in task.epochs[0]]


def disk_rates(task: Task) -> dict[str, Any]:
    """Return GB/s of a file that is not in the page cache, with the best way of reading.

    It is read in sequence, and row by row in random order.
    """
    path = task.path
    nbytes = task.kind.row_nbytes
    # The file has a header and rows, and nothing else.
    start = path.stat().st_size % nbytes

    def at_random(n_threads: int) -> float:
        return random_rate(path, start, nbytes, task.epochs[0], n_threads, seconds=_RANDOM_S)

    def cold(read: Callable[[], float]) -> float:
        drop([path])
        touch_memory(round(_TOUCHED * path.stat().st_size))
        return read()

    sequential = {f"pread, {n} threads": cold(lambda n=n: sequential_rate(path, n)) for n in (1, 4)}
    # An older kernel cannot populate a memory map.
    with contextlib.suppress(OSError):
        sequential["populated map"] = cold(lambda: populate_rate(path))
    random = {f"pread, {n} threads": cold(lambda n=n: at_random(n)) for n in (4, 32)}
    return {
        "sequential, cold": max(sequential.values()),
        "random, cold": max(random.values()),
        "all on disk": {"sequential": sequential, "random": random},
    }


def measure(path: Path, kind: Kind, orders: Sequence[str]) -> dict[str, Any]:
    """Return all ceilings in GB/s, and the seconds of a step alone."""
    tasks = [Task.make(path, kind, order, 1, cold=False) for order in orders]
    at_random = Task.make(path, kind, "shuffled", 1, cold=True)
    rates = memory_rates(tasks) | disk_rates(at_random)
    torch.set_num_threads(1)
    return rates | {"step_s": ComputingStep(kind.n_products).alone_s()}
