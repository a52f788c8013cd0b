"""Memory mappings for rows, which end after their last array dies, and a pool that reuses them.

``malloc`` guarantees neither the alignment nor the size, nor that freed memory leaves the process.
A new block costs a page fault per 4 KiB. A loop that drops its batches reuses the same few blocks
of a BufferPool, and a kept batch keeps its block.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

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


class _Block(NamedTuple):
    """A block of memory."""

    memory: Bytes
    nbytes: int
    interface: dict[str, Any]
    """The ``__array_interface__`` of the memory, from which numpy makes arrays.

    numpy creates a new dict on each access, which takes longer than creating an array.
    """


class _Loan(weakref.ref[Lease]):
    """The weak reference to a lease that returns its block; the lease keeps it."""

    __slots__ = ("block",)

    block: _Block


_NO_BLOCK = (IndexError, AttributeError)
"""Errors if there is no free block.

Another thread has taken it, or an interrupt cut ``take`` off before it had given it to its loan.
"""


class BufferPool:
    """Blocks of memory for reuse.

    ``take`` may be called, and an array may die, in any thread.

    Args:
        n_spare: Number of free blocks to keep, of any size; if there are more, the pool unmaps the
            block that was free for longest.
        make: Returns new memory of at least the requested number of bytes.
    """

    def __init__(self, n_spare: int, make: Callable[[int], Bytes] = anonymous) -> None:
        self._make = make
        # The free blocks, in a deque without a lock, because its operations are atomic. When an
        # array dies, the reference to its lease calls ``append``. This single C function can
        # interrupt any code, including take(), and loses no signal, unlike a function in Python,
        # whose errors the interpreter drops. If the deque is full, a block that is added at one end
        # replaces the block at the other end.
        self._free: deque[_Loan] = deque(maxlen=n_spare)
        self._give = self._free.append
        weakref.finalize(self, _keep_nothing, self._free).atexit = False

    def take(self, nbytes: int) -> Bytes:
        """Return memory with old contents, shape (nbytes,).

        It belongs to the caller until the last array on it dies.
        """
        # Most batches take a block of the same size as the block that was freed last.
        found: _Loan | None
        block: _Block | None
        try:
            found = self._free.pop()
            block = found.block
        except _NO_BLOCK:
            found = block = None
        # A block has at least one page.
        if block is None or not 0 <= block.nbytes - (nbytes or 1) < PAGE:
            block = self._other(found, nbytes)
        lease = Lease()
        loan = _Loan(lease, self._give)
        loan.block = block
        lease.owner = loan
        lease.__array_interface__ = block.interface
        return np.asarray(lease)[:nbytes]

    def close(self) -> None:
        """Unmap the free blocks; those in use are unmapped when their last array dies."""
        _keep_nothing(self._free)

    def _other(self, unfit: _Loan | None, nbytes: int) -> _Block:
        """Take a free block with the number of pages for ``nbytes``, or make one.

        Args:
            unfit: Free block of another size, if there was one.
            nbytes: Bytes that are needed.
        """
        free = self._free
        if unfit is not None:
            free.appendleft(unfit)
            with contextlib.suppress(*_NO_BLOCK):
                for _ in range(len(free) - 1):
                    found = free.pop()
                    if 0 <= found.block.nbytes - (nbytes or 1) < PAGE:
                        return found.block
                    free.appendleft(found)
        memory = self._make(nbytes)
        return _Block(memory, len(memory), memory.__array_interface__)


def _keep_nothing(free: deque[_Loan]) -> None:
    """Drop the free blocks, and those that are added later. Arrays may hold the deque longer."""
    deque.__init__(free, (), 0)
