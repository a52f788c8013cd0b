"""ChunkGrid: chunks of equal shape along all axes of an array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pinfeed.stores.store import Array

Box = tuple[slice, ...]
"""Indices [start, stop) along each axis of an array."""


class ChunkGrid(NamedTuple):
    """Shape of an array, and of its chunks; a chunk at the end of an axis extends beyond it."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def origins(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the position in the array of the first item of each chunk of a box."""
        sizes = zip(box, self.shape, self.chunks, strict=True)
        ranges = (range(*one.indices(size)[:2], chunk) for one, size, chunk in sizes)
        return itertools.product(*ranges)

    def place(self, origin: tuple[int, ...], box: Box, out: Array) -> Array:
        """Return the part of ``out`` for a chunk.

        Args:
            origin: Position in the array of the first item of the chunk.
            box: A box of whole chunks with this one.
            out: The items of the box.
        """
        axes = zip(origin, box, self.chunks, strict=True)
        begins = [(at - (one.start or 0), size) for at, one, size in axes]
        return out[tuple(slice(begin, begin + size) for begin, size in begins)]

    def put(self, decoded: Any, place: Array) -> None:
        """Copy a decoded chunk, which is a buffer, to its place.

        Raises:
            ValueError: If the chunk has another size.
        """
        block = np.frombuffer(decoded, self.dtype).reshape(self.chunks)
        place[...] = block[tuple(map(slice, place.shape))]
