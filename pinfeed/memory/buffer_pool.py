"""BufferPool: blocks of host memory that return to their pool after the last array on them dies.

A new block costs a page fault per 4 KiB. A loop that drops its batches reuses the same few blocks,
and a kept batch keeps its block.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from pinfeed.memory.mapping import PAGE, Block, Bytes, Lease, anonymous


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
        # A deque without a lock, because its operations are atomic and a finalizer may interrupt
        # any code, including take(). If the deque is full, a block that is added at one end
        # replaces the block at the other end.
        self._free: deque[Block] = deque(maxlen=n_spare)
        # The blocks in use, each with a weak reference that reports when the block is free. A
        # training loop does this for every batch, and it takes half the time of weakref.finalize.
        self._leased: dict[int, tuple[weakref.ref[Lease], Block]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Return memory with old contents, shape (nbytes,).

        It belongs to the caller until the last array on it dies.
        """
        # Most batches take a block of the same size as the block that was freed last.
        try:
            block: Block | None = self._free.pop()
        except IndexError:
            block = None
        # A block has at least one page.
        if block is None or not 0 <= block.nbytes - (nbytes or 1) < PAGE:
            block = self._other(block, nbytes)
        lease = Lease()
        lease.block = block
        lease.__array_interface__ = block.interface
        reference = weakref.ref(lease, self._give)
        self._leased[id(reference)] = reference, block
        return np.asarray(lease)[:nbytes]

    def close(self) -> None:
        """Unmap the free blocks; those in use are unmapped when their last array dies."""
        self._free = deque(maxlen=0)

    def _other(self, unfit: Block | None, nbytes: int) -> Block:
        """Take a free block with the number of pages for ``nbytes``, or make one.

        Args:
            unfit: Free block of another size, if there was one.
            nbytes: Bytes that are needed.
        """
        free = self._free
        if unfit is not None:
            free.appendleft(unfit)
            # If another thread takes the last block, there is none.
            with contextlib.suppress(IndexError):
                for _ in range(len(free) - 1):
                    block = free.pop()
                    if 0 <= block.nbytes - (nbytes or 1) < PAGE:
                        return block
                    free.appendleft(block)
        return Block(self._make(nbytes))

    def _give(self, reference: weakref.ref[Lease]) -> None:
        # If an array dies late while the interpreter exits, the names of this module may be gone.
        self._free.append(self._leased.pop(id(reference))[1])
