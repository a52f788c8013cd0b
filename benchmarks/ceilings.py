"""What the machine does at best with the file that the contestants stream: copies in memory, and reads without a loader around them."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import Task
from benchmarks.rowfile import Kind, drop
from pinfeed.cli.measure.bandwidth import copy_rates, random_rate, seconds_of, sequential_rate
from pinfeed.cli.measure.page_cache import read_through

_RING = 4
# linux/mman.h
_MADV_POPULATE_READ = 22
# For each number of threads.
_RANDOM_S = 0.6


class Compute:
    """The step of a training loop, in one thread: matrix products."""

    def __init__(self, n_products: int) -> None:
        torch.set_num_threads(1)
        self._a, self._b, self._out = (torch.zeros(256, 256) for _ in range(3))
        self.n_products = n_products

    @classmethod
    def lasting(cls, seconds: float) -> Compute:
        one = cls(1)
        return cls(max(1, round(seconds / one.alone_s())))

    def __call__(self) -> None:
        for _ in range(self.n_products):
            torch.mm(self._a, self._b, out=self._out)

    def alone_s(self) -> float:
        """Seconds that it takes with nothing beside it: the median of some."""
        return statistics.median(seconds_of(self) for _ in range(40))


def memory_rates(tasks: list[Task]) -> dict[str, Any]:
    """GB/s of copies within memory, and of the batches of each order from a memory map that is all there."""
    kind, path = tasks[0].kind, tasks[0].path
    ring = [torch.zeros(kind.batch_size, *kind.row_shape) for _ in range(_RING)]
    read_through([path])
    # As "r", but torch takes it without a warning.
    array = np.load(path, mmap_mode="c")
    with contextlib.suppress(OSError):
        # An older kernel: the first pass of several faults the pages in.
        array._mmap.madvise(_MADV_POPULATE_READ)
    gathers = {
        task.order: gather_rates(array.view(np.ndarray), task.epochs[0], ring) for task in tasks
    }
    copies = copy_rates(ring)
    return {
        "memcpy": max(copies.values()),
        **{f"gather, {order}": max(rates.values()) for order, rates in gathers.items()},
        "sequential, warm": max(sequential_rate(path, n_threads) for n_threads in (1, 2, 4)),
        "all in memory": {"memcpy": copies, **gathers},
    }


def gather_rates(
    array: np.ndarray, batches: list[Any], ring: list[torch.Tensor]
) -> dict[str, float]:
    """GB/s of batches into a ring of reused buffers, in several ways; where other processes are busy, one thread can be the best."""
    source, n_threads = torch.from_numpy(array), torch.get_num_threads()

    def by_torch(out: torch.Tensor, rows: Any) -> None:
        if isinstance(rows, slice):
            out.copy_(source[rows])
        else:
            torch.index_select(source, 0, torch.from_numpy(rows), out=out)

    def by_numpy(out: torch.Tensor, rows: Any) -> None:
        if isinstance(rows, slice):
            np.copyto(out.numpy(), array[rows])
        else:
            # Which, unlike "raise", needs no buffer between.
            np.take(array, rows, axis=0, out=out.numpy(), mode="clip")

    def rate(way: Callable[[torch.Tensor, Any], None]) -> float:
        seconds = (
            seconds_of(
                lambda: [
                    way(out, rows)
                    for out, rows in zip(itertools.cycle(ring), batches, strict=False)
                ]
            )
            for _ in range(2)
        )
        return len(batches) * ring[0].nbytes / min(seconds) / 1e9

    rates = {"torch, all threads": rate(by_torch), "numpy": rate(by_numpy)}
    torch.set_num_threads(1)
    rates["torch, 1 thread"] = rate(by_torch)
    torch.set_num_threads(n_threads)
    return rates


def disk_rates(task: Task) -> dict[str, Any]:
    """GB/s of a file that is not in the page cache: in sequence, and row by row in random order, each at its best number of threads."""
    sequential, at_random = {}, {}
    nbytes = task.kind.row_nbytes
    # The header: there is nothing else beside rows.
    start = task.path.stat().st_size % nbytes
    for n_threads, behind in itertools.product((1, 2, 4), (False, True)):
        # As before the run of a contestant.
        read_through([task.path])
        drop([task.path])
        sequential[f"{n_threads} threads{', dropped behind' * behind}"] = sequential_rate(
            task.path, n_threads, behind=behind
        )
    for n_threads in (1, 4, 16, 32):
        drop([task.path])
        at_random[f"{n_threads} threads"] = random_rate(
            task.path, start, nbytes, task.epochs[0], n_threads, seconds=_RANDOM_S
        )
    return {
        # As a loader does by default.
        "sequential, cold": max(rate for name, rate in sequential.items() if "dropped" not in name),
        "sequential, cold, dropped behind": max(
            rate for name, rate in sequential.items() if "dropped" in name
        ),
        "random, cold": max(at_random.values()),
        "all on disk": {"sequential": sequential, "random": at_random},
    }


def measure(path: Path, kind: Kind, orders: Sequence[str], n_products: int) -> dict[str, Any]:
    """All of it, in GB/s; and the seconds of a step alone."""
    tasks = [Task.make(path, kind, order, 1, cold=False) for order in orders]
    at_random = Task.make(path, kind, "shuffled", 1, cold=True)
    return memory_rates(tasks) | disk_rates(at_random) | {"step_s": Compute(n_products).alone_s()}
