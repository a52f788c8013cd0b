"""Control of the page cache, so that a measurement knows whether it reads the disk or memory."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator

from pinfeed.stores.page_cache import cached_pages, can_tell

Path = str | os.PathLike[str]

PIECE_BYTES = 4 << 20
# Bytes that one call looks at.
_LOOK_BYTES = 1 << 30


def cached_share(paths: Iterable[Path], stop: int | None = None) -> float | None:
    """Return the share of files that is in the page cache.

    Args:
        paths: The files.
        stop: Bytes to look at from the beginning of each; None looks at all.

    Returns:
        A number from 0 to 1, or None if the kernel does not report it.
    """
    n_cached = 0
    n_pages = 0
    for path in paths:
        with opened(path) as descriptor:
            if not can_tell(descriptor):
                return None
            end = min(os.fstat(descriptor).st_size, stop or 1 << 63)
            for begin in range(0, end, _LOOK_BYTES):
                pages = cached_pages(descriptor, begin, min(begin + _LOOK_BYTES, end))
                n_cached += int(pages.sum())
                n_pages += len(pages)
    return n_cached / n_pages if n_pages else 1.0


def drop(paths: Iterable[Path], stop: int = 0) -> None:
    """Drop files from the page cache, if the kernel can; files on tmpfs stay.

    Args:
        paths: The files.
        stop: Bytes to drop from the beginning of each; 0 drops all.
    """
    paths = list(paths)
    for path in paths:
        with opened(path) as descriptor:
            # The kernel does not drop dirty pages.
            os.fsync(descriptor)
    for _ in range(20):
        for path in paths:
            with opened(path) as descriptor:
                os.posix_fadvise(descriptor, 0, stop, os.POSIX_FADV_DONTNEED)
        if cached_share(paths, stop or None) in (0, 1, None):
            # Everything was dropped, or nothing can be dropped, because the files are on tmpfs.
            return
        # The kernel skips pages that are in use at the moment.
        time.sleep(0.05)


def read_through(paths: Iterable[Path], seconds: float = math.inf) -> bool:
    """Read files into the page cache; return whether that took less than ``seconds``."""
    buffer = bytearray(PIECE_BYTES)
    deadline = time.perf_counter() + seconds
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                if time.perf_counter() > deadline:
                    return False
    return True


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading; yield its descriptor and close it in the end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
