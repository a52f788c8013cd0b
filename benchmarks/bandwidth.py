"""The best rates of a machine without a loader: gathers from memory and reads of files.

All rates are in GB/s, 1e9 bytes per second.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.conditions import PIECE_BYTES, AnyPath, drop, touch_memory
from pinfeed.memory.pages import POPULATE_READ, advise_huge_pages
from pinfeed.stores.store import run_of

_REPEATS = 3
# Bytes of a memory map that are read at a time: several huge pages.
_POPULATE_BYTES = 8 << 20
# Threads that gather, and reused buffers of each.
_MOST_THREADS = 4
_N_BUFFERS = 2
# Longest time of touching memory before a read.
_TOUCH_S = 5.0


def gather_rate(path: AnyPath, batches: Iterable[Any], seconds: float = math.inf) -> float:
    """Return the rate of gathering rows from the page cache into reused buffers.

    A thread for each core, four at most, gathers from a memory map with its page tables filled.

    Args:
        path: A .npy file in the page cache.
        batches: Row indices of each batch, of equal lengths; consecutive ones are copied as a run.
        seconds: Time after which to stop.
    """
    array = _populated(path)
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
            if time.perf_counter() - begin > seconds:
                break
        return n_gathered

    rates = []
    with ThreadPoolExecutor(n_threads) as executor:
        for _ in range(_REPEATS):
            remaining = iter(given)
            begin = time.perf_counter()
            n_gathered = sum(executor.map(gather, buffers))
            rates.append(n_gathered / (time.perf_counter() - begin) / 1e9)
    return max(rates)


def _populated(path: AnyPath) -> np.ndarray:
    """Map a .npy file that is in the page cache, with its page tables filled."""
    # Mode "c" reads as mode "r" does, but torch accepts it without a warning.
    array: np.ndarray = np.load(path, mmap_mode="c")
    mapping = getattr(array, "_mmap", None)
    if mapping is None:
        raise TypeError(f"{path} is not mapped")
    advise_huge_pages(mapping)
    # An older kernel does not populate maps. Then, the first pass over the rows does it.
    with contextlib.suppress(OSError):
        mapping.madvise(POPULATE_READ)
    return array.view(np.ndarray)


def sequential_rates(
    path: AnyPath, *, touched: int = 0, stop: int | None = None, seconds: float = math.inf
) -> dict[str, float]:
    """Return the rates of reading a file in sequence from disk, by the way of reading.

    Before each way, the file is dropped from the page cache.

    Args:
        path: The file.
        touched: Bytes of memory to touch before each way.
        stop: Bytes to read from the beginning; None reads the whole file.
        seconds: Time after which to stop, for each way.
    """
    nbytes = min(os.path.getsize(path), stop or 1 << 63)

    def cold(read: Callable[[], float]) -> float:
        drop([path], stop or 0)
        touch_memory(touched, _TOUCH_S)
        return read()

    rates = {
        f"pread, {n} threads": cold(functools.partial(_pread_rate, path, n, nbytes, seconds))
        for n in (1, 4)
    }
    # A kernel before 5.14 cannot populate a memory map.
    with contextlib.suppress(OSError):
        rates["populated map"] = cold(functools.partial(_populate_rate, path, nbytes, seconds))
    return rates


def _pread_rate(path: AnyPath, n_threads: int, nbytes: int, seconds: float) -> float:
    """Return the rate of reading pieces of a file into page-aligned buffers."""
    pieces = itertools.count()

    def read() -> int:
        buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(2)]
        n_read = 0
        while (offset := next(pieces) * PIECE_BYTES) < nbytes and time.perf_counter() < deadline:
            n_read += os.preadv(file.fileno(), [buffers[offset // PIECE_BYTES % 2]], offset)
        return n_read

    with open(path, "rb") as file, ThreadPoolExecutor(n_threads) as executor:
        begin = time.perf_counter()
        deadline = begin + seconds
        futures = [executor.submit(read) for _ in range(n_threads)]
        n_read = sum(future.result() for future in futures)
        return n_read / (time.perf_counter() - begin) / 1e9


def _populate_rate(path: AnyPath, nbytes: int, seconds: float) -> float:
    """Return the rate of reading a file through a memory map.

    The advice for huge pages makes the kernel read ahead in large pieces, which can be faster than
    any number of threads that call pread.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapping,
    ):
        advise_huge_pages(mapping)
        begin = time.perf_counter()
        for offset in range(0, nbytes, _POPULATE_BYTES):
            end = min(offset + _POPULATE_BYTES, nbytes)
            mapping.madvise(POPULATE_READ, offset, end - offset)
            if (elapsed := time.perf_counter() - begin) > seconds:
                break
        return end / elapsed / 1e9


def random_rate(
    path: AnyPath,
    start: int,
    row_nbytes: int,
    batches: Iterable[Any],
    n_threads: int,
    *,
    seconds: float,
) -> float:
    """Return the rate of reading rows of a file in random order, with one pread per row.

    The rows of a batch are sorted, and each thread reads a slice of them.

    Args:
        path: The file.
        start: Offset of its first row, in bytes.
        row_nbytes: Bytes of a row.
        batches: Row indices of each batch.
        n_threads: Rows that are read at a time.
        seconds: Time after which to stop.
    """
    n_rows = 0

    def read(rows: list[int]) -> int:
        buffer = mmap.mmap(-1, row_nbytes)
        for done, row in enumerate(rows, 1):
            os.preadv(file.fileno(), [buffer], start + row * row_nbytes)
            if time.perf_counter() > deadline:
                return done
        return len(rows)

    with open(path, "rb") as file, ThreadPoolExecutor(n_threads) as executor:
        begin = time.perf_counter()
        deadline = begin + seconds
        for batch in batches:
            parts = [part.tolist() for part in np.array_split(np.sort(batch), n_threads)]
            n_rows += sum(executor.map(read, parts))
            if time.perf_counter() > deadline:
                break
        return n_rows * row_nbytes / (time.perf_counter() - begin) / 1e9
