"""CopyDriver: the function of the CUDA driver that copies many rows, on host memory."""

import ctypes
from typing import Any

from pinfeed.devices.batch_copy import PROTOTYPE, BatchCopy

STREAM = 77
"""Handle of the stream in which all copies must be."""


class CopyDriver:
    """Function with the interface of ``cuMemcpyBatchAsync`` that copies at once.

    Args:
        code: Error code to return; 0 copies.

    Attributes:
        counts: Number of copies of each call.
        copier: Batched copies by this function.
    """

    def __init__(self, code: int = 0) -> None:
        self.counts: list[int] = []
        self.copier = BatchCopy(PROTOTYPE(self._copy))
        self._code = code

    def _copy(self, targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
        attributes, first, n_attributes, _failed, stream = rest
        assert (first[0], n_attributes, stream) == (0, 1, STREAM)
        assert (attributes[0].source_order, attributes[0].flags) == (1, 1)
        addresses = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        self.counts.append(count)
        if not self._code:
            for target, source, nbytes in zip(*addresses, strict=True):
                ctypes.memmove(target, source, nbytes)
        return self._code
