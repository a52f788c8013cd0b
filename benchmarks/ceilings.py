"""Ceilings of streaming: the best rates of the machine for gathers in memory and file reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bandwidth import gather_rate, random_rate, sequential_rates
from benchmarks.conditions import ComputingStep, read_through, touch_memory
from benchmarks.peers import Task
from benchmarks.rowfile import Kind, drop

# Seconds of a measurement with random reads.
_RANDOM_S = 0.5
# Memory to touch, as a multiple of the file's size: for the page cache and for buffers.
_TOUCHED = 1.5


def memory_rates(tasks: Sequence[Task]) -> dict[str, float]:
    """Return GB/s of gathers from a populated memory map into reused buffers, by order."""
    path = tasks[0].path
    read_through([path])
    touch_memory(1 << 28)
    return {
        f"gather, {task.order}": gather_rate(path, [np.r_[rows] for rows in task.epochs[0]])
        for task in tasks
    }


def disk_rates(task: Task) -> dict[str, Any]:
    """Return GB/s of a file that is not in the page cache, with the best way of reading.

    It is read in sequence, and row by row in random order.
    """
    path = task.path
    nbytes = task.kind.row_nbytes
    # The file has a header and rows, and nothing else.
    start = path.stat().st_size % nbytes
    touched = round(_TOUCHED * path.stat().st_size)

    def at_random(n_threads: int) -> float:
        drop([path])
        touch_memory(touched)
        return random_rate(path, start, nbytes, task.epochs[0], n_threads, seconds=_RANDOM_S)

    # A file that stays in the page cache is refused.
    drop([path])
    sequential = sequential_rates(path, touched=touched)
    random = {f"pread, {n} threads": at_random(n) for n in (4, 32)}
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
