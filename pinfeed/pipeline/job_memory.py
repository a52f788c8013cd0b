"""JobMemory and RowLayout: the memory of the batches that an engine gathers in one job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.device import Tensor, aligned


class BatchPart(NamedTuple):
    """Shape and dtype of one part of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class RowLayout(NamedTuple):
    """Where the parts of a job go."""

    parts: Sequence[BatchPart]
    offsets: Sequence[int]
    """First byte of each part in the memory of the job."""
    nbytes: int
    """Bytes of this memory."""
    sizes: Sequence[int]
    """Bytes of each part, each followed by those of the gap after it."""
    nbytes_of_rows: int
    """Bytes of all parts, without the gaps between them."""

    @classmethod
    def of(cls, parts: Sequence[BatchPart]) -> RowLayout:
        """Return the layout of parts one after the other."""
        offsets = []
        sizes = []
        end = 0
        for shape, dtype in parts:
            nbytes = math.prod(shape) * dtype.itemsize
            offsets.append(end)
            sizes += [nbytes, aligned(nbytes) - nbytes]
            end += aligned(nbytes)
        return cls(parts, offsets, end, sizes, sum(sizes[::2]))


class JobMemory(NamedTuple):
    """Memory of the batches of one job."""

    tensors: deque[list[Tensor]]
    """Tensors of each batch."""
    outs: Sequence[int]
    """Where the rows of each source go; see ``Engine.submit``."""
    owner: object
    """Object that keeps the memory alive."""
    device: int = 0
    """Address of the memory on the device."""
    stream: int = 0
    """Handle of the stream whose later work may use this memory."""


def row_layout(row_types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], n: int) -> RowLayout:
    """Return the layout of ``n`` rows of each source.

    Args:
        row_types: Shape and dtype of a row of each source.
        n: Number of rows.
    """
    return RowLayout.of([BatchPart((n, *shape), dtype) for shape, dtype in row_types])
