"""Stores of the columns of pandas and polars frames."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.base import Array
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.validation.requirements import install_line

_LEAVE_OUT = "or leave the column out (df.drop)"
_EXPECTED = "expected numbers or booleans"

# Advice for types of columns that a tensor cannot have, by the name of the type without parameters.
_PANDAS_ADVICE = {
    "category": "give its numbers: df[name].cat.codes",
    "str": "number the texts: pandas.factorize(df[name])[0]",
    "string": "number the texts: pandas.factorize(df[name])[0]",
    "datetime64": 'convert it: df[name].astype("int64")',
    "timedelta64": 'convert it: df[name].astype("int64")',
    "period": 'convert it: df[name].astype("int64")',
    "interval": "give its ends as two columns",
    "Sparse": "make it dense: df[name].sparse.to_dense()",
    "object": (
        "give np.stack(df[name]) if each object is a row of numbers, or "
        "pinfeed.RaggedStore(values, offsets) if the rows differ in length"
    ),
}
_POLARS_ADVICE = {
    "Categorical": "give its numbers: df[name].to_physical()",
    "Enum": "give its numbers: df[name].to_physical()",
    "String": "number the texts: df[name].cast(polars.Categorical).to_physical()",
    "Date": "convert it: df[name].to_physical()",
    "Datetime": "convert it: df[name].to_physical()",
    "Duration": "convert it: df[name].to_physical()",
    "Time": "convert it: df[name].to_physical()",
    "Decimal": "convert it: df[name].cast(polars.Float64)",
    "Struct": "give its fields as columns: df.unnest(name)",
    "Object": "convert it to numbers",
}

FrameStore = ArrayStore | ArrowStore


def frame_columns(source: Any, name: str) -> dict[Any, FrameStore] | None:
    """Return a read-only store for each column of a pandas or polars DataFrame.

    The store shares the memory of a column that is one numpy or Arrow array of numbers. Other
    columns may be copied, so rows cannot be written back. The index of a pandas frame is not a
    column.

    Args:
        source: A frame, or anything else.
        name: Name of the source in error messages.

    Returns:
        The stores by column name, or None if ``source`` is not a frame.

    Raises:
        StoreError: If the frame has no columns, or pinfeed cannot read a column.
        MissingDependency: If a column of lists or booleans needs pyarrow, which is not installed.
    """
    # If a library is not loaded, the source cannot be one of its frames.
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(source, pandas.DataFrame):
        _check_names(list(source.columns), name)
        return {column: _pandas_store(source[column], name) for column in source.columns}
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(source, polars.DataFrame):
        _check_names(source.columns, name)
        return {column: _polars_store(source[column], name) for column in source.columns}
    return None


def _check_names(names: list[Any], name: str) -> None:
    if not names:
        raise StoreError(f"{name}: the frame has no columns; expected at least one")
    if len(set(names)) < len(names):
        raise StoreError(
            f"{name}: several columns have the same name: {', '.join(map(str, names))}; rename "
            "them (df.columns = [...])"
        )


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
