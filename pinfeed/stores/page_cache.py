"""PageCache: the pages of a file that the kernel keeps in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

# Bytes of a step: a step with a cached page counts as cached.
_STEP_BYTES = 1 << 20
# Bytes of a file that are mapped at a time to look at their pages.
_MAP_BYTES = 1 << 30
# Bytes that are read between two sweeps.
_SWEEP_BYTES = 32 << 20
# Largest unit of the page cache (a folio), and its alignment, in bytes.
_FOLIO_BYTES = 2 << 20
# Bytes around the last read that a sweep keeps, because other threads are reading there.
_MARGIN_BYTES = 16 << 20


class PageCache:
    """Page cache of one open file, which can be restored to its earlier state.

    Pages that were cached before the file was opened stay. Sweeps drop pages that streaming has
    added. A sweep ends at the border of a folio, because the kernel cannot drop a part of a folio,
    and waits for all processors before it gives up.

    Args:
        fd: Descriptor of the file, which belongs to the caller.
        size: Size of the file, in bytes.
        keep: Whether data that was read stays in the page cache; if so, nothing is dropped.
    """

    def __init__(self, fd: int, size: int, *, keep: bool) -> None:
        self._fd = fd
        self._size = size
        self._keep = keep
        self._n_unswept_bytes = 0
        self._uncached = [] if keep else _uncached_ranges(fd, size)
        if not keep:
            # Otherwise, the kernel mistakes rows that are already cached for a sequential read, and
            # reads far ahead.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def add_read(self, begin: int, nbytes: int) -> None:
        """Count bytes that were read from ``begin`` on, and sweep if enough were read.

        Any thread may call it; a race delays a sweep, or adds one.
        """
        if self._keep:
            return
        self._n_unswept_bytes += nbytes
        if self._n_unswept_bytes > _SWEEP_BYTES:
            self._n_unswept_bytes = 0
            before = (begin - _MARGIN_BYTES) // _FOLIO_BYTES * _FOLIO_BYTES
            after = -(-(begin + nbytes + _MARGIN_BYTES) // _FOLIO_BYTES) * _FOLIO_BYTES
            self._drop(0, before)
            self._drop(after, self._size)

    def drop_all(self) -> None:
        """Drop all pages that were added, because nothing more is read."""
        if not self._keep:
            self._drop(0, self._size)

    def _drop(self, begin: int, end: int) -> None:
        """Drop the bytes [begin, end), except those that were cached before."""
        for start, stop in self._uncached:
            first = max(start, begin)
            last = min(stop, end)
            if first < last:
                os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)


def cached_pages(fd: int, begin: int, end: int) -> Mask:
    """Return which pages of the bytes [begin, end) of a file are in the page cache.

    A read with RWF_NOWAIT would also show this, but it loads the page that it requests. The kernel
    answers only users who own the file or may write it; for other users, no page counts as cached.

    Args:
        fd: Descriptor of the file.
        begin: First byte, a multiple of ``mmap.ALLOCATIONGRANULARITY``.
        end: Position after the last byte.
    """
    pages = np.zeros(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
    if len(pages) and can_tell(fd):
        with contextlib.closing(
            mmap.mmap(fd, end - begin, prot=mmap.PROT_READ, offset=begin)
        ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            ctypes.CDLL(None).mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(end - begin),
                ctypes.c_void_p(pages.ctypes.data),
            )
    return (pages & 1).astype(np.bool_)


def can_tell(fd: int) -> bool:
    """Return whether the kernel reports to this process which pages of the file are cached."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


def _uncached_ranges(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a file, in bytes, that have no page in the page cache."""
    ranges: list[tuple[int, int]] = []
    for begin in range(0, size, _MAP_BYTES):
        pages = cached_pages(fd, begin, min(begin + _MAP_BYTES, size))
        first_pages = np.arange(0, len(pages), _STEP_BYTES // mmap.PAGESIZE)
        is_cached = np.add.reduceat(pages, first_pages, dtype=np.intp) > 0
        # Steps at which an uncached range begins or ends.
        borders = np.flatnonzero(np.diff(np.concatenate(([True], is_cached, [True]))))
        edges = begin + _STEP_BYTES * borders
        ranges += [(start, min(stop, size)) for start, stop in edges.reshape(-1, 2).tolist()]
    return ranges
