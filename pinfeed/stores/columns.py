"""MatrixColumns: the rule by which columns of a table become the columns of a matrix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.arrow import rows_of_chunk
from pinfeed.stores.libraries import check_names
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import dtype_of


@dataclass(frozen=True)
class MatrixColumns:
    """Names of the columns of a table, in the order of the matrix, and how they are converted."""

    names: tuple[Any, ...]
    dtype: np.dtype[Any]
    missing: Any
    """Number of this dtype in place of missing values; None if there must be none."""
    label: str
    """Name of the table in errors."""

    @classmethod
    def of_dtypes(
        cls, dtypes: dict[Any, np.dtype[Any] | None], dtype: Any, missing: Any, label: str
    ) -> MatrixColumns:
        """Return the rule for columns of some dtypes.

        Args:
            dtypes: Dtype of each column by name; None if all values of the column are missing.
            dtype: Dtype of the matrix; None for the smallest one that holds all columns.
            missing: Number in place of missing values, or None.
            label: Name of the table in errors.

        Raises:
            ArgumentError: If ``missing`` is not a number of the dtype.
            StoreError: If ``dtype`` is unknown, or does not hold the integers of a column.
        """
        known = [one for one in dtypes.values() if one is not None]
        chosen = np.result_type(*known or [np.dtype(np.float64)])
        if dtype is not None:
            chosen = dtype_of(dtype, label)
        for name, one in dtypes.items():
            # As in numpy and pandas, numbers are rounded to the nearest float.
            rounds = chosen.kind not in "iub"
            if one is not None and not rounds and not np.can_cast(one, chosen):
                raise StoreError(
                    f"{label}: column {name!r} of {one} does not fit into dtype={chosen.name!r}; "
                    "expected a dtype that holds every value; give a wider one, such as "
                    '"float32" or "int64"'
                )
        return cls(tuple(dtypes), chosen, _fill_value(missing, chosen), label)

    @functools.cached_property
    def numbers(self) -> dict[Any, int]:
        """Number of each column in the matrix, by name."""
        return {name: number for number, name in enumerate(self.names)}

    def copy(self, table: Any, names: Sequence[Any], out: Array) -> None:
        """Copy some columns of a ``pyarrow.RecordBatch`` into the matrix of its rows.

        Raises:
            StoreError: If a column has missing values, and nothing takes their place.
        """
        matrix = out.reshape(len(out), len(self.names))
        for name in names:
            self._copy_column(table[name], name, matrix[:, self.numbers[name]])

    def convert(self, values: Array, out: Array) -> None:
        """Copy values into a column, converted to its dtype as by ``numpy.ndarray.astype``."""
        # A number that is too large becomes infinite without a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = values

    def require_none_missing(self, name: Any, n_missing: int) -> None:
        """Check that missing values have a number that takes their place.

        Raises:
            StoreError: If they do not.
        """
        if n_missing and self.missing is None:
            raise StoreError(
                f"{self.label}: column {name!r} has {n_missing:,} missing values (nulls); expected "
                'none; give missing=, such as missing=float("nan") or missing=0, or leave the '
                "column out"
            )

    def _copy_column(self, array: Any, name: Any, out: Array) -> None:
        import pyarrow

        n_missing: int = array.null_count
        self.require_none_missing(name, n_missing)
        if pyarrow.types.is_null(array.type):
            out[...] = self.missing
            return
        self.convert(rows_of_chunk(without_nulls(array), self.label), out)
        if n_missing:
            out[~rows_of_chunk(validity(array), self.label)] = self.missing


def checked_columns(columns: Any) -> list[Any]:
    """Return the names of columns as a list.

    Raises:
        ArgumentError: If they are not a sequence of names, or there are none.
        StoreError: If a name occurs twice.
    """
    try:
        if isinstance(columns, (str, bytes)):
            raise TypeError
        names = list(columns)
    except TypeError:
        raise ArgumentError(
            f"columns={columns!r}; expected the names of several columns, such as "
            'columns=["age", "income"]'
        ) from None
    if not names:
        raise ArgumentError("columns has no names; expected at least one")
    check_names(names, "columns", "name each column once")
    return names


def numeric_dtype(kind: Any, name: str) -> np.dtype[Any] | None:
    """Return the dtype of a column of an Arrow type; None if all its values are missing.

    Raises:
        StoreError: If its values are not numbers.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_null(kind):
        return None
    has_shape = isinstance(kind, pyarrow.BaseExtensionType) and hasattr(kind, "shape")
    if (
        has_shape
        or types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        raise StoreError(
            f"{name}: a column of {kind}; expected one number in each row, because it becomes one "
            "column of a matrix; give it as a source of its own, without dtype= and missing="
        )
    return rows_of_chunk(pyarrow.nulls(0, kind), name).dtype


def without_nulls(array: Any) -> Any:
    """Return an Arrow array of numbers on the same memory; nulls become any numbers."""
    import pyarrow

    if not array.null_count:
        return array
    buffers = [None, array.buffers()[1]]
    return pyarrow.Array.from_buffers(array.type, len(array), buffers, 0, array.offset)


def validity(array: Any) -> Any:
    """Return booleans that are False where an Arrow array has nulls."""
    import pyarrow

    if not array.null_count:
        return pyarrow.array(np.ones(len(array), np.bool_))
    buffers = [None, array.buffers()[0]]
    return pyarrow.Array.from_buffers(pyarrow.bool_(), len(array), buffers, 0, array.offset)


def _fill_value(missing: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Return the number in place of missing values, in the dtype of the matrix.

    Raises:
        ArgumentError: If it is not a number, or if the dtype does not have it.
    """
    if missing is None:
        return None
    if not isinstance(missing, (Real, np.bool_)):
        raise ArgumentError(
            f"missing={missing!r}; expected a number in place of missing values, such as "
            'float("nan") or 0, or None to refuse them'
        )
    try:
        with np.errstate(over="ignore"):
            value = dtype.type(missing)
    except (OverflowError, ValueError):
        value = None
    if dtype.kind in "iub":
        fits = value is not None and value == missing
    else:
        # A float is rounded to the dtype, but must not become infinite.
        fits = bool(np.isfinite(value) == np.isfinite(float(missing)))
    if not fits:
        raise ArgumentError(
            f"missing={missing!r} is not a number of {dtype}; expected one that it has; give "
            'another dtype, such as dtype="float32", or another number'
        )
    return np.array(value, dtype)
