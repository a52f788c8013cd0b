"""The best rates of a machine without a loader: copies, gathers, file reads, copies to a GPU.

All rates are in GB/s, 1e9 bytes per second.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from pinfeed.cli.measure.page_cache import PIECE_BYTES, Path, opened
from pinfeed.memory.mapping import POPULATE_READ, advise_huge_pages
from pinfeed.stores.store import run_of

if TYPE_CHECKING:
    import torch

_COPIED_BYTES = 1 << 30
_MEMORY_BYTES = 512 << 20
_REPEATS = 3
# Bytes of a memory map that are read at a time: several huge pages.
_POPULATE_BYTES = 8 << 20
# Reused buffers of each gathering thread.
_N_BUFFERS = 2


def copy_rates(ring: Sequence[torch.Tensor], nbytes: int = _COPIED_BYTES) -> dict[str, float]:
    """Return the rates of copies between the buffers of a ring, by library.

    Args:
        ring: Buffers of equal size, each of which is copied to the next.
        nbytes: Bytes to copy in all.
    """
    n_copies = max(8, nbytes // ring[0].nbytes)
    pairs = list(itertools.islice(itertools.pairwise(itertools.cycle(ring)), n_copies))
    total = len(pairs) * ring[0].nbytes / 1e9
    torch_s = seconds_of(lambda: [a.copy_(b) for a, b in pairs])
    numpy_s = seconds_of(lambda: [b.numpy().__setitem__(..., a.numpy()) for a, b in pairs])
    return {"torch, all threads": total / torch_s, "numpy": total / numpy_s}


def memory_rate() -> float:
    """Return the rate of copies between buffers that together exceed every cache."""
    import torch

    ring = [torch.ones(8 << 20, dtype=torch.float32) for _ in range(4)]
    return max(copy_rates(ring, _MEMORY_BYTES).values())


def sequential_rate(
    path: Path,
    n_threads: int,
    *,
    stop: int | None = None,
    behind: bool = False,
    seconds: float = math.inf,
) -> float:
    """Return the rate of reading a file in sequence, in pieces, into page-aligned buffers.

    Args:
        path: The file.
        n_threads: Pieces that are read at a time.
        stop: Bytes to read from the beginning; None reads the whole file.
        behind: Whether to drop data that was read from the page cache.
        seconds: Time after which to stop.
    """
    with opened(path) as descriptor, ThreadPoolExecutor(n_threads) as executor:
        size = min(os.fstat(descriptor).st_size, stop or 1 << 63)
        pieces = itertools.count()
        deadline = time.perf_counter() + seconds

        def read() -> int:
            buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(2)]
            n_read = 0
            while (offset := next(pieces) * PIECE_BYTES) < size and time.perf_counter() < deadline:
                n_read += os.preadv(descriptor, [buffers[offset // PIECE_BYTES % 2]], offset)
                if behind:
                    os.posix_fadvise(descriptor, offset, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
            return n_read

        begin = time.perf_counter()
        futures = [executor.submit(read) for _ in range(n_threads)]
        n_read = sum(future.result() for future in futures)
        return n_read / (time.perf_counter() - begin) / 1e9


def populate_rate(path: Path, *, stop: int | None = None, seconds: float = math.inf) -> float:
    """Return the rate of reading a file in sequence through a memory map.

    The advice for huge pages makes the kernel read ahead in large pieces, which can be faster than
    any number of threads that call pread.

    Args:
        path: The file.
        stop: Bytes to read from the beginning; None reads the whole file.
        seconds: Time after which to stop.

    Raises:
        OSError: If the kernel cannot populate a memory map; Linux can since 5.14.
    """
    with opened(path) as descriptor:
        size = min(os.fstat(descriptor).st_size, stop or 1 << 63)
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapping:
            advise_huge_pages(mapping)
            begin = time.perf_counter()
            for offset in range(0, size, _POPULATE_BYTES):
                nbytes = min(_POPULATE_BYTES, size - offset)
                mapping.madvise(POPULATE_READ, offset, nbytes)
                if (elapsed := time.perf_counter() - begin) > seconds:
                    break
            return (offset + nbytes) / elapsed / 1e9


def populated(path: Path) -> np.ndarray:
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


def gather_rate(
    array: np.ndarray, batches: Iterable[Any], n_threads: int, seconds: float = math.inf
) -> float:
    """Return the rate of gathering rows of an array into reused buffers.

    Args:
        array: The rows, in memory or in a memory map with its page tables filled.
        batches: Row indices of each batch, of equal lengths; consecutive ones are copied as a run.
        n_threads: Batches that are gathered at a time.
        seconds: Time after which to stop.
    """
    given = [(rows, run_of(rows)) for rows in batches]
    shape = (n_threads, _N_BUFFERS, len(given[0][0]), *array.shape[1:])
    buffers = np.ones(shape, array.dtype)
    remaining = iter(given)
    begin = time.perf_counter()

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

    with ThreadPoolExecutor(n_threads) as executor:
        n_gathered = sum(executor.map(gather, buffers))
        return n_gathered / (time.perf_counter() - begin) / 1e9


def random_rate(
    path: Path,
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
    deadline = time.perf_counter() + seconds
    with opened(path) as descriptor, ThreadPoolExecutor(n_threads) as executor:

        def read(rows: list[int]) -> int:
            buffer = mmap.mmap(-1, row_nbytes)
            for done, row in enumerate(rows):
                os.preadv(descriptor, [buffer], start + row * row_nbytes)
                if time.perf_counter() > deadline:
                    return done + 1
            return len(rows)

        begin = time.perf_counter()
        for batch in batches:
            parts = [part.tolist() for part in np.array_split(np.sort(batch), n_threads)]
            n_rows += sum(executor.map(read, parts))
            if time.perf_counter() > deadline:
                break
        return n_rows * row_nbytes / (time.perf_counter() - begin) / 1e9


def link_rates(device: Any, nbytes: int) -> dict[str, float]:
    """Return the rates of copies to a GPU and back, by direction and kind of host memory.

    The driver copies ordinary (pageable) memory to page-locked (pinned) memory first.

    Args:
        device: The GPU.
        nbytes: Bytes of a copy.
    """
    import torch

    on_gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = torch.ones(nbytes, dtype=torch.uint8)
        if pinned:
            host = host.pin_memory()
        ways = {"to_device": (on_gpu, host), "to_host": (host, on_gpu)}
        for way, (target, source) in ways.items():

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(device)

            # The first copy includes setup time, which is not measured.
            copy()
            rates[f"{way}_{kind}"] = nbytes / min(seconds_of(copy) for _ in range(_REPEATS)) / 1e9
    return rates


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a function takes, in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
