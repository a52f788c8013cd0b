"""RowLayout: the places of the parts of a batch, in staging memory and on a device."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Bytes between the beginnings of two tensors in one buffer, as in torch's allocator.
_ALIGNMENT = 512

# Small parts are allocated and copied together, because each call costs as much time as a copy of
# about 100 KiB. A tensor that the user keeps also keeps the other small parts of its batch, so
# their total size is bounded.
SMALL_NBYTES = 64 << 10
SHARED_NBYTES = 1 << 20


def aligned(nbytes: int) -> int:
    """Return a number of bytes rounded up to where the next tensor of a buffer may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class BatchPart(NamedTuple):
    """Shape and dtype of one part of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    """Bytes of the part."""

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> BatchPart:
        """Return a part of a shape and dtype."""
        return cls(shape, dtype, math.prod(shape) * dtype.itemsize)


class Block(NamedTuple):
    """Memory of the device for one part, or for several small ones."""

    parts: Sequence[BatchPart]
    """The parts, one after the other."""
    row: tuple[tuple[int, ...], np.dtype[Any]]
    """Shape and dtype of a row, if all parts have the same; or else () and the dtype of most parts,
    or that of bytes.
    """
    sizes: Sequence[int]
    """Number of such rows in each part, each followed by those in the gap after it."""
    nbytes: int
    """Bytes of the block."""

    @classmethod
    def of(cls, parts: Sequence[BatchPart], rooms: Sequence[int]) -> Block:
        """Return the block of some parts.

        Args:
            parts: The parts.
            rooms: Bytes of each part with the gap after it.
        """
        n_of_each = Counter(part.dtype for part in parts)
        is_mixed = len(n_of_each) > 1
        # Tensors of another dtype than that of the block are made by a further call each.
        ((dtype, _),) = n_of_each.most_common(1)
        # Copies of booleans by torch turn all bytes but 0 into 1.
        unlike_bytes = is_mixed and dtype == np.bool_
        if unlike_bytes or any(part.nbytes % dtype.itemsize for part in parts):
            dtype = np.dtype(np.uint8)
        shapes = {part.shape[1:] for part in parts}
        shape = () if is_mixed or len(shapes) > 1 else parts[0].shape[1:]
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes or _ALIGNMENT % nbytes:
            shape, nbytes = (), dtype.itemsize
        sizes = []
        for part, room in zip(parts, rooms, strict=True):
            sizes += [part.nbytes // nbytes, (room - part.nbytes) // nbytes]
        return cls(parts, (shape, dtype), sizes, sum(rooms))


class RowLayout(NamedTuple):
    """Places of the parts of a batch, in staging memory and on the device."""

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
    def of(cls, parts: Sequence[BatchPart], n_staged: int | None = None) -> RowLayout:
        """Return the layout of parts; consecutive small ones share a block.

        Args:
            parts: The parts.
            n_staged: Number of first parts that share no block with the others; None for all.
        """
        nbytes = [part.nbytes for part in parts]
        rooms = list(map(aligned, nbytes))
        ends = [0, *itertools.accumulate(rooms)]
        # The first part of each block.
        begins = []
        left = 0
        for i, n in enumerate(nbytes):
            if n > SMALL_NBYTES or n > left or i in (0, n_staged):
                begins.append(i)
                left = SHARED_NBYTES if n <= SMALL_NBYTES else 0
            left -= rooms[i]
        edges = itertools.pairwise([*begins, len(parts)])
        blocks = [Block.of(parts[begin:end], rooms[begin:end]) for begin, end in edges]
        return cls(parts, ends[:-1], ends[-1], blocks, sum(nbytes))

    def staged_blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the range [begin, end) of each block in ``nbytes`` of staging memory.

        There is no gap after the only part of a block.
        """
        found = []
        begin = 0
        for block in self.blocks:
            if begin >= nbytes:
                break
            own = block.parts[0].nbytes if len(block.parts) == 1 else block.nbytes
            found.append((begin, begin + own))
            begin += block.nbytes
        return found


def tensors_in_blocks(device: Any, layout: RowLayout, stream: Any) -> tuple[list[Any], list[Any]]:
    """Return what ``Device.empty_parts`` returns, by ``empty`` and ``tensor`` of a device."""
    tensors = []
    wholes = []
    for parts, (shape, dtype), _, nbytes in layout.blocks:
        buffer = device.empty(max(1, nbytes), stream)
        ends = itertools.accumulate(aligned(part.nbytes) for part in parts)
        for part, offset in zip(parts, [0, *ends], strict=False):
            tensors.append(device.tensor(buffer, part.shape, part.dtype, offset))
        n_rows = nbytes // max(1, BatchPart.of(shape, dtype).nbytes)
        whole = device.tensor(buffer, (n_rows, *shape), dtype)
        wholes.append(tensors[-1] if len(parts) == 1 else whole)
    return tensors, wholes
