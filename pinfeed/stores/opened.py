"""Stores of the sources that users give: paths, arrays and objects of other libraries."""

from __future__ import annotations

import os
import sys
from typing import Any

from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.file import MmapStore
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.numpy_memmap import store_of_map
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.store import Store
from pinfeed.stores.zarr import ZarrStore


def open_store(source: Any, name: str) -> Store:
    """Return a new store of a path, an array or a tensor.

    Args:
        source: Path or URL of a .npy file, a pattern, a numpy array or memory map, a CPU tensor, an
            Arrow column, an ``h5py.Dataset`` or a ``zarr.Array``.
        name: Name of the source in errors.

    Raises:
        StoreError: If pinfeed cannot read its rows.
    """
    if has_protocol(source):
        return RemoteStore(source)
    if isinstance(source, (str, os.PathLike)):
        return MmapStore(source)
    for store in (store_of_map(source), _store_of_array(source, name)):
        if store is not None:
            return store
    return ArrayStore(source, name=name)


def _store_of_array(source: Any, name: str) -> Store | None:
    """Return a store of an array that another library opened; None for anything else."""
    # If a library is not loaded, the source cannot be one of its arrays.
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None and isinstance(source, (pyarrow.ChunkedArray, pyarrow.Array)):
        return ArrowStore(source, name=name)
    h5py = sys.modules.get("h5py")
    if h5py is not None and isinstance(source, h5py.Dataset):
        return HDF5Store(source)
    zarr = sys.modules.get("zarr")
    if zarr is not None and isinstance(source, zarr.Array):
        return ZarrStore(source)
    return None


def is_zarr_group(source: Any) -> bool:
    """Return whether an object is a group of Zarr arrays."""
    zarr = sys.modules.get("zarr")
    return zarr is not None and isinstance(source, zarr.Group)
