"""What a machine does at best, with no loader around it: copies in memory, reads of a file, the way to a GPU. In GB/s, 1e9 bytes."""

from __future__ import annotations

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

if TYPE_CHECKING:
    import torch

_COPIED_BYTES, _MEMORY_BYTES = 1 << 30, 512 << 20
_REPEATS = 3


def copy_rates(ring: Sequence[torch.Tensor], nbytes: int = _COPIED_BYTES) -> dict[str, float]:
    """Copies between the buffers of a ring, of ``nbytes`` in all."""
    pairs = list(
        itertools.islice(
            itertools.pairwise(itertools.cycle(ring)), max(8, nbytes // ring[0].nbytes)
        )
    )
    total = len(pairs) * ring[0].nbytes / 1e9
    return {
        "torch, all threads": total / seconds_of(lambda: [a.copy_(b) for a, b in pairs]),
        "numpy": total
        / seconds_of(lambda: [b.numpy().__setitem__(..., a.numpy()) for a, b in pairs]),
    }


def memory_rate() -> float:
    """GB/s of copies between buffers that together no cache holds."""
    import torch

    return max(
        copy_rates(
            [torch.ones(8 << 20, dtype=torch.float32) for _ in range(4)], _MEMORY_BYTES
        ).values()
    )


def sequential_rate(
    path: Path,
    n_threads: int,
    *,
    stop: int | None = None,
    behind: bool = False,
    seconds: float = math.inf,
) -> float:
    """A file, or its first ``stop`` bytes, read in sequence: in pieces, into a small ring of page-aligned buffers.

    Args:
        path: The file.
        n_threads: Pieces that are read at a time.
        stop: Where to stop.
        behind: Drop from the page cache what was read.
        seconds: When to stop at the latest.
    """
    with opened(path) as descriptor, ThreadPoolExecutor(n_threads) as executor:
        size, pieces = min(os.fstat(descriptor).st_size, stop or 1 << 63), itertools.count()
        deadline = time.perf_counter() + seconds

        def read() -> int:
            buffers, n_read = [mmap.mmap(-1, PIECE_BYTES) for _ in range(2)], 0
            while (offset := next(pieces) * PIECE_BYTES) < size and time.perf_counter() < deadline:
                n_read += os.preadv(descriptor, [buffers[offset // PIECE_BYTES % 2]], offset)
                if behind:
                    os.posix_fadvise(descriptor, offset, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
            return n_read

        begin = time.perf_counter()
        n_read = sum(
            future.result() for future in [executor.submit(read) for _ in range(n_threads)]
        )
        return n_read / (time.perf_counter() - begin) / 1e9


def random_rate(
    path: Path,
    start: int,
    row_nbytes: int,
    batches: Iterable[Any],
    n_threads: int,
    *,
    seconds: float,
) -> float:
    """Rows of a file in random order, a pread each; the rows of a batch are sorted and dealt out to the threads in slices.

    With native AIO in each thread in place of a pread per row, it was the same: the disk is what is
    waited for.

    Args:
        path: The file.
        start: Where its first row is.
        row_nbytes: Bytes of a row.
        batches: Row numbers of each batch.
        n_threads: Rows that are read at a time.
        seconds: When to stop.
    """
    n_rows, deadline = 0, time.perf_counter() + seconds
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
    """One block to a GPU and back, from page-locked memory and from ordinary memory, which the driver copies to such memory first."""
    import torch

    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = (
            torch.ones(nbytes, dtype=torch.uint8).pin_memory()
            if pinned
            else torch.ones(nbytes, dtype=torch.uint8)
        )
        for way, (target, source) in {"to_device": (there, host), "to_host": (host, there)}.items():

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(device)

            # What a first copy needs.
            copy()
            rates[f"{way}_{kind}"] = nbytes / min(seconds_of(copy) for _ in range(_REPEATS)) / 1e9
    return rates


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
