"""Parts of HDF5 datasets in whose place HDF5 returns other numbers, if they do not exist."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from typing import Any


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
