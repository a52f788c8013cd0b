"""Parts of HDF5 datasets in whose place HDF5 returns other numbers, if they do not exist."""

from __future__ import annotations

import math
import os
from typing import Any

from pinfeed.errors import StoreError
from pinfeed.stores.value_conventions import AS_STORED


def require_all_parts(dataset: Any, label: str) -> None:
    """Check that a dataset has no missing part that HDF5 would hide.

    HDF5 returns the fill value for a source of a virtual dataset that it cannot open, zeros after
    the end of an external file, and anything for chunks that were never written, if the dataset has
    no fill value.

    Raises:
        StoreError: If a part is missing.
    """
    if dataset.is_virtual:
        # A source may have several parts.
        for path, name in {(part.file_name, part.dset_name) for part in dataset.virtual_sources()}:
            _require_source(dataset, path, name, label)
    elif dataset.external:
        _require_external(dataset, label)
    elif not _has_fill_value(dataset) and not _is_written(dataset):
        raise _missing(label, "parts that were never written, and no fill value")


def _require_source(dataset: Any, path: str, name: str, label: str) -> None:
    """Check that HDF5 can open a source of a virtual dataset, and that it has all of its parts."""
    import h5py

    if path == ".":
        source = dataset.file.get(name)
        if source is not None:
            require_all_parts(source, label)
            return
    folder = os.path.dirname(os.path.abspath(os.fsdecode(dataset.file.filename)))
    given = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())
    prefixes = (os.environ.get("HDF5_VDS_PREFIX", ""), given, folder, "")
    places = [os.path.join(one.replace("${ORIGIN}", folder), path) for one in prefixes]
    for place in filter(os.path.isfile, places):
        try:
            with h5py.File(place, "r") as file:
                if name in file:
                    require_all_parts(file[name], label)
                    return
        except OSError:
            # HDF5 cannot open it either.
            continue
    raise _missing(label, f"a source that cannot be opened, {path}:{name}")


def _require_external(dataset: Any, label: str) -> None:
    """Check that the external files of a dataset are long enough. HDF5 reports missing files."""
    prefix = os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    left = dataset.nbytes
    for path, offset, nbytes in dataset.external:
        place = os.path.join(prefix, path)
        nbytes = min(nbytes, left)
        left -= nbytes
        if os.path.exists(place) and os.path.getsize(place) < offset + nbytes:
            raise _missing(label, f"an external file that is too short, {place}")


def _has_fill_value(dataset: Any) -> bool:
    """Return whether HDF5 fills chunks that were never written."""
    from h5py import h5d

    properties = dataset.id.get_create_plist()
    is_defined = properties.fill_value_defined() != h5d.FILL_VALUE_UNDEFINED
    return bool(is_defined and properties.get_fill_time() != h5d.FILL_TIME_NEVER)


def _is_written(dataset: Any) -> bool:
    """Return whether the file contains all chunks of a dataset."""
    if dataset.chunks is None:
        return bool(dataset.id.get_storage_size() >= dataset.nbytes)
    pairs = zip(dataset.shape, dataset.chunks, strict=True)
    n_chunks = math.prod(-(-size // chunk) for size, chunk in pairs)
    return bool(dataset.id.get_num_chunks() >= n_chunks)


def _missing(label: str, problem: str) -> StoreError:
    return StoreError(
        f"{label} has {problem}, in whose place HDF5 returns other numbers; expected all parts; "
        f"{AS_STORED} to read what HDF5 returns"
    )
