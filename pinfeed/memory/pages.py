"""Memory mappings for rows: page-aligned, of exact size, and freed after their last array dies.

``malloc`` guarantees neither the alignment nor the size, nor that freed memory leaves the process.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
POPULATE_READ = 22
"""MADV_POPULATE_READ of linux/mman.h, which Linux has since 5.14."""


def block_nbytes(nbytes: int) -> int:
    """Return the size of a mapping for ``nbytes``: whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE


def anonymous(nbytes: int) -> Bytes:
    """Return zero-filled memory in a new mapping, shape (block_nbytes(nbytes),).

    Raises:
        MemoryError: If the system does not have so much memory.
    """
    return np.frombuffer(map_memory(nbytes), np.uint8)


def huge(nbytes: int) -> Bytes:
    """Return memory as ``anonymous`` does, in huge pages if the system has them.

    Random gathers from pages of 4 KiB wait for the page tables.

    Raises:
        MemoryError: If the system does not have so much memory.
    """
    mapping = map_memory(nbytes)
    advise_huge_pages(mapping)
    return np.frombuffer(mapping, np.uint8)


def map_memory(nbytes: int) -> mmap.mmap:
    """Map zero-filled memory of at least ``nbytes``.

    Raises:
        MemoryError: If the system does not have so much memory.
    """
    try:
        return mmap.mmap(-1, block_nbytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        # An OverflowError says that this many bytes exceed the address space.
        reason = getattr(error, "strerror", error)
        raise MemoryError(
            f"the system cannot allocate {nbytes} bytes for rows ({reason}); use smaller batches, "
            "or free memory"
        ) from error


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask the kernel for huge pages, if it has them."""
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


class Lease:
    """The base of every array on a block of memory; the block is free when this object dies.

    Set ``owner`` and ``__array_interface__`` after making one. A constructor would be another call
    in Python for each batch.
    """

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    owner: object
    """The object that keeps the memory at the address of the interface."""
    __array_interface__: dict[str, Any]
    """The description of the memory from which numpy makes arrays."""
