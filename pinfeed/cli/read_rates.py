"""ReadRates: how fast the beginning of a file is read from the disk and from the page cache."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pinfeed.stores.page_cache import cached_pages, can_tell

_SPAN_BYTES = 128 << 20
_PIECE_BYTES = 4 << 20
_N_THREADS = 4
# Longest time of each measurement.
_SECONDS = 0.5


@dataclass(frozen=True)
class ReadRates:
    """Rates of reading a file in sequence, in bytes per second.

    Attributes:
        nbytes: Bytes at the beginning of the file that were read.
        cold: Rate of reads from the disk; None if the kernel keeps the file in memory, or does not
            report whether it does.
        warm: Rate of reads from the page cache.
        cached: Share of these bytes that was in the page cache before; None if unknown.
    """

    nbytes: int
    cold: float | None
    warm: float
    cached: float | None

    @classmethod
    def measured(cls, path: str) -> ReadRates | None:
        """Measure a file in about a second; None for a folder, and for a small file.

        The beginning of the file is dropped from the page cache first, and in the end again if it
        was not there before.
        """
        if not os.path.isfile(path) or os.path.getsize(path) < _PIECE_BYTES:
            return None
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            span = min(os.path.getsize(path), _SPAN_BYTES)
            before = _cached(fd, span)
            # The kernel does not drop pages that are not on the disk yet.
            os.fsync(fd)
            _drop(fd, span)
            is_cold = _cached(fd, span) == 0
            span, cold = _read(fd, span)
            _, warm = _read(fd, span)
            if before == 0:
                _drop(fd, _SPAN_BYTES)
        return cls(span, cold if is_cold else None, warm, before)


def _cached(fd: int, nbytes: int) -> float | None:
    """Return the share of the first bytes of a file that is in the page cache; None if unknown."""
    return float(cached_pages(fd, 0, nbytes).mean()) if can_tell(fd) else None


def _drop(fd: int, nbytes: int) -> None:
    os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)


def _read(fd: int, nbytes: int) -> tuple[int, float]:
    """Read the first bytes of a file; return how many were read in time, and the rate."""
    pieces = itertools.count()
    begin = time.perf_counter()

    def read() -> int:
        n_read = 0
        with mmap.mmap(-1, _PIECE_BYTES) as buffer:
            while (offset := next(pieces) * _PIECE_BYTES) < nbytes:
                n_read += os.preadv(fd, [buffer], offset)
                if time.perf_counter() - begin > _SECONDS:
                    break
        return n_read

    with ThreadPoolExecutor(_N_THREADS) as executor:
        n_read = sum(future.result() for future in [executor.submit(read) for _ in range(4)])
    return n_read, n_read / (time.perf_counter() - begin)
