"""Stores of the sources that users give: paths, arrays, tables and frames of other libraries."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore, nulls_error
from pinfeed.stores.file_store import RowLayout
from pinfeed.stores.formats import FORMATS, ArrayFormat
from pinfeed.stores.libraries import check_names, is_of
from pinfeed.stores.npy_header import read_header
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.paths import file_key, has_protocol, mapping_at
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.store import Array, Store, is_store
from pinfeed.stores.text import TextStore, is_text
from pinfeed.stores.window_store import AxisWindow, WindowStore
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.validation.suggestions import install_line, is_array_like

_LEAVE_OUT = "or leave the column out (df.drop)"
_EXPECTED = "expected numbers or booleans"

# Advice for types of columns that a tensor cannot have, by the name of the type without parameters.
_PANDAS_ADVICE = {
    "category": "give its numbers: df[name].cat.codes",
    **dict.fromkeys(
        ("str", "string"),
        "give pinfeed.TextStore(pyarrow.array(df[name])), or number the texts: "
        "pandas.factorize(df[name])[0]",
    ),
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
    "String": (
        "give pinfeed.TextStore(df[name].to_arrow()), or number the texts: "
        "df[name].cast(polars.Categorical).to_physical()"
    ),
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
    if is_of(source, "pyarrow", "ChunkedArray", "Array"):
        return ArrowStore(source, name=name)
    return next(filter(None, (one.store_of(source) for one in FORMATS.values())), None)


def stores_of_columns(source: Any, name: str) -> Mapping[Any, Store | TextStore] | None:
    """Return a store for each column of a table, a dataset, a frame or a file with a table.

    Columns of a frame share its memory if they are one numpy or Arrow array of numbers. Others may
    be copied, so their rows cannot be written back. The index of a pandas frame is not a column.

    Args:
        source: One of these, or anything else.
        name: Name of the source in errors.

    Returns:
        The stores by column name, or None if ``source`` has no columns.

    Raises:
        StoreError: If pinfeed cannot read a column, or a frame has no columns.
        MissingDependency: If a column of lists or booleans needs pyarrow, which is not installed.
    """
    for one in FORMATS.values():
        if (columns := one.columns_of(source)) is not None:
            return columns
    if (series := frame_series(source, name)) is not None:
        store = pandas_store if is_pandas(source) else polars_store
        return {column: store(one, name) for column, one in series.items()}
    return _arrow_columns(source, name)


def _arrow_columns(source: Any, name: str) -> dict[str, ArrowStore | TextStore] | None:
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
        column: (TextStore if is_text(values) else ArrowStore)(
            values, name=f"{name}[{column!r}]", indices=indices
        )
        for column, values in columns.items()
    }
    if _is_dataset(source) and (kind := source.format["type"]) in ("numpy", "torch"):
        numbers = {column: one for column, one in stores.items() if isinstance(one, ArrowStore)}
        _check_format(kind, source[0], numbers, name)
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
    if is_of(source, "pyarrow", "Table"):
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


def _is_store_or_array(value: Any) -> bool:
    """Return whether an object is one source, not a structure of sources.

    A Store is one source, and so is an array of another library. An object with a
    shape and a dtype is a structure of sources if all its fields are arrays and tensors, as in a
    TensorDict.
    """
    fields = list(getattr(value, "__dict__", {}).values())
    is_structure = bool(fields) and all(
        isinstance(field, np.ndarray) or hasattr(field, "data_ptr") for field in fields
    )
    is_array = is_array_like(value) and not is_structure
    formats = (one for one in FORMATS.values() if isinstance(one, ArrayFormat))
    # Some libraries have groups that are dataclasses, whose fields are not sources.
    return is_store(value) or is_array or any(one.is_group(value) for one in formats)


def leaves_of(
    source: Any, name: str
) -> tuple[list[tuple[str, Any]], Rebuild, list[Store | TextStore]]:
    """Flatten a source into its leaves, with the columns of each table, dataset, frame and file.

    Args:
        source: The user's source.
        name: Name of the source in errors.

    Returns:
        The leaves, each with its path in the source; a function that builds the structure from new
        leaves; and the stores of columns that were made.

    Raises:
        StoreError: If the source is a dict of Hugging Face datasets, or a column cannot be read.
    """
    if is_dataset_dict(source):
        raise StoreError(
            f"{name} is a DatasetDict of {', '.join(map(repr, source))}; expected one data set, "
            "because its splits have other rows; give one of them, such as dataset['train']"
        )
    leaves, rebuild = flatten(source, is_leaf=_is_store_or_array)
    found = [stores_of_columns(leaf, f"{name}{path}") for path, leaf in leaves]
    made = [store for columns in found if columns is not None for store in columns.values()]
    if all(columns is None for columns in found):
        return leaves, rebuild, made
    replaced = rebuild(
        leaf if columns is None else columns
        for columns, (_, leaf) in zip(found, leaves, strict=True)
    )
    return *flatten(replaced, is_leaf=_is_store_or_array), made


def store_of_map(array: Any) -> NpyStore | WindowStore | None:
    """Return a store of the file of a numpy memory map, or of sliding windows over one.

    A store is better than the map, because a feeder reads its rows ahead and counts them in its
    plan. In addition, a file that has shrunk is an error, while the map would end the process.

    Returns:
        A store, or None for anything else.
    """
    store = _store_of_whole(array) if isinstance(array, np.memmap) else None
    if store is None and isinstance(array, np.ndarray):
        return _store_of_windows(array)
    return store


def _store_of_whole(array: np.memmap[Any, Any]) -> NpyStore | None:
    """Return a store of the file that ``numpy.load(path, mmap_mode=...)`` has mapped."""
    if (
        not isinstance(array.base, mmap.mmap)
        or array.filename is None
        or array.mode not in ("r", "r+")
    ):
        # A part of a map, or a map with private changes.
        return None
    try:
        header = read_header(os.fspath(array.filename))
    except StoreError:
        return None
    if (header.offset, header.dtype, header.n_rows, *header.row_shape) != (
        array.offset,
        array.dtype,
        *array.shape,
    ):
        return None
    return NpyStore(header.path, mode=array.mode) if _is_file_of(array) else None


def _store_of_windows(array: Array) -> WindowStore | None:
    """Return a read-only store of the file over which ``sliding_window_view`` has made windows.

    Addresses and strides of the windows say where each row is in the file. The result is
    None if the rows do not overlap, or if the items of a row are not consecutive.
    """
    if array.ndim < 2 or not array.size:
        return None
    row_nbytes = array.itemsize * math.prod(array.shape[1:])
    if not 0 < array.strides[0] < row_nbytes or not array[0].flags.c_contiguous:
        return None
    whole = _map_below(array)
    if whole is None or whole.filename is None or whole.mode not in ("r", "r+"):
        return None
    begin = array.ctypes.data - whole.ctypes.data
    length = row_nbytes // array.itemsize
    step, rest = divmod(array.strides[0], array.itemsize)
    n_items = (len(array) - 1) * step + length
    items = RowLayout(os.fspath(whole.filename), array.dtype, n_items, (), whole.offset + begin)
    if rest or begin < 0 or items.end > whole.offset + whole.nbytes or not _is_file_of(whole):
        return None
    items = items.check(os.path.getsize(items.path))
    store = NpyStore._of_layouts([items], "r", keep_cache=None, memory_map=True)
    axes = {0: AxisWindow(length, step, stride=1, start=0, span=length)}
    return WindowStore(store, [[n_items]], axes, owned=True, row_shape=array.shape[1:])


def _map_below(array: Array) -> np.memmap[Any, Any] | None:
    """Return the memory map that an array is a view of, or None."""
    owner: Any = array
    while owner is not None:
        below = getattr(owner, "base", None)
        if isinstance(owner, np.memmap) and isinstance(below, mmap.mmap):
            return owner
        owner = below
    return None


def _is_file_of(array: np.memmap[Any, Any]) -> bool:
    """Return whether the file with the name of a map is the mapped file."""
    mapping = mapping_at(array.ctypes.data)
    # The file may have been removed or replaced since it was mapped.
    return mapping is not None and mapping.file == file_key(os.fspath(array.filename or ""))


def frame_series(source: Any, name: str) -> dict[Any, Any] | None:
    """Return the columns of a pandas or polars DataFrame by name; None for anything else.

    Raises:
        StoreError: If the frame has no columns, or two columns have the same name.
    """
    if not is_pandas(source) and not is_of(source, "polars", "DataFrame"):
        return None
    names = list(source.columns)
    if not names:
        raise StoreError(f"{name}: the frame has no columns; expected at least one")
    check_names(names, name, "rename them (df.columns = [...])")
    return {column: source[column] for column in names}


def is_pandas(source: Any) -> bool:
    """Return whether an object is a pandas DataFrame, without importing the library."""
    return is_of(source, "pandas", "DataFrame")


def pandas_store(series: Any, name: str) -> FrameStore:
    """Return a read-only store of a column of a pandas frame.

    Raises:
        StoreError: If pinfeed cannot read it.
    """
    name = f"{name}[{series.name!r}]"
    kind = series.dtype
    if isinstance(kind, np.dtype):
        if kind.name in DTYPES:
            return read_only(series.to_numpy(), name)
    elif type(kind).__name__ == "ArrowDtype":
        return ArrowStore(series.array.__arrow_array__(), name=name)
    elif (numbers := numbers_of_masked(kind)) is not None:
        if series.isna().any():
            raise nulls_error(name)
        return read_only(series.to_numpy(dtype=numbers), name)
    raise _type_error(name, str(kind), _PANDAS_ADVICE)


def numbers_of_masked(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype of the numbers of a nullable pandas dtype, such as Int64; else None."""
    is_masked = any(base.__name__ == "BaseMaskedDtype" for base in type(kind).__mro__)
    return kind.numpy_dtype if is_masked else None


def polars_store(series: Any, name: str) -> FrameStore:
    """Return a read-only store of a column of a polars frame.

    Raises:
        StoreError: If pinfeed cannot read it.
        MissingDependency: If it needs pyarrow, which is not installed.
    """
    name = f"{name}[{series.name!r}]"
    kind = str(series.dtype)
    if kind.partition("(")[0] in _POLARS_ADVICE:
        raise _type_error(name, kind, _POLARS_ADVICE)
    if series.null_count():
        raise nulls_error(name)
    if series.dtype.is_numeric() and series.n_chunks() == 1:
        return read_only(series.to_numpy(), name)
    return ArrowStore(polars_to_arrow(series, name), name=name)


def polars_to_arrow(series: Any, name: str) -> Any:
    """Return a column of a polars frame as a ``pyarrow.Array``.

    Raises:
        MissingDependency: If pyarrow is not installed.
    """
    try:
        return series.to_arrow()
    except ImportError:
        raise MissingDependency(
            f"{name}: pyarrow is needed for a column of {series.dtype}; {install_line('pyarrow')}"
        ) from None


def read_only(array: Array, name: str) -> ArrayStore:
    """Return a store of an array that refuses to write."""
    view = array.view()
    view.flags.writeable = False
    return ArrayStore(view, name=name)


def _type_error(name: str, kind: str, advice: dict[str, str]) -> StoreError:
    found = next((hint for start, hint in advice.items() if kind.startswith(start)), "")
    todo = f"{found}, " if found else ""
    return StoreError(f"{name}: a column of {kind}; {_EXPECTED}; {todo}{_LEAVE_OUT}")
