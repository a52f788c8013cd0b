"""RawChunks: chunks of an HDF5 dataset, decompressed by several threads at the same time."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from pinfeed.stores.chunk_grid import ChunkGrid
from pinfeed.stores.store import Array

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
        self.grid = ChunkGrid(dataset.shape, dataset.chunks, dataset.dtype)
        self._filters = _filters_of(dataset)

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Return whether the dataset has chunks, and only known filters."""
        return dataset.chunks is not None and _filters_of(dataset) in _FILTERS

    def decode(self, raw: bytes, place: Array) -> bool:
        """Decode a chunk as it is in the file to its place; return False if it is damaged."""
        decoded: Any = raw
        try:
            if _DEFLATE in self._filters:
                decoded = zlib.decompress(raw, bufsize=self.grid.chunk_nbytes)
            if _SHUFFLE in self._filters:
                # The chunk begins with the first bytes of all items, followed by the second bytes,
                # and so on.
                values = np.frombuffer(decoded, np.uint8).reshape(self.grid.dtype.itemsize, -1)
                decoded = np.ascontiguousarray(values.T)
            self.grid.put(decoded, place)
        except (zlib.error, ValueError):
            return False
        return True


def _filters_of(dataset: Any) -> tuple[int, ...]:
    properties = dataset.id.get_create_plist()
    return tuple(properties.get_filter(i)[0] for i in range(properties.get_nfilters()))
