"""JobMemory and RowLayout: the memory of the batches that an engine gathers in one job."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pinfeed.devices.device import Tensor, aligned


# Small parts are allocated and copied together, because each call costs as much time as a copy of
# about 100 KiB. A tensor that the user keeps also keeps the other small parts of its batch, so
# their total size is bounded.
_SMALL_NBYTES = 64 << 10
_SHARED_NBYTES = 1 << 20


class BatchPart(NamedTuple):
    """Shape and dtype of one part of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.dtype.itemsize


class Block(NamedTuple):
    """Memory of the device for one part, or for several small ones."""

    parts: Sequence[BatchPart]
    """The parts, one after the other."""
    dtype: np.dtype[Any]
    """The dtype of all parts, or bytes if they differ."""
    sizes: Sequence[int]
    """Items of this dtype in each part, each followed by those in the gap after it."""
    nbytes: int
    """Bytes of the block."""

    @classmethod
    def of(cls, parts: Sequence[BatchPart]) -> Block:
        """Return the block of some parts."""
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
        sizes = []
        for part in parts:
            n, gap = part.nbytes, aligned(part.nbytes) - part.nbytes
            sizes += [n // dtype.itemsize, gap // dtype.itemsize]
        return cls(parts, dtype, sizes, sum(aligned(part.nbytes) for part in parts))


class RowLayout(NamedTuple):
    """Where the parts of a batch go, in staging memory and on the device."""

    parts: Sequence[BatchPart]
    offsets: Sequence[int]
    """First byte of each part in staging memory."""
    nbytes: int
    """Bytes of this memory."""
    blocks: Sequence[Block]
    """Memory of the device, in the order of the parts."""
    nbytes_of_rows: int
    """Bytes of all parts, without the gaps between them."""

    @classmethod
    def of(cls, parts: Sequence[BatchPart]) -> RowLayout:
        """Return the layout of parts in ascending order of their bytes."""
        nbytes = [part.nbytes for part in parts]
        ends = [0, *itertools.accumulate(map(aligned, nbytes))]
        blocks: list[list[BatchPart]] = []
        room = 0
        for part in parts:
            is_small = part.nbytes <= _SMALL_NBYTES
            if not blocks or not is_small or part.nbytes > room:
                blocks.append([])
                room = _SHARED_NBYTES if is_small else 0
            room -= aligned(part.nbytes)
            blocks[-1].append(part)
        return cls(parts, ends[:-1], ends[-1], list(map(Block.of, blocks)), sum(nbytes))


class JobMemory(NamedTuple):
    """Memory of the batches of one job."""

    tensors: deque[list[Tensor]]
    """Tensors of each batch."""
    outs: Sequence[int]
    """Where the rows of each source go; see ``Engine.submit``."""
    owner: object
    """Object that keeps the memory alive."""
    devices: Sequence[int] = ()
    """Address of the rows of each source on the device."""
    stream: int = 0
    """Handle of the stream whose later work may use this memory."""


def row_layout(row_types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], n: int) -> RowLayout:
    """Return the layout of ``n`` rows of each source.

    Args:
        row_types: Shape and dtype of a row of each source.
        n: Number of rows.
    """
    return RowLayout.of([BatchPart((n, *shape), dtype) for shape, dtype in row_types])
