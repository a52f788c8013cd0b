"""FilledMemory: detects a loader that fills the memory of its batches again."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from pinfeed.errors import ArgumentError
from pinfeed.tensors.numpy_torch import NUMPY, memory_of, plain, version_of
from pinfeed.tensors.pytree import flatten

# While they work on more than 500 numbers or 5 KiB, numpy and zlib let another thread take the
# interpreter's lock.
_N_COMPARED = 480


class _Memory(NamedTuple):
    """Memory of a tensor or an array in a batch."""

    leaf: weakref.ref[Any]
    version: int
    """Number of changes that torch has counted; 0 for an array."""
    is_whole: bool
    """Whether the checksum is that of all numbers."""
    checksum: int
    """Checksum of the numbers, or of some of them."""

    def is_changed(self) -> bool:
        """Return whether the memory was changed, unless its tensor or array was freed."""
        leaf = self.leaf()
        if leaf is None:
            # The memory may serve any other batch now.
            return False
        if self.version != _version(leaf):
            return True
        return self.checksum != _checksum(leaf, is_whole=self.is_whole)


class FilledMemory:
    """Memory of the last batches of a loader, which it must not fill again while they wait.

    Torch counts the changes of a tensor. All other changes show in the contents. The first batches
    are compared as a whole, because a loader with a few buffers fills one again by then, and the
    later ones by about ``_N_COMPARED`` of their numbers.

    Args:
        loader: Name of the loader in errors.
        n_ahead: Maximum number of earlier batches that are waiting or in use.
    """

    def __init__(self, loader: str, n_ahead: int) -> None:
        self._loader = loader
        self._earlier: deque[dict[int, _Memory]] = deque(maxlen=n_ahead)
        self._n_to_compare = n_ahead + 1

    def check(self, batch: Any) -> None:
        """Note the memory of the next batch.

        Raises:
            ArgumentError: If an earlier batch has the same memory, and had other contents.
        """
        memory: dict[int, _Memory] = {}
        for name, leaf in flatten(batch)[0]:
            address = _address(leaf)
            if not address:
                continue
            for one in self._earlier:
                if address in one and one[address].is_changed():
                    raise ArgumentError(
                        f"{self._loader} has filled the memory of batch{name} again, while an "
                        "earlier batch in the same memory was waiting or in use; expected batches "
                        "with memory of their own, because they are prefetched; yield copies "
                        "(.clone() of a tensor, .copy() of an array), or give depth=0"
                    )
            is_whole = self._n_to_compare > 0
            checksum = _checksum(leaf, is_whole=is_whole)
            memory[address] = _Memory(weakref.ref(leaf), _version(leaf), is_whole, checksum)
        self._earlier.append(memory)
        self._n_to_compare = max(0, self._n_to_compare - 1)


def _address(leaf: Any) -> int:
    """Return the address of the memory of a dense tensor or an array; 0 for other leaves."""
    if type(leaf) is np.ndarray and leaf.size and not leaf.dtype.hasobject:
        return int(leaf.__array_interface__["data"][0])
    is_dense = type(leaf) is torch.Tensor and leaf.is_cpu and leaf.layout is torch.strided
    return leaf.data_ptr() if is_dense and not (leaf.is_nested or leaf.is_quantized) else 0


def _version(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, torch.Tensor) else 0


def _checksum(leaf: Any, *, is_whole: bool) -> int:
    if isinstance(leaf, torch.Tensor):
        leaf = plain(leaf)
        is_known = leaf.dtype in NUMPY
        leaf = memory_of(leaf if is_known else leaf.contiguous().view(-1).view(torch.uint8))
    if not is_whole:
        per_axis = int(_N_COMPARED ** (1 / max(1, leaf.ndim)))
        leaf = leaf[tuple(slice(None, None, -(-n // per_axis) or 1) for n in leaf.shape)]
    return zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
