"""Memory of this process: touched before a measurement, and counted by kind."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import time
from pathlib import Path

from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.pages import PAGE, huge

_PIECE_BYTES = 64 << 20
_KINDS = {"Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}


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
        piece = huge(min(left, _PIECE_BYTES))
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
