"""PinnedPool: reuses blocks of pinned host memory from step to step, under a hard limit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device, Event
from pinfeed.errors import DeviceError, logger
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.memory.pages import block_nbytes

_WASTE = 8
"""A block may be larger than needed by 1/8, so that blocks are reused for varying sizes."""


@dataclass(eq=False)
class PinnedBlock:
    """A block of pinned host memory.

    Attributes:
        memory: The memory.
        nbytes: Size of the memory in bytes.
        busy: Event after the last copy that reads or writes the block; None before the first copy.
    """

    memory: npt.NDArray[np.uint8]
    nbytes: int
    busy: Event | None = None


class PinnedPool:
    """Pool of pinned blocks.

    Only one thread at a time may call it.

    Args:
        device: Device that allocates the blocks.
        limit: Limit of the bytes of all blocks together, free ones included.

    Attributes:
        nbytes: Bytes of all blocks.
        used: Bytes of the blocks in use.
        peak: Peak of ``used``.
        n_made: Number of blocks that were allocated.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self._device = device
        self.limit = limit
        # Free blocks, sorted by size.
        self._free: list[PinnedBlock] = []
        self._is_closed = False
        self.nbytes = 0
        self.used = 0
        self.peak = 0
        self.n_made = 0

    def take(self, nbytes: int) -> PinnedBlock | None:
        """Return a block of at least ``nbytes`` bytes; None if the limit leaves no room for it."""
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
        """Return a block to the pool, which frees it after ``close``."""
        self.used -= block.nbytes
        if self._is_closed:
            self.nbytes -= block.nbytes
        else:
            bisect.insort(self._free, block, key=_nbytes)

    def close(self) -> None:
        """Release the free blocks; blocks in use are released when they are given back."""
        self._is_closed = True
        self.nbytes -= sum(block.nbytes for block in self._free)
        self._free.clear()
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
            # Unlocking a busy block would wait for its copy.
            if block.busy is None or block.busy.is_done():
                self._free.remove(block)
                self.nbytes -= block.nbytes
        return self.nbytes + size <= self.limit

    def _allocate(self, size: int) -> PinnedBlock | None:
        try:
            block = PinnedBlock(self._device.staging(size), size)
        except (DeviceError, MemoryError) as error:
            logger.warning(
                "Offload cannot allocate more than %d bytes of page-locked (pinned) memory, so "
                "further activations stay on the device: %s",
                self.nbytes,
                error,
            )
            # A failed allocation is slow, so the pool tries no other.
            self.limit = self.nbytes
            return None
        self.nbytes += size
        self.n_made += 1
        return block


def _nbytes(block: PinnedBlock) -> int:
    return block.nbytes
