"""Columns of pandas and polars DataFrames, of Arrow tables and of Hugging Face datasets."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore, nulls_error
from pinfeed.stores.libraries import check_names, is_of
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.validation.suggestions import install_line

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


def frame_columns(source: Any, name: str) -> dict[Any, FrameStore] | None:
    """Return a read-only store for each column of a pandas or polars DataFrame; else None.

    The store shares the memory of a column that is one numpy or Arrow array of numbers. Other
    columns may be copied, so rows cannot be written back. The index of a pandas frame is not a
    column.

    Raises:
        StoreError: If the frame has no columns, or pinfeed cannot read a column.
        MissingDependency: If a column of lists or booleans needs pyarrow, which is not installed.
    """
    found = frame_series(source, name)
    if found is None:
        return None
    store = pandas_store if is_pandas(source) else polars_store
    return {column: store(series, name) for column, series in found.items()}


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
