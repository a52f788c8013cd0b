"""Stores of the sources that users give: paths, arrays, tables and frames of other libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pinfeed.errors import StoreError
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.frames import frame_columns
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.libraries import check_names
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.numpy_memmap import store_of_map
from pinfeed.stores.parquet import ParquetStore
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
        return NpyStore(source)
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
    return _arrow_columns(source, name) if found is None else found


def is_parquet(source: Any) -> bool:
    """Return whether a source is a path or a pattern of local Parquet files, or a folder of them.

    Their names end in ``.parquet``.
    """
    if not isinstance(source, (str, os.PathLike)) or has_protocol(source):
        return False
    name = os.fspath(source)
    return isinstance(name, str) and os.path.splitext(name)[1].lower() == ".parquet"


def _arrow_columns(source: Any, name: str) -> dict[str, ArrowStore] | None:
    """Return a store for each column of a pyarrow.Table or of a Hugging Face dataset; else None.

    The columns and rows of a dataset are those that ``dataset[i]`` shows.

    Raises:
        StoreError: If pinfeed cannot read a column, or if the rows of a dataset are not those of
            its table.
    """
    found = arrow_table(source, name)
    if found is None:
        return None
    columns, indices = found
    stores = {
        column: ArrowStore(values, name=f"{name}[{column!r}]", indices=indices)
        for column, values in columns.items()
    }
    if _is_dataset(source) and (kind := source.format["type"]) in ("numpy", "torch"):
        _check_format(kind, source[0], stores, name)
    return stores


def arrow_table(source: Any, name: str) -> tuple[dict[str, Any], Any] | None:
    """Return the columns of a pyarrow.Table or of a Hugging Face dataset, and its row indices.

    Args:
        source: One of these, or anything else.
        name: Name of the source in errors.

    Returns:
        The columns by name, and a column of row indices: row i of the source is row ``indices[i]``
        of the columns, or row i if there are none. None if ``source`` is anything else.

    Raises:
        StoreError: If two columns have the same name, or if a dataset has a transform.
    """
    # If pyarrow is not loaded, the source cannot be a table.
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None:
        return None
    if isinstance(source, pyarrow.Table):
        check_names(source.column_names, name, "rename them with table.rename_columns")
        return dict(zip(source.column_names, source.columns, strict=True)), None
    if not _is_dataset(source):
        return None
    view = source.format
    if view["type"] == "custom":
        raise StoreError(
            f"{name}: the dataset has a transform that runs sample by sample; remove it with "
            "dataset.reset_format(), or give pinfeed.wrap_loader(DataLoader(dataset))"
        )
    names = [
        column
        for column in source.column_names
        if view["output_all_columns"] or column in view["columns"]
    ]
    # Row indices that select, shuffle, sort and other methods store in the dataset.
    indices = source._indices.column(0) if source._indices is not None else None
    return {column: source.data.column(column) for column in names}, indices


def _is_dataset(source: Any) -> bool:
    """Return whether an object is a Hugging Face dataset, without importing the library."""
    return _has_base(source, "datasets.arrow_dataset", "Dataset")


def is_dataset_dict(source: Any) -> bool:
    """Return whether an object is a dict of Hugging Face datasets."""
    return _has_base(source, "datasets.dataset_dict", "DatasetDict")


def _has_base(source: Any, module: str, name: str) -> bool:
    return any((one.__module__, one.__name__) == (module, name) for one in type(source).__mro__)


def _check_format(
    kind: str, first: dict[str, Any], stores: dict[str, ArrowStore], name: str
) -> None:
    """Check with the first row that the format of a dataset does not convert dtypes.

    Raises:
        StoreError: If it does.
    """
    for column, store in stores.items():
        given = str(getattr(first[column], "dtype", store.dtype)).removeprefix("torch.")
        if given != store.dtype.name:
            raise StoreError(
                f"{name}[{column!r}]: with_format({kind!r}) converts {store.dtype} to {given}; "
                "remove the format with dataset.with_format(None), or convert the stored column "
                "with dataset.cast_column"
            )
