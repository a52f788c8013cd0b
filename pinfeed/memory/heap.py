"""trim_heap(): returns freed memory that malloc keeps to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Return the freed memory of all threads to the system.

    glibc keeps freed blocks of up to 32 MiB in the heap of the thread that allocated them. With
    other C libraries, this function does nothing.
    """
    # Only glibc has malloc_trim(3).
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
