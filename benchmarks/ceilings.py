"""Ceilings of streaming: the best rates of the machine for gathers in memory and file reads.

All rates are in GB/s, 1e9 bytes per second.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import PIECE_BYTES, ComputingStep, drop, read_through, touch_memory
from benchmarks.peers import Task
from benchmarks.rowfile import Kind
from pinfeed.memory.pages import POPULATE_READ, advise_huge_pages
from pinfeed.stores.store import run_of

_REPEATS = 3
# Memory to touch, as a multiple of the file's size: for the page cache and for buffers.
_TOUCHED = 1.5
# Bytes of a memory map that are read at a time: several huge pages.
_POPULATE_BYTES = 8 << 20
# Threads that gather, and reused buffers of each.
_MOST_THREADS = 4
_N_BUFFERS = 2


def gather_rate(path: Path, batches: Iterable[Any]) -> float:
    """Return the rate of gathering rows from the page cache into reused buffers.

    A thread for each core, four at most, gathers from a memory map with its page tables filled.

    Args:
        path: A .npy file in the page cache.
        batches: Row indices of each batch, of equal lengths; consecutive ones are copied as a run.
    """
    # Mode "c" reads as mode "r" does, but torch accepts it without a warning.
    mapped: Any = np.load(path, mmap_mode="c")
    advise_huge_pages(mapped._mmap)
    # An older kernel does not populate maps. Then, the first pass over the rows does it.
    with contextlib.suppress(OSError):
        mapped._mmap.madvise(POPULATE_READ)
    array = mapped.view(np.ndarray)
    given = [(rows, run_of(rows)) for rows in batches]
    n_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    buffers = np.ones((n_threads, _N_BUFFERS, len(given[0][0]), *array.shape[1:]), array.dtype)

    def gather(own: np.ndarray) -> int:
        n_gathered = 0
        for (rows, run), buffer in zip(remaining, itertools.cycle(own), strict=False):
            out = buffer[: len(rows)]
            if run is not None:
                np.copyto(out, array[run])
            else:
                # Unlike "raise", "clip" needs no intermediate buffer.
                np.take(array, rows, axis=0, out=out, mode="clip")
            n_gathered += out.nbytes
        return n_gathered

    rates = []
    with ThreadPoolExecutor(n_threads) as executor:
        for _ in range(_REPEATS):
            remaining = iter(given)
            begin = time.perf_counter()
            n_gathered = sum(executor.map(gather, buffers))
            rates.append(n_gathered / (time.perf_counter() - begin) / 1e9)
    return max(rates)


def read_rate(path: Path, n_threads: int) -> float:
    """Return the rate of reading a file in pieces into page-aligned buffers."""
    nbytes = path.stat().st_size
    pieces = itertools.count()

    def read() -> None:
        buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(2)]
        while (offset := next(pieces) * PIECE_BYTES) < nbytes:
            os.preadv(file.fileno(), [buffers[offset // PIECE_BYTES % 2]], offset)

    with path.open("rb") as file, ThreadPoolExecutor(n_threads) as executor:
        begin = time.perf_counter()
        for future in [executor.submit(read) for _ in range(n_threads)]:
            future.result()
        return nbytes / (time.perf_counter() - begin) / 1e9


def populate_rate(path: Path) -> float:
    """Return the rate of reading a file through a memory map; 0 if the kernel cannot populate it.

    The advice for huge pages makes the kernel read ahead in large pieces, which can be faster than
    any number of threads that call pread.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        advise_huge_pages(mapping)
        begin = time.perf_counter()
        for offset in range(0, nbytes, _POPULATE_BYTES):
            try:
                mapping.madvise(POPULATE_READ, offset, min(_POPULATE_BYTES, nbytes - offset))
            except OSError:
                return 0.0
        return nbytes / (time.perf_counter() - begin) / 1e9


def cold_rate(path: Path) -> float:
    """Return the rate of reading a file from disk in sequence, in the fastest of three ways."""
    rates = []
    for read in (
        lambda: read_rate(path, 1),
        lambda: read_rate(path, 4),
        lambda: populate_rate(path),
    ):
        drop([path])
        touch_memory(round(_TOUCHED * path.stat().st_size))
        rates.append(read())
    return max(rates)


def measure(path: Path, kind: Kind, orders: Sequence[str]) -> dict[str, Any]:
    """Return all ceilings in GB/s, and the seconds of a step alone."""
    tasks = [Task.make(path, kind, order, 1, cold=False) for order in orders]
    read_through([path])
    touch_memory(1 << 28)
    rates = {
        f"gather, {task.order}": gather_rate(path, [np.r_[rows] for rows in task.epochs[0]])
        for task in tasks
    }
    rates["sequential, cold"] = cold_rate(path)
    torch.set_num_threads(1)
    return rates | {"step_s": ComputingStep(kind.n_products).alone_s()}
