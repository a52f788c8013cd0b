"""Stores of the sources that users give: paths, arrays, tables and frames of other libraries."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.hdf5 import HDF5Store
from pinfeed.stores.libraries import check_names
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.numpy_memmap import store_of_map
from pinfeed.stores.parquet import ParquetStore
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.store import Array, Store
from pinfeed.stores.zarr import ZarrStore
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.validation.requirements import install_line

_LEAVE_OUT = "or leave the column out (df.drop)"
_EXPECTED = "expected numbers or booleans"

# Advice for types of columns that a tensor cannot have, by the name of the type without parameters.
_PANDAS_ADVICE = {
    "category": "give its numbers: df[name].cat.codes",
    **dict.fromkeys(("str", "string"), "number the texts: pandas.factorize(df[name])[0]"),
    **dict.fromkeys(
        ("datetime64", "timedelta64", "period"), 'convert it: df[name].astype("int64")'
    ),
    "interval": "give its ends as two columns",
    "Sparse": "make it dense: df[name].sparse.to_dense()",
    "object": (
        "give np.stack(df[name]) if each object is a row of numbers, or "
        "pinfeed.RaggedStore(values, offsets) if the rows differ in length"
    ),
}
_POLARS_ADVICE = {
    **dict.fromkeys(("Categorical", "Enum"), "give its numbers: df[name].to_physical()"),
    "String": "number the texts: df[name].cast(polars.Categorical).to_physical()",
    **dict.fromkeys(("Date", "Datetime", "Duration", "Time"), "convert it: df[name].to_physical()"),
    "Decimal": "convert it: df[name].cast(polars.Float64)",
    "Struct": "give its fields as columns: df.unnest(name)",
    "Object": "convert it to numbers",
}

FrameStore = ArrayStore | ArrowStore


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
    found = _frame_columns(source, name)
    return _arrow_columns(source, name) if found is None else found


def is_parquet(source: Any) -> bool:
    """Return whether a source is the path or the pattern of local Parquet files, by its name."""
    if not isinstance(source, (str, os.PathLike)) or has_protocol(source):
        return False
    name = os.fspath(source)
    if not isinstance(name, str) or os.path.splitext(name)[1].lower() != ".parquet":
        return False
    return glob.has_magic(name) or not os.path.isdir(name)


def _frame_columns(source: Any, name: str) -> dict[Any, FrameStore] | None:
    """Return a read-only store for each column of a pandas or polars DataFrame; else None.

    The store shares the memory of a column that is one numpy or Arrow array of numbers. Other
    columns may be copied, so rows cannot be written back. The index of a pandas frame is not a
    column.

    Raises:
        StoreError: If the frame has no columns, or pinfeed cannot read a column.
        MissingDependency: If a column of lists or booleans needs pyarrow, which is not installed.
    """
    # If a library is not loaded, the source cannot be one of its frames.
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(source, pandas.DataFrame):
        _check_frame(list(source.columns), name)
        return {column: _pandas_store(source[column], name) for column in source.columns}
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(source, polars.DataFrame):
        _check_frame(source.columns, name)
        return {column: _polars_store(source[column], name) for column in source.columns}
    return None


def _check_frame(names: list[Any], name: str) -> None:
    if not names:
        raise StoreError(f"{name}: the frame has no columns; expected at least one")
    check_names(names, name, "rename them (df.columns = [...])")


def _pandas_store(series: Any, name: str) -> FrameStore:
    name = f"{name}[{series.name!r}]"
    kind = series.dtype
    if isinstance(kind, np.dtype):
        if kind.name in DTYPES:
            return _read_only(series.to_numpy(), name)
    elif type(kind).__name__ == "ArrowDtype":
        return ArrowStore(series.array.__arrow_array__(), name=name)
    elif (numbers := _numbers_of_masked(kind)) is not None:
        if series.isna().any():
            raise _nulls_error(name, "df.fillna", "df.dropna")
        return _read_only(series.to_numpy(dtype=numbers), name)
    raise _type_error(name, str(kind), _PANDAS_ADVICE)


def _numbers_of_masked(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype of the numbers of a nullable pandas dtype, such as Int64; else None."""
    is_masked = any(base.__name__ == "BaseMaskedDtype" for base in type(kind).__mro__)
    return kind.numpy_dtype if is_masked else None


def _polars_store(series: Any, name: str) -> FrameStore:
    name = f"{name}[{series.name!r}]"
    kind = str(series.dtype)
    if kind.partition("(")[0] in _POLARS_ADVICE:
        raise _type_error(name, kind, _POLARS_ADVICE)
    if series.null_count():
        raise _nulls_error(name, "df.fill_null", "df.drop_nulls")
    if series.dtype.is_numeric() and series.n_chunks() == 1:
        return _read_only(series.to_numpy(), name)
    try:
        column = series.to_arrow()
    except ImportError:
        raise MissingDependency(
            f"{name}: pyarrow is needed for a column of {kind}; {install_line('parquet')}"
        ) from None
    return ArrowStore(column, name=name)


def _read_only(array: Array, name: str) -> ArrayStore:
    view = array.view()
    view.flags.writeable = False
    return ArrayStore(view, name=name)


def _nulls_error(name: str, fill: str, drop: str) -> StoreError:
    return StoreError(
        f"{name} has nulls, but tensors have no nulls; fill them ({fill}), drop their rows "
        f"({drop}), {_LEAVE_OUT}"
    )


def _type_error(name: str, kind: str, advice: dict[str, str]) -> StoreError:
    found = next((hint for start, hint in advice.items() if kind.startswith(start)), "")
    todo = f"{found}, " if found else ""
    return StoreError(f"{name}: a column of {kind}; {_EXPECTED}; {todo}{_LEAVE_OUT}")


def _arrow_columns(source: Any, name: str) -> dict[str, ArrowStore] | None:
    """Return a store for each column of a pyarrow.Table or of a Hugging Face dataset; else None.

    The columns and rows of a dataset are those that ``dataset[i]`` shows.

    Raises:
        StoreError: If pinfeed cannot read a column, or if the rows of a dataset are not those of
            its table.
    """
    # If pyarrow is not loaded, the source cannot be a table.
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None:
        return None
    if isinstance(source, pyarrow.Table):
        check_names(source.column_names, name, "rename them with table.rename_columns")
        return {
            column: ArrowStore(source[column], name=f"{name}[{column!r}]")
            for column in source.column_names
        }
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
    stores = {
        column: ArrowStore(source.data.column(column), name=f"{name}[{column!r}]", indices=indices)
        for column in names
    }
    if view["type"] in ("numpy", "torch"):
        _check_format(view["type"], source[0], stores, name)
    return stores


def _is_dataset(source: Any) -> bool:
    """Return whether an object is a Hugging Face dataset, without importing the library."""
    dataset = ("datasets.arrow_dataset", "Dataset")
    return any((base.__module__, base.__name__) == dataset for base in type(source).__mro__)


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
