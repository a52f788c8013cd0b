"""What a file leaves in the page cache while it is streamed."""

from __future__ import annotations

import os

import numpy as np

_PROBE = 1 << 20  # the cache is looked at in steps of this size
_SWEEP = 32 << 20  # so much is read between two sweeps
_MARGIN = 16 << 20  # around the read that sweeps: what the kernel reads ahead, and what other threads are reading


class PageCache:
    """The page cache of one open file. A file that is not kept there leaves it as it was found.

    What was cached before the file was opened stays; what streaming brought in is dropped, in sweeps: page by page behind the reader would
    miss the large folios that lie across the border.

    Args:
        fd: Its descriptor; the owner's.
        size: Its size in bytes.
        keep: Leave what was read in the page cache.
    """

    def __init__(self, fd: int, size: int, *, keep: bool) -> None:
        self._fd, self._keep, self._unswept = fd, keep, 0
        self._ours = [] if keep else _uncached(fd, size)

    def used(self, begin: int, nbytes: int) -> None:
        """The ``nbytes`` from byte ``begin`` on, or as many elsewhere, were read. Any thread; a race costs a sweep, or delays one."""
        if self._keep:
            return
        self._unswept += nbytes
        if self._unswept > _SWEEP:
            self._unswept = 0
            for start, stop in self._ours:
                self._drop(start, min(stop, begin - _MARGIN))
                self._drop(max(start, begin + nbytes + _MARGIN), stop)

    def leave(self) -> None:
        """Nothing more is read."""
        for start, stop in self._ours:
            self._drop(start, stop)

    def _drop(self, start: int, stop: int) -> None:
        if start < stop:
            os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def _uncached(fd: int, size: int) -> list[tuple[int, int]]:
    """The stretches of a file, in bytes, that are not in the page cache."""
    byte = bytearray(1)

    def is_cached(offset: int) -> bool:
        try:
            return os.preadv(fd, [byte], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not there; EOPNOTSUPP: the file system cannot tell
            return False

    cached = [is_cached(min(offset + _PROBE // 2, size - 1)) for offset in range(0, size, _PROBE)]
    edges = np.flatnonzero(np.diff([True, *cached, True]))
    return [(int(start) * _PROBE, min(int(stop) * _PROBE, size)) for start, stop in edges.reshape(-1, 2)]
