"""JobMemory and RowLayout: the memory of the batches that an engine gathers in one job."""

from __future__ import annotations

import itertools
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
    dtype: np.dtype[Any]
    """The dtype of all parts, or bytes if they differ."""
    sizes: Sequence[int]
    """Items of this dtype in each part, each followed by those in the gap after it."""
    nbytes_of_rows: int
    """Bytes of all parts, without the gaps between them."""

    @classmethod
    def of(cls, parts: Sequence[BatchPart]) -> RowLayout:
        """Return the layout of parts one after the other."""
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
        nbytes = [math.prod(part.shape) * part.dtype.itemsize for part in parts]
        ends = [0, *itertools.accumulate(map(aligned, nbytes))]
        gaps = [aligned(n) - n for n in nbytes]
        sizes = [n // dtype.itemsize for pair in zip(nbytes, gaps, strict=True) for n in pair]
        return cls(parts, ends[:-1], ends[-1], dtype, sizes, sum(nbytes))


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
