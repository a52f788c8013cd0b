"""What a file leaves in the page cache while it is streamed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

# The cache is looked at in steps, and so many bytes at a time.
_STEP, _LOOK = 1 << 20, 1 << 30
# So much is read between two sweeps.
_SWEEP = 32 << 20
# The largest unit of the page cache, and where it begins.
_FOLIO = 2 << 20
# Around the read that sweeps: what other threads are reading.
_MARGIN = 16 << 20


class PageCache:
    """The page cache of one open file. A file that is not kept there leaves it as it was found.

    What was cached before the file was opened stays; what streaming brought in is dropped, in
    sweeps that end between folios: one that lies across the end stays, and lets the kernel wait for
    all processors to be sure that it has to.

    Args:
        fd: Its descriptor; the owner's.
        size: Its size in bytes.
        keep: Leave what was read in the page cache.
    """

    def __init__(self, fd: int, size: int, *, keep: bool) -> None:
        self._fd = fd
        self._size = size
        self._keep = keep
        self._unswept = 0
        self._random = False
        self._ours = [] if keep else _uncached(fd, size)
        if not keep:
            # Else the kernel takes neighbours in the cache for a sequence, and reads ahead.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def at_random(self) -> None:
        """Rows are read in random order: the kernel would take those that are cached already for a sequence, and read far ahead."""
        if not self._keep and not self._random:
            self._random = True
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def used(self, begin: int, nbytes: int) -> None:
        """The bytes from ``begin`` on were read.

        Any thread; a race delays a sweep, or costs one.
        """
        if self._keep:
            return
        self._unswept += nbytes
        if self._unswept > _SWEEP:
            self._unswept = 0
            self._drop(0, (begin - _MARGIN) // _FOLIO * _FOLIO)
            self._drop(-(-(begin + nbytes + _MARGIN) // _FOLIO) * _FOLIO, self._size)

    def leave(self) -> None:
        """Nothing more is read."""
        if not self._keep:
            self._drop(0, self._size)

    def _drop(self, begin: int, end: int) -> None:
        """Drop what was not there before."""
        for start, stop in self._ours:
            if max(start, begin) < min(stop, end):
                os.posix_fadvise(
                    self._fd,
                    max(start, begin),
                    min(stop, end) - max(start, begin),
                    os.POSIX_FADV_DONTNEED,
                )


def cached_pages(fd: int, begin: int, end: int) -> Mask:
    """Which pages of bytes [begin, end) of a file are in the page cache; ``begin`` is a multiple of ``mmap.ALLOCATIONGRANULARITY``.

    A read that must not wait would tell as well, but brings in the page that it asks for. The
    kernel tells those only who own the file or may write it; for others, nothing counts as cached.
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
    """Whether the kernel tells this process what is in the page cache of the file."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


def _uncached(fd: int, size: int) -> list[tuple[int, int]]:
    """The stretches of a file, in bytes, no page of which is in the page cache."""
    stretches: list[tuple[int, int]] = []
    for begin in range(0, size, _LOOK):
        pages = cached_pages(fd, begin, min(begin + _LOOK, size))
        steps = (
            np.add.reduceat(pages, np.arange(0, len(pages), _STEP // mmap.PAGESIZE), dtype=np.intp)
            > 0
        )
        edges = begin + _STEP * np.flatnonzero(np.diff(np.concatenate(([True], steps, [True]))))
        stretches += [(start, min(stop, size)) for start, stop in edges.reshape(-1, 2).tolist()]
    return stretches
