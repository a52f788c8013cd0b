"""Stores of what other libraries opened, and of files of columns, recognized without an import."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from typing import Any

from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.arrow_tables import columns_of, is_column
from pinfeed.stores.base import Store
from pinfeed.stores.frames import frame_columns
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.parquet import ParquetStore
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.zarr import ZarrStore


def stores_of_columns(source: Any, name: str) -> Mapping[Any, Store] | None:
    """Return a store for each column of a table, a data set, a frame or a Parquet file.

    Args:
        source: One of these, or anything else.
        name: Name of the source in errors.

    Returns:
        The stores by name of the column, or None if ``source`` has no columns.

    Raises:
        StoreError: If a column cannot be served.
    """
    if is_parquet(source):
        return ParquetStore.columns(source)
    found = frame_columns(source, name)
    return columns_of(source, name) if found is None else found


def store_of_array(source: Any, name: str) -> Store | None:
    """Return a store of an array that another library opened; None for anything else.

    Args:
        source: An Arrow column, an ``h5py.Dataset``, a ``zarr.Array``, or anything else.
        name: Name of the source in errors.

    Raises:
        StoreError: If its rows cannot be served.
    """
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
