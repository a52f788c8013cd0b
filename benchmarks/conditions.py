"""Conditions of a measurement: the page cache, the memory of processes, and a training step.

Every loader that is timed begins with the same conditions.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.pages import PAGE, huge
from pinfeed.stores.page_cache import cached_pages, can_tell

AnyPath = str | os.PathLike[str]

PIECE_BYTES = 4 << 20
_TOUCHED_BYTES = 64 << 20
_KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}
# Width of the square matrices of a training step.
_WIDTH = 256
_N_TIMED = 40


def cached_share(path: AnyPath) -> float | None:
    """Return the share of a file in the page cache, or None if the kernel does not report it."""
    with open(path, "rb") as file:
        if not can_tell(file.fileno()):
            return None
        pages = cached_pages(file.fileno(), 0, os.path.getsize(path))
        return float(pages.mean()) if len(pages) else 1.0


def drop(paths: Iterable[AnyPath]) -> float:
    """Drop files from the page cache, and return the largest share of one that stays there.

    Files on tmpfs stay.
    """
    stays = 0.0
    for path in paths:
        for _ in range(20):
            with open(path, "rb") as file:
                # The kernel does not drop dirty pages.
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached_share(path) or 0.0
            if share in (0, 1):
                # Everything was dropped, or nothing can be dropped.
                break
            # The kernel skips pages that are in use at the moment.
            time.sleep(0.05)
        stays = max(stays, share)
    return stays


def read_through(paths: Iterable[AnyPath]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(PIECE_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def touch_memory(nbytes: int) -> None:
    """Write to free memory and free it again, immediately before a measurement.

    Many virtual machines return idle memory to their host. The first use of such memory takes
    seconds per GiB, and would count as the time of a loader. The function touches at most half of
    the free memory.

    Args:
        nbytes: Bytes that the measurement will need, page cache included.
    """
    left = min(nbytes, free_host_bytes() // 2)
    # All pieces are kept until the end, because freed memory would be reused.
    pieces = []
    while left > 0:
        piece = huge(min(left, _TOUCHED_BYTES))
        piece[::PAGE] = 1
        pieces.append(piece)
        left -= piece.nbytes


def memory_by_kind(pid: int | None = None) -> dict[str, int]:
    """Return the resident bytes of a process and its worker processes, by kind.

    The kinds are ``anonymous`` (memory of their own), ``file`` (mapped pages of files, which the
    kernel may drop) and ``shared`` (shared memory). Pages that several processes have mapped are
    divided among them, so that sums over processes count them once.

    Args:
        pid: Number of the process; None for this one.
    """
    found = dict.fromkeys(_KINDS.values(), 0)
    # A process may have ended.
    with contextlib.suppress(OSError, psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
                for key, kilobytes in re.findall(r"^(Pss_\w+):\s+(\d+) kB", text, re.MULTILINE):
                    if key in _KINDS:
                        found[_KINDS[key]] += int(kilobytes) * 1024
    return found


class ComputingStep:
    """Matrix products that do not use the data, so that the work is the same for every loader.

    They run on as many threads as torch has.

    Args:
        n_products: Number of products of a step.
    """

    def __init__(self, n_products: int) -> None:
        self.n_products = n_products
        self._left = torch.ones((_WIDTH, _WIDTH))
        self._out = torch.empty((_WIDTH, _WIDTH))

    def __call__(self) -> None:
        """Compute the products."""
        for _ in range(self.n_products):
            torch.mm(self._left, self._left, out=self._out)

    def alone_s(self) -> float:
        """Return the seconds of a step without a loader, the median of several."""
        self()
        times = []
        for _ in range(_N_TIMED):
            begin = time.perf_counter()
            self()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
