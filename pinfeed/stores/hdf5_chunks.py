"""RawChunks: chunks of an HDF5 dataset, decompressed by several threads at the same time."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# Filters of HDF5 that are undone here, in the order in which they were applied.
_DEFLATE = 1
_SHUFFLE = 2
_FILTERS = ((), (_DEFLATE,), (_SHUFFLE, _DEFLATE))


class RawChunks:
    """Chunks as they are in the file, of a dataset with no filters but gzip and shuffle.

    The HDF5 library makes one call at a time, and a call that reads rows also decompresses them.
    This class calls the library only to read the compressed bytes.

    Args:
        dataset: A dataset that ``can_read`` accepts, with the same type in the file and in memory.
    """

    def __init__(self, dataset: Any) -> None:
        self._shape: tuple[int, ...] = dataset.shape
        self._chunks: tuple[int, ...] = dataset.chunks
        self._dtype: np.dtype[Any] = dataset.dtype
        self._filters = _filters_of(dataset)
        self._nbytes = math.prod(self._chunks) * self._dtype.itemsize

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Return whether the dataset has chunks, and only known filters."""
        return dataset.chunks is not None and _filters_of(dataset) in _FILTERS

    def offsets(self, box: tuple[slice, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the positions in the dataset of the chunks of a box of whole chunks."""
        sizes = zip(box, self._shape, self._chunks, strict=True)
        ranges = (range(*one.indices(size)[:2], chunk) for one, size, chunk in sizes)
        return itertools.product(*ranges)

    def decode(
        self, raw: bytes, offset: tuple[int, ...], begin: tuple[int, ...], out: npt.NDArray[Any]
    ) -> bool:
        """Decode one chunk.

        Args:
            raw: The chunk as it is in the file.
            offset: Position of the chunk in the dataset.
            begin: Position in the dataset of the first item of ``out``.
            out: A box of whole chunks with this one.

        Returns:
            True, or False if the chunk is damaged.
        """
        decoded: Any = raw
        if _DEFLATE in self._filters:
            try:
                decoded = zlib.decompress(raw, bufsize=self._nbytes)
            except zlib.error:
                return False
        if len(decoded) != self._nbytes:
            return False
        values = np.frombuffer(decoded, np.uint8)
        if _SHUFFLE in self._filters:
            # The chunk begins with the first bytes of all items, followed by the second bytes, and
            # so on.
            values = np.ascontiguousarray(values.reshape(self._dtype.itemsize, -1).T).reshape(-1)
        block = values.view(self._dtype).reshape(self._chunks)
        axes = zip(offset, begin, self._chunks, strict=True)
        target = out[tuple(slice(at - first, at - first + size) for at, first, size in axes)]
        # A chunk at the end of an axis extends beyond it.
        target[...] = block[tuple(map(slice, target.shape))]
        return True


def _filters_of(dataset: Any) -> tuple[int, ...]:
    properties = dataset.id.get_create_plist()
    return tuple(properties.get_filter(i)[0] for i in range(properties.get_nfilters()))
