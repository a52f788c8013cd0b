"""Stores of the sources that users give: paths, arrays and objects of other libraries."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from typing import Any

from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.arrow_tables import columns_of, is_column
from pinfeed.stores.base import Store
from pinfeed.stores.file import MmapStore
from pinfeed.stores.frames import frame_columns
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.memory_map import store_of_map
from pinfeed.stores.parquet import ParquetStore
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.zarr import ZarrStore


def stores_of_columns(source: Any, name: str) -> Mapping[Any, Store] | None:
    """Return a store for each column of a table, a dataset, a frame or a Parquet file.

    Args:
        source: One of these, or anything else.
        name: Name of the source in errors.

    Returns:
        The stores by column name, or None if ``source`` has no columns.

    Raises:
        StoreError: If pinfeed cannot read a column.
    """
    if is_parquet(source):
        return ParquetStore.columns(source)
    found = frame_columns(source, name)
    return columns_of(source, name) if found is None else found


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
    if is_column(source):
        return ArrowStore(source, name=name)
    # If a library is not loaded, the source cannot be one of its arrays.
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


def is_parquet(source: Any) -> bool:
    """Return whether a source is the path or the pattern of local Parquet files, by its name."""
    if not isinstance(source, (str, os.PathLike)) or has_protocol(source):
        return False
    name = os.fspath(source)
    if not isinstance(name, str) or os.path.splitext(name)[1].lower() != ".parquet":
        return False
    return glob.has_magic(name) or not os.path.isdir(name)
