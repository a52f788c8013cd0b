"""PinnedPool: blocks of pinned host memory under a hard limit, kept from step to step."""

from __future__ import annotations

import bisect
import logging
from collections import deque

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Device, Event
from pinfeed.errors import DeviceError
from pinfeed.memory.mapping import block_nbytes
from pinfeed.memory.page_locked import unlock_freed

logger = logging.getLogger("pinfeed")

_WASTE = 8
"""A block may be larger than needed by this part of it, so that varying sizes reuse blocks."""


class PinnedBlock:
    """A block of pinned host memory.

    Attributes:
        memory: The memory.
        nbytes: Its size in bytes.
        busy: Event after the last copy that reads or writes it; None before the first.
    """

    __slots__ = ("busy", "memory", "nbytes")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self.busy: Event | None = None


class PinnedPool:
    """Pool of pinned blocks.

    One caller at a time. Only ``give`` may be called at any time, in any thread.

    Args:
        device: Allocates the blocks.
        limit: Most bytes of all blocks together, free ones included.

    Attributes:
        nbytes: Bytes of all blocks.
        used: Bytes of the blocks in use.
        peak: Most bytes in use at a time.
        n_made: Blocks that were allocated.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self._device = device
        self.limit = limit
        # Free blocks, sorted by size.
        self._free: list[PinnedBlock] = []
        # A deque, because its operations are atomic and a finalizer may interrupt any other code,
        # take() included.
        self._returned: deque[PinnedBlock] = deque()
        self._is_closed = False
        self.nbytes = 0
        self.used = 0
        self.peak = 0
        self.n_made = 0

    def take(self, nbytes: int) -> PinnedBlock | None:
        """Return a block of at least that size; None if the limit leaves no room for it."""
        self.reclaim()
        size = block_nbytes(nbytes)
        block = self._take_free(size)
        if block is None and self._make_room(size):
            block = self._allocate(size)
        if block is None:
            return None
        self.used += block.nbytes
        self.peak = max(self.peak, self.used)
        return block

    def give(self, block: PinnedBlock) -> None:
        """Return a block to the pool; needs no lock."""
        if self._is_closed:
            block.memory = block.memory[:0].copy()
        self._returned.append(block)

    def reclaim(self) -> None:
        """Make the blocks that were given back available."""
        while self._returned:
            block = self._returned.popleft()
            self.used -= block.nbytes
            if self._is_closed:
                self.nbytes -= block.nbytes
            else:
                bisect.insort(self._free, block, key=_nbytes)

    def close(self) -> None:
        """Free the free blocks; those in use are freed when they are given back."""
        self._is_closed = True
        self.nbytes -= sum(block.nbytes for block in self._free)
        self._free.clear()
        self.reclaim()
        unlock_freed()

    def _take_free(self, size: int) -> PinnedBlock | None:
        i = bisect.bisect_left(self._free, size, key=_nbytes)
        if i < len(self._free) and self._free[i].nbytes <= size + size // _WASTE:
            return self._free.pop(i)
        return None

    def _make_room(self, size: int) -> bool:
        """Return whether there is room for a new block, after freeing blocks of other sizes."""
        if self.used + size > self.limit:
            return False
        for block in reversed(self._free.copy()):
            if self.nbytes + size <= self.limit:
                break
            # A busy block cannot be unlocked without waiting.
            if block.busy is None or block.busy.is_done():
                self._free.remove(block)
                self.nbytes -= block.nbytes
        return self.nbytes + size <= self.limit

    def _allocate(self, size: int) -> PinnedBlock | None:
        try:
            block = PinnedBlock(self._device.staging(size))
        except (DeviceError, MemoryError) as error:
            logger.warning(
                "no more than %d bytes of page-locked memory for saved activations, the others "
                "stay: %s",
                self.nbytes,
                error,
            )
            # A failed allocation is slow, so no other is tried.
            self.limit = self.nbytes
            return None
        self.nbytes += size
        self.n_made += 1
        return block


def _nbytes(block: PinnedBlock) -> int:
    return block.nbytes
