"""HostMemory: reads the parts of batches into memory of the host; small parts share a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Tensor
from pinfeed.pipeline.part_memory import grown, known_nbytes, layout
from pinfeed.stores.base import CheckStop, HostArray

if TYPE_CHECKING:
    from pinfeed.devices.cpu import HostDevice


class _Places(NamedTuple):
    """The places in memory of the parts of a slot."""

    parts: Sequence[tuple[int, int | None]]
    """Bytes of each part, and its offset in the shared block; None for a part with its own."""
    shared_nbytes: int
    """Bytes of the shared block; 0 for none."""


class HostMemory:
    """Reads the parts of batches into memory of the host. Several threads may call it.

    All batches take blocks of the same sizes, so that freed blocks are reused. A part that is
    larger than any before gets a block of its own, and later batches take blocks of that size.

    Args:
        device: Device on the host.
        capacity: Bytes of each part of a full batch; empty if they are unknown in advance.
    """

    def __init__(self, device: HostDevice, capacity: Sequence[int]) -> None:
        self._device = device
        self._capacity = list(capacity)
        self._n_batches = 1
        self._places = _places(self._capacity, 1)

    def begin(self, n_batches: int) -> None:
        """Let later reads reserve memory for ``n_batches`` batches that are gathered together."""
        self._n_batches = n_batches
        self._places = _places(self._capacity, n_batches)

    def read(self, parts: Sequence[HostArray], check_stop: CheckStop) -> tuple[list[Tensor], int]:
        """Read the parts of a slot; return a tensor for each, and the bytes of all.

        A part that is a tensor already is not copied.

        Args:
            parts: The parts.
            check_stop: Raises an error when the loop has ended; called between steps.
        """
        device = self._device
        places, shared_nbytes = self._places
        shared = device.empty(shared_nbytes, None) if shared_nbytes else None
        tensors: list[Tensor] = []
        total = 0
        for i, part in enumerate(parts):
            if getattr(part, "host_value", None) is not None:
                tensors.append(device.adopt(part, None))
                total += known_nbytes(tensors[-1])
                continue
            shape = part.shape
            dtype = part.dtype
            nbytes = math.prod(shape) * dtype.itemsize
            total += nbytes
            full, offset = places[i] if i < len(places) else (0, None)
            out: npt.NDArray[Any]
            if nbytes > full:
                full = self._grow(i, nbytes)
                offset = None
            if offset is None:
                out = np.ndarray(shape, dtype, device.empty(full, None))
            else:
                out = np.ndarray(shape, dtype, shared, offset)
            part.read(out, check_stop)
            tensors.append(device.wrap(out))
        return tensors, total

    def array(self, i: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array in a block of its own, of the size that part ``i`` of a batch takes."""
        nbytes = math.prod(shape) * dtype.itemsize
        full = self._capacity[i] if i < len(self._capacity) else 0
        return np.ndarray(shape, dtype, self._device.empty(max(nbytes, full), None))

    def close(self) -> None:
        """Free spare blocks, if this owns its device."""
        self._device.close()

    def _grow(self, i: int, nbytes: int) -> int:
        """Note that part ``i`` of a slot has more bytes than before; return the bytes to take."""
        capacity = [*self._capacity, *[0] * (i + 1 - len(self._capacity))]
        capacity[i] = grown(capacity[i], -(-nbytes // self._n_batches))
        # If two threads do this at the same time, a later batch does it again.
        self._capacity = capacity
        self._places = _places(capacity, self._n_batches)
        return max(nbytes, capacity[i] * self._n_batches)


def _places(capacity: Sequence[int], n_batches: int) -> _Places:
    sizes = tuple(nbytes * n_batches for nbytes in capacity)
    offsets, shared_nbytes = layout(sizes)
    return _Places([(nbytes, offsets.get(i)) for i, nbytes in enumerate(sizes)], shared_nbytes)


def host_memory(capacity: Sequence[int], n_batches: int) -> HostMemory:
    """Return memory for rows that stay on the host, on a device of its own.

    Args:
        capacity: Bytes of each part of a full batch; empty if they are unknown.
        n_batches: Number of batches for which blocks are kept for reuse.
    """
    from pinfeed.devices.cpu import HostDevice

    return HostMemory(HostDevice(n_spare=n_batches * max(1, len(capacity))), capacity)
