"""Ceilings of streaming: the best rates of the machine for copies in memory and for file reads."""

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
# The value of the constant in linux/mman.h.
_MADV_POPULATE_READ = 22
# Seconds of a measurement with random reads.
_RANDOM_S = 0.6


class Compute:
    """A training step in one thread: matrix products."""

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
        """Return the seconds of a step without a loader: the median of 40."""
        return statistics.median(seconds_of(self) for _ in range(40))


def memory_rates(tasks: list[Task]) -> dict[str, Any]:
    """Return GB/s of copies within memory, and of gathers from a populated memory map."""
    kind = tasks[0].kind
    path = tasks[0].path
    ring = [torch.zeros(kind.batch_size, *kind.row_shape) for _ in range(_RING)]
    read_through([path])
    # Mode "c" reads as mode "r" does, but torch accepts it without a warning.
    array = np.load(path, mmap_mode="c")
    # An older kernel does not have it. There the first of several passes populates the map.
    with contextlib.suppress(OSError):
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
    """Return GB/s of gathers into a ring of reused buffers, with several methods.

    One thread can be the fastest while other processes are busy.
    """
    source = torch.from_numpy(array)
    n_threads = torch.get_num_threads()

    def by_torch(out: torch.Tensor, rows: Any) -> None:
        if isinstance(rows, slice):
            out.copy_(source[rows])
        else:
            torch.index_select(source, 0, torch.from_numpy(rows), out=out)

    def by_numpy(out: torch.Tensor, rows: Any) -> None:
        if isinstance(rows, slice):
            np.copyto(out.numpy(), array[rows])
        else:
            # Unlike "raise", "clip" needs no intermediate buffer.
            np.take(array, rows, axis=0, out=out.numpy(), mode="clip")

    def rate(gather: Callable[[torch.Tensor, Any], None]) -> float:
        def gather_all() -> None:
            for out, rows in zip(itertools.cycle(ring), batches, strict=False):
                gather(out, rows)

        seconds = min(seconds_of(gather_all) for _ in range(2))
        return len(batches) * ring[0].nbytes / seconds / 1e9

    rates = {"torch, all threads": rate(by_torch), "numpy": rate(by_numpy)}
    torch.set_num_threads(1)
    rates["torch, 1 thread"] = rate(by_torch)
    torch.set_num_threads(n_threads)
    return rates


def disk_rates(task: Task) -> dict[str, Any]:
    """Return GB/s of a file that is not in the page cache, with the best number of threads.

    It is read in sequence, and row by row in random order.
    """
    sequential = {}
    at_random = {}
    nbytes = task.kind.row_nbytes
    # The file has a header and rows, and nothing else.
    start = task.path.stat().st_size % nbytes
    for n_threads, behind in itertools.product((1, 2, 4), (False, True)):
        # A contestant finds the file in the same state.
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
    dropped = [rate for name, rate in sequential.items() if "dropped" in name]
    kept = [rate for name, rate in sequential.items() if "dropped" not in name]
    return {
        # A loader leaves pages in the page cache by default.
        "sequential, cold": max(kept),
        "sequential, cold, dropped behind": max(dropped),
        "random, cold": max(at_random.values()),
        "all on disk": {"sequential": sequential, "random": at_random},
    }


def measure(path: Path, kind: Kind, orders: Sequence[str], n_products: int) -> dict[str, Any]:
    """Return all ceilings in GB/s, and the seconds of a step alone."""
    tasks = [Task.make(path, kind, order, 1, cold=False) for order in orders]
    at_random = Task.make(path, kind, "shuffled", 1, cold=True)
    return memory_rates(tasks) | disk_rates(at_random) | {"step_s": Compute(n_products).alone_s()}
