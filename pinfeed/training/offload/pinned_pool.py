"""Page-locked blocks under a hard bound, kept from step to step."""

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

# A block may be larger than what it is for, by this part of it: sizes that vary find the same
# blocks again.
_WASTE = 8


class PinnedBlock:
    """Host memory. ``busy`` is the last copy that reads or writes it."""

    __slots__ = ("busy", "memory", "nbytes")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self.busy: Event | None = None


class PinnedPool:
    """Blocks, for one caller at a time; only ``give`` may come at any time, in any thread.

    Args:
        device: Makes them.
        limit: Most bytes of all blocks together, free ones included.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self._device = device
        self.limit = limit
        self._free: list[PinnedBlock] = []  # by size
        # A deque: its operations are atomic, and a finalizer may run in the midst of anything,
        # take() included.
        self._returned: deque[PinnedBlock] = deque()
        self._closed = False
        self.nbytes = self.used = self.peak = self.n_made = 0

    def take(self, nbytes: int) -> PinnedBlock | None:
        """A block of at least that size; None if the limit does not leave room for it."""
        self.reap()
        size = block_nbytes(nbytes)
        i = bisect.bisect_left(self._free, size, key=lambda block: block.nbytes)
        if i < len(self._free) and self._free[i].nbytes <= size + size // _WASTE:
            block = self._free.pop(i)
        elif not self._room(size) or (made := self._make(size)) is None:
            return None
        else:
            block = made
        self.used += block.nbytes
        self.peak = max(self.peak, self.used)
        return block

    def give(self, block: PinnedBlock) -> None:
        """The block is free again. Without the lock."""
        if self._closed:
            block.memory = block.memory[:0].copy()
        self._returned.append(block)

    def reap(self) -> None:
        """Find what has become free."""
        while self._returned:
            block = self._returned.popleft()
            self.used -= block.nbytes
            if self._closed:
                self.nbytes -= block.nbytes
            else:
                bisect.insort(self._free, block, key=lambda block: block.nbytes)

    def close(self) -> None:
        """Give the free blocks back; those in use follow when they are given."""
        self._closed = True
        self.nbytes -= sum(block.nbytes for block in self._free)
        self._free.clear()
        self.reap()
        unlock_freed()

    def _room(self, size: int) -> bool:
        """Whether there is room for a new block, once free ones of other sizes have made way."""
        if self.used + size > self.limit:
            return False
        for block in reversed(self._free.copy()):
            if self.nbytes + size <= self.limit:
                break
            if block.busy is None or block.busy.is_done():
                # Else it cannot be unlocked without waiting.
                self._free.remove(block)
                self.nbytes -= block.nbytes
        return self.nbytes + size <= self.limit

    def _make(self, size: int) -> PinnedBlock | None:
        try:
            block = PinnedBlock(self._device.staging(size))
        except (DeviceError, MemoryError) as error:
            logger.warning(
                "no more than %d bytes of page-locked memory for saved activations, the others stay: %s",
                self.nbytes,
                error,
            )
            # It is slow to be refused.
            self.limit = self.nbytes
            return None
        self.nbytes += size
        self.n_made += 1
        return block
