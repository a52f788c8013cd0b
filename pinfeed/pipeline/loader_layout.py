"""LoaderLayout: the places of the tensors of a loader's batch on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pinfeed.devices.device import Tensor
from pinfeed.devices.layout import BatchPart, RowLayout

# A copy of its own costs the host as much time as staging that many bytes.
_STAGED_NBYTES = 64 << 10


class LoaderLayout:
    """Places of the tensors of batches that have the same shapes and dtypes.

    Tensors that are staged come first, because one copy moves them.

    Args:
        tensors: Dense, contiguous tensors on the host.
        is_reached: Returns whether the device copies a tensor from where it is.
    """

    def __init__(self, tensors: Sequence[Any], is_reached: Callable[[Any], bool]) -> None:
        from pinfeed.tensors.numpy_torch import NUMPY

        self._is_reached = is_reached
        self._direct = [tensor.nbytes > _STAGED_NBYTES and is_reached(tensor) for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        direct = self._direct
        order = sorted(range(len(tensors)), key=lambda i: (direct[i], tensors[i].nbytes))
        is_sorted = order == list(range(len(tensors)))
        self._order = None if is_sorted else order
        self._places = sorted(range(len(order)), key=order.__getitem__)
        parts = [BatchPart.of(tuple(tensors[i].shape), NUMPY[tensors[i].dtype]) for i in order]
        self.memory = memory = RowLayout.of(parts)
        """Layout of the memory of the device, in the order of ``sources``."""
        self.n_staged = n = len(tensors) - sum(direct)
        """Number of tensors that are staged."""
        self.staged_nbytes = [*memory.offsets, memory.nbytes][n]
        """Bytes of staging memory."""
        nbytes = [part.nbytes for part in parts]
        self.table = np.array([memory.offsets, nbytes], np.int64)
        """Offset in staging memory and bytes of each tensor in this order, shape (2, n)."""

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have the shapes and dtypes of this layout, and move as these."""
        return (
            len(tensors) == len(self._shapes)
            and [tensor.shape for tensor in tensors] == self._shapes
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and all(map(self._is_reached, itertools.compress(tensors, self._direct)))
        )

    def sources(self, tensors: Sequence[Any]) -> list[int]:
        """Return the address of each tensor, in the order of ``memory``."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return addresses if self._order is None else [addresses[i] for i in self._order]

    def in_batch_order(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors of the device in the order of the batch."""
        return tensors if self._order is None else [tensors[i] for i in self._places]
