"""PartMemory: staging memory of batches, and the sizes of their parts."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device
from pinfeed.devices.layout import SHARED_NBYTES, SMALL_NBYTES, aligned

Staging = dict[str | int, npt.NDArray[np.uint8]]
"""Page-locked memory, by the index of the part, or ``WHOLE`` for all parts of a slot."""
WHOLE = "whole"
"""Name of the memory of all parts of a slot."""


class PartMemory:
    """Staging memory that grows with the batches, and the sizes of their parts.

    Args:
        device: Device that makes the memory.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance.
    """

    def __init__(self, device: Device, capacity: Sequence[int] = ()) -> None:
        self._device = device
        self.capacity = list(capacity)
        """Bytes of each part of the largest batch so far."""

    def slot_staging(
        self, staging: Staging, nbytes: int, full: Callable[[], int] = int
    ) -> npt.NDArray[np.uint8]:
        """Return staging memory for all parts of a slot, shape (nbytes,).

        Args:
            staging: The staging memory so far.
            nbytes: Bytes of the slot.
            full: Returns the bytes of a full slot, without parts of unknown size.
        """
        kept = staging.get(WHOLE)
        if kept is None or len(kept) < nbytes:
            n_kept = 0 if kept is None else len(kept)
            kept = staging[WHOLE] = np.empty(0, np.uint8)
            kept = staging[WHOLE] = self._device.staging(max(1, full(), grown(n_kept, nbytes)))
        return kept[:nbytes]

    def staging(
        self, staging: Staging, key: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Return staging memory as an array of a shape, and grow it if needed.

        It grows to a full batch at once, because locking pages is slow.

        Args:
            staging: The staging memory so far, by part.
            key: Index of the part.
            shape: Shape of the array that is returned.
            dtype: Its dtype.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if key not in staging or len(staging[key]) < nbytes:
            expected = self.capacity[key] if key < len(self.capacity) else 0
            staging[key] = self._device.staging(max(nbytes, expected))
        return staging[key][:nbytes].view(dtype).reshape(shape)

    def learn(self, needed: Sequence[int], n_batches: int) -> None:
        """Note the bytes that the parts of ``n_batches`` batches took."""
        each = [-(-nbytes // n_batches) for nbytes in needed]
        if len(each) <= len(self.capacity) and all(map(operator.le, each, self.capacity)):
            return
        self.capacity = [
            grown(*sizes) for sizes in itertools.zip_longest(self.capacity, each, fillvalue=0)
        ]


def known_nbytes(value: Any) -> int:
    """Return ``value.nbytes``, which a dense tensor has; 0 for objects without it."""
    try:
        return int(value.nbytes)
    except Exception:
        # A sparse tensor raises an error. Other objects are the user's own.
        return 0


# Every batch of a loop has the same sizes.
@functools.lru_cache
def layout(sizes: tuple[int, ...]) -> tuple[Mapping[int, int], int]:
    """Return the offset of each part in the shared buffer, by its index, and the buffer's bytes."""
    offsets = {}
    end = 0
    for i, size in enumerate(sizes):
        if 0 < size <= SMALL_NBYTES and end + size <= SHARED_NBYTES:
            offsets[i] = end
            end = aligned(end + size)
    # A single small part is laid out like a large one.
    return (offsets, end) if len(offsets) > 1 else ({}, 0)


def grown(capacity: int, needed: int) -> int:
    """Return the bytes to allocate for a part that took ``capacity`` bytes so far.

    The size of a larger part is rounded up by at most a sixteenth. Few sizes then occur, and the
    allocator can reuse memory.
    """
    if needed <= capacity or not capacity:
        return max(capacity, needed)
    step = 1 << max(0, needed.bit_length() - 5)
    return -(-needed // step) * step
