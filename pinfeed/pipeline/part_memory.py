"""PartMemory: the device memory of the parts of a batch; small parts share one buffer."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Buffer, Device, aligned

# Small parts are allocated and copied together, because each call costs as much time as a copy of
# about 100 KiB. A tensor that the user keeps also keeps the other small parts of its batch, so
# their total size is bounded.
_SMALL_NBYTES = 64 << 10
_SHARED_NBYTES = 1 << 20


Staging = dict[str | int, npt.NDArray[np.uint8]]
"""Page-locked memory, by the index of the part, or by the name of memory of several parts."""
SHARED = "shared"
"""Name of the memory of small parts, which are copied together."""
WHOLE = "whole"
"""Name of the memory of all parts of a job of an engine."""


class Place(NamedTuple):
    """Device memory of one part."""

    buffer: Buffer
    offset: int
    """First byte of the part in the buffer."""
    nbytes: int
    """Maximum number of bytes of the part."""
    is_shared: bool
    """Whether other parts are in the same buffer."""


class PartMemory:
    """Allocates the device memory of batches, and learns the sizes of their parts.

    Args:
        device: Device of the memory.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance.
        shares: Whether small parts share a buffer.
    """

    def __init__(self, device: Device, capacity: Sequence[int] = (), *, shares: bool) -> None:
        self._device = device
        self._shares = shares
        self.capacity = list(capacity)
        """Bytes of each part of the largest batch so far."""

    def reserve(self, n_batches: int, stream: Any) -> list[Place | None]:
        """Allocate memory for each part of ``n_batches`` batches; None for a part without bytes.

        Args:
            n_batches: Number of batches that are gathered together.
            stream: Stream of the consumer thread, which calls this.
        """
        sizes = tuple(nbytes * n_batches for nbytes in self.capacity)
        offsets: Mapping[int, int] = {}
        nbytes = 0
        if self._shares:
            offsets, nbytes = layout(sizes)
        shared = self._device.empty(nbytes, stream) if nbytes else None
        return [
            Place(shared, offsets[i], size, True)
            if i in offsets
            else Place(self._device.empty(size, stream), 0, size, False)
            if size
            else None
            for i, size in enumerate(sizes)
        ]

    def place(
        self, reserved: Sequence[Place | None], i: int, nbytes: int, stream: Any
    ) -> tuple[Place, bool]:
        """Return memory for part ``i``, and whether it was reserved.

        A part that is larger than any before gets memory of its own now.
        """
        found = reserved[i] if i < len(reserved) else None
        if found is not None and found.nbytes >= nbytes:
            return found, True
        size = grown(found.nbytes if found is not None else 0, nbytes)
        return Place(self._device.empty(size, stream), 0, size, False), False

    def staging(
        self,
        staging: Staging,
        key: str | int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> npt.NDArray[Any]:
        """Return staging memory as an array of a shape, and grow it if needed.

        It grows to a full batch at once, because locking pages is slow.

        Args:
            staging: The staging memory so far, by part.
            key: Index of the part, or the name of memory of several parts.
            shape: Shape of the array that is returned.
            dtype: Its dtype.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if key not in staging or len(staging[key]) < nbytes:
            expected = 0
            if isinstance(key, int) and key < len(self.capacity):
                expected = self.capacity[key]
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


def shared_nbytes(places: Sequence[Place | None]) -> int:
    """Return the bytes of the buffer that small parts share."""
    ends = [place.offset + place.nbytes for place in places if place and place.is_shared]
    return max(ends, default=0)


# Every batch of a loop has the same sizes.
@functools.lru_cache
def layout(sizes: tuple[int, ...]) -> tuple[Mapping[int, int], int]:
    """Return the offset of each part in the shared buffer, by its index, and the buffer's bytes."""
    offsets = {}
    end = 0
    for i, size in enumerate(sizes):
        if 0 < size <= _SMALL_NBYTES and end + size <= _SHARED_NBYTES:
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
