"""Parts of HDF5 datasets: chunks that are decoded without HDF5, and parts that do not exist."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import zlib
from typing import Any

import numpy as np

from pinfeed.stores.chunked_array import ChunkGrid
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


def missing_part(dataset: Any) -> str:
    """Return which part of a dataset does not exist; empty if HDF5 hides no missing part.

    HDF5 returns the fill value for a source of a virtual dataset that it cannot open, zeros after
    the end of an external file, and anything for chunks that were never written, if the dataset has
    no fill value. In files of netCDF, the fill value of these chunks stands for missing numbers.
    HDF5 reports external files that do not exist.
    """
    if dataset.is_virtual:
        # A source may have several parts.
        sources = {(part.file_name, part.dset_name) for part in dataset.virtual_sources()}
        missing = (f"{path}:{name}" for path, name in sources if not _exists(dataset, path, name))
        return next((f"the source {source} of the dataset" for source in missing), "")
    access = dataset.id.get_access_plist()
    left = dataset.nbytes
    for path, offset, nbytes in dataset.external or ():
        place = os.path.join(os.fsdecode(access.get_efile_prefix()), path)
        nbytes = min(nbytes, left)
        left -= nbytes
        if os.path.exists(place) and os.path.getsize(place) < offset + nbytes:
            return f"the end of the external file {place}"
    is_whole = dataset.external or _has_fill_value(dataset) or _is_written(dataset)
    return "" if is_whole else "chunks that were never written"


def _exists(dataset: Any, path: str, name: str) -> bool:
    """Return whether HDF5 finds a source of a virtual dataset, with all of its parts."""
    import h5py

    folder = os.path.dirname(os.path.abspath(os.fsdecode(dataset.file.filename)))
    given = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())
    prefixes = [*os.environ.get("HDF5_VDS_PREFIX", "").split(":"), given, folder, ""]
    # If the folder of an absolute path has moved, HDF5 looks for the name of the file.
    names = dict.fromkeys((path, os.path.basename(path) if os.path.isabs(path) else path))
    for prefix, name_of_file in itertools.product(prefixes, names):
        place = os.path.join(prefix.replace("${ORIGIN}", folder), name_of_file)
        own = contextlib.nullcontext(dataset.file)
        # If h5py cannot open a file, HDF5 cannot do so, either.
        with contextlib.suppress(OSError), own if path == "." else h5py.File(place, "r") as file:
            if name in file:
                return not missing_part(file[name])
    return False


def _has_fill_value(dataset: Any) -> bool:
    """Return whether HDF5 fills chunks that were never written, with a value that is a number."""
    from h5py import h5d

    properties = dataset.id.get_create_plist()
    is_defined = properties.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED
    # In files of netCDF, the fill value stands for missing numbers.
    is_number = "_NCProperties" not in dataset.file.attrs
    return bool(is_defined and is_number and properties.get_fill_time() != h5d.FILL_TIME_NEVER)


def _is_written(dataset: Any) -> bool:
    """Return whether the file contains all chunks of a dataset."""
    if dataset.chunks is None:
        return bool(dataset.id.get_storage_size() >= dataset.nbytes)
    pairs = zip(dataset.shape, dataset.chunks, strict=True)
    n_chunks = math.prod(-(-size // chunk) for size, chunk in pairs)
    return bool(dataset.id.get_num_chunks() >= n_chunks)
