"""Conditions of a measurement: the page cache, the memory of the process, and a training step.

Every loader that is timed begins with the same conditions.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.pages import PAGE, huge
from pinfeed.stores.page_cache import cached_pages, can_tell

AnyPath = str | os.PathLike[str]

PIECE_BYTES = 4 << 20
# Bytes that one call looks at.
_LOOK_BYTES = 1 << 30
_TOUCHED_BYTES = 64 << 20
_KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}
# Width of the square matrices of a training step.
_WIDTH = 256
_N_TIMED = 40


def cached_share(paths: Iterable[AnyPath], stop: int | None = None) -> float | None:
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
        with open(path, "rb") as file:
            descriptor = file.fileno()
            if not can_tell(descriptor):
                return None
            end = min(os.fstat(descriptor).st_size, stop or 1 << 63)
            for begin in range(0, end, _LOOK_BYTES):
                pages = cached_pages(descriptor, begin, min(begin + _LOOK_BYTES, end))
                n_cached += int(pages.sum())
                n_pages += len(pages)
    return n_cached / n_pages if n_pages else 1.0


def drop(paths: Iterable[AnyPath], stop: int = 0) -> None:
    """Drop files from the page cache, if the kernel can; files on tmpfs stay.

    Args:
        paths: The files.
        stop: Bytes to drop from the beginning of each; 0 drops all.
    """
    paths = list(paths)
    for path in paths:
        with open(path, "rb") as file:
            # The kernel does not drop dirty pages.
            os.fsync(file)
    for _ in range(20):
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, stop, os.POSIX_FADV_DONTNEED)
        if cached_share(paths, stop or None) in (0, 1, None):
            # Everything was dropped, or nothing can be dropped, because the files are on tmpfs.
            return
        # The kernel skips pages that are in use at the moment.
        time.sleep(0.05)


def read_through(paths: Iterable[AnyPath], seconds: float = math.inf) -> bool:
    """Read files into the page cache; return whether that took less than ``seconds``."""
    buffer = bytearray(PIECE_BYTES)
    deadline = time.perf_counter() + seconds
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                if time.perf_counter() > deadline:
                    return False
    return True


def touch_memory(nbytes: int, seconds: float = math.inf) -> None:
    """Write to free memory and free it again, immediately before a measurement.

    Many virtual machines return idle memory to their host. The first use of such memory takes
    seconds per GiB, and would count as the time of a loader. The function touches at most half of
    the free memory.

    Args:
        nbytes: Bytes that the measurement will need, page cache included.
        seconds: Time after which to stop.
    """
    deadline = time.perf_counter() + seconds
    left = min(nbytes, free_host_bytes() // 2)
    # All pieces are kept until the end, because freed memory would be reused.
    pieces = []
    while left > 0 and time.perf_counter() < deadline:
        piece = huge(min(left, _TOUCHED_BYTES))
        piece[::PAGE] = 1
        pieces.append(piece)
        left -= piece.nbytes


def memory_by_kind() -> dict[str, int]:
    """Return the resident bytes of this process and its worker processes, by kind.

    The kinds are ``anonymous`` (memory of their own), ``file`` (mapped pages of files, which the
    kernel may drop) and ``shared`` (shared memory). Pages that several processes have mapped are
    divided among them, so that sums over processes count them once.

    Returns:
        Bytes of each kind; empty if the kernel does not report them.
    """
    found: dict[str, int] = {}
    children = [child.pid for child in multiprocessing.active_children()]
    for pid in (os.getpid(), *children):
        # A worker may have ended, and other systems than Linux have no such file.
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            for key, kilobytes in re.findall(r"^(Pss_\w+):\s+(\d+) kB", text, re.MULTILINE):
                if key in _KINDS:
                    found[_KINDS[key]] = found.get(_KINDS[key], 0) + int(kilobytes) * 1024
    return found


class ComputingStep:
    """Matrix products that do not use the data, so that the work is the same for every loader.

    On the CPU, they run on as many threads as torch has.

    Args:
        n_products: Number of products of a step.
        device: Name of the torch device that computes them.
    """

    def __init__(self, n_products: int, device: str = "cpu") -> None:
        self.n_products = n_products
        self._left = torch.ones((_WIDTH, _WIDTH), device=device)
        self._out = torch.empty((_WIDTH, _WIDTH), device=device)

    @classmethod
    def lasting(cls, seconds: float, device: str = "cpu") -> ComputingStep:
        """Return a step that takes about this many seconds on an idle machine."""
        n_products = round(seconds / cls(1, device).alone_s())
        return cls(max(1, n_products), device)

    def __call__(self) -> None:
        """Compute the products, and wait until they are complete."""
        for _ in range(self.n_products):
            torch.mm(self._left, self._left, out=self._out)
        if self._out.is_cuda:
            torch.cuda.synchronize(self._out.device)

    def alone_s(self) -> float:
        """Return the seconds of a step without a loader, the median of several."""
        self()
        return statistics.median(self._seconds() for _ in range(_N_TIMED))

    def _seconds(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin
