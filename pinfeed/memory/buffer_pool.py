"""BufferPool: blocks of host memory that return to their pool after the last array on them dies.

A new block costs a page fault per 4 KiB. A loop that drops its batches reuses the same few blocks,
and a kept batch keeps its block.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pinfeed.memory.pages import PAGE, Bytes, Lease, anonymous


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
