"""Files in and out of the page cache, so that it is known what a measurement read."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator

from pinfeed.stores.disk.page_cache import cached_pages, can_tell

Path = str | os.PathLike[str]

PIECE_BYTES = 4 << 20
# Looked at in one call.
_LOOK_BYTES = 1 << 30


def cached_share(paths: Iterable[Path], stop: int | None = None) -> float | None:
    """Share of files, or of the first ``stop`` bytes of each, that is in the page cache; None where the kernel does not tell."""
    n_cached = n_pages = 0
    for path in paths:
        with opened(path) as descriptor:
            if not can_tell(descriptor):
                return None
            end = min(os.fstat(descriptor).st_size, stop or 1 << 63)
            for begin in range(0, end, _LOOK_BYTES):
                pages = cached_pages(descriptor, begin, min(begin + _LOOK_BYTES, end))
                n_cached, n_pages = n_cached + int(pages.sum()), n_pages + len(pages)
    return n_cached / n_pages if n_pages else 1.0


def drop(paths: Iterable[Path], stop: int = 0) -> None:
    """Drop files, or the first ``stop`` bytes of each, from the page cache, as far as the kernel can: what is not on a disk stays."""
    paths = list(paths)
    for path in paths:
        with opened(path) as descriptor:
            # Dirty pages could not be dropped.
            os.fsync(descriptor)
    for _ in range(20):
        for path in paths:
            with opened(path) as descriptor:
                os.posix_fadvise(descriptor, 0, stop, os.POSIX_FADV_DONTNEED)
        if cached_share(paths, stop or None) in (0, 1, None):
            # All of it has gone, or nothing can be dropped: it is in memory itself.
            return
        # A page that somebody is just using is passed over.
        time.sleep(0.05)


def read_through(paths: Iterable[Path], seconds: float = math.inf) -> bool:
    """Bring files into the page cache; whether that was done in time."""
    buffer, deadline = bytearray(PIECE_BYTES), time.perf_counter() + seconds
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                if time.perf_counter() > deadline:
                    return False
    return True


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read from."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
