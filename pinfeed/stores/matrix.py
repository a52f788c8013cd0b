"""MatrixStore: a matrix whose columns are those of a DataFrame, a table or a dataset in memory.

MatrixColumns is the rule by which columns become those of a matrix, for tables in files, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore, numeric_dtype, rows_of_chunk, validity, without_nulls
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.formats import FORMATS
from pinfeed.stores.host_rows import gather_rows, unchecked_gather
from pinfeed.stores.libraries import check_names, is_of
from pinfeed.stores.opened import (
    arrow_table,
    frame_series,
    is_pandas,
    numbers_of_masked,
    open_store,
    pandas_store,
    polars_store,
    polars_to_arrow,
)
from pinfeed.stores.store import Array, Store, in_words, is_store, run_of
from pinfeed.tensors.argument_types import DTypeLike, Source
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import explain_arguments

# Rows of a column that are converted at a time, so that the caches of a core hold them.
_STEP_ROWS = 1 << 13
# Memory for a row of a step: the numbers of a column, row indices and their order in Arrow chunks.
_STEP_ROW_NBYTES = 64
# Most gathers that run at the same time.
_MAX_GATHERS = 8


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


@dataclass(frozen=True)
class _Column:
    """A column of numbers, and where it has values."""

    values: Store | None
    """The numbers; None if all are missing."""
    valid: Store | None = None
    """Booleans that are False where a value is missing; None if none is."""
    n_missing: int = 0
    is_opened: bool = False
    """Whether the matrix has opened the numbers, and so closes them."""


class MatrixStore(FileStore):
    """Read-only rows of a matrix, whose columns are those of a table in memory.

    A batch is one tensor instead of a dict of columns, which needs one gather instead of many. If
    the order is not sequential and a copy of the matrix fits in memory, the columns are converted
    once, during the first epoch, and the plan counts the copy. Otherwise, each batch gathers its
    rows from each column. The table must not change while the store is open.

    Args:
        source: A pandas or polars DataFrame, a ``pyarrow.Table``, a Hugging Face dataset, or a dict
            of arrays or other sources with one number in each row. Stores of tables in files
            have an argument ``columns`` themselves.
        columns: Names of the columns, by default all.
        dtype: Dtype of the rows, by default the smallest one that holds all columns. Numbers are
            rounded to the nearest float, as by numpy; integers must fit.
        missing: Number in place of missing values, such as ``float("nan")``. By default, missing
            values are an error. Nulls are missing, and in a pandas frame also NaN. In other
            sources, NaN is a number, and stays as it is.

    Raises:
        MissingDependency: If a column needs pyarrow, which is not installed.
        StoreError: If the source is none of these or lacks a column, or if a column has no rows,
            missing values, or anything but numbers and booleans.
        ArgumentError: If ``columns`` is not a sequence of names, or ``missing`` is not a number of
            the dtype.

    Examples:
        >>> import pyarrow
        >>> table = pyarrow.table({"age": [30, 40], "income": [1.5, None], "name": ["a", "b"]})
        >>> store = pinfeed.MatrixStore(
        ...     table, ["age", "income"], dtype="float32", missing=float("nan")
        ... )
        >>> with pinfeed.Feeder(store, batch_size=2) as feeder:
        ...     (batch,) = feeder
        >>> batch
        tensor([[30.0000,  1.5000],
                [40.0000,     nan]])
    """

    loaded = "converted"

    @explain_arguments({})
    def __init__(
        self,
        source: Source,
        columns: Sequence[object] | None = None,
        *,
        dtype: DTypeLike | None = None,
        missing: float | None = None,
    ) -> None:
        kind = type(source).__name__
        wanted = None if columns is None else checked_columns(columns)
        found = _columns_of(source, wanted, kind)
        label = f"{kind}[{len(found)} columns]"
        _check_lengths(found, label)
        dtypes = {
            name: None if column.values is None else column.values.dtype
            for name, column in found.items()
        }
        self._rule = MatrixColumns.of_dtypes(dtypes, dtype, missing, label)
        for name, column in found.items():
            self._rule.require_none_missing(name, column.n_missing)
        self._columns = found
        self._owned = [column.values for column in found.values() if column.is_opened]
        n_rows = max(
            column.values.n_rows if column.values else column.n_missing for column in found.values()
        )
        super().__init__(label, (), (n_rows, len(found)), self._rule.dtype)
        self.nbytes = self.n_rows * self.row_nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}: {in_words(self)}>"

    @property
    def resident_bytes(self) -> int:
        # Masks, and booleans of Arrow columns, have a byte for each row.
        stores = [store for one in self._columns.values() for store in (one.values, one.valid)]
        unpacked = sum(store.n_rows for store in stores if store and store.dtype == np.bool_)
        return unpacked + _MAX_GATHERS * _STEP_ROWS * _STEP_ROW_NBYTES

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        self._require_open()
        for i in range(0, len(rows), _STEP_ROWS):
            part = rows[i : i + _STEP_ROWS]
            target = out[i : i + _STEP_ROWS]
            run = run_of(part)
            for number, column in enumerate(self._columns.values()):
                self._gather_column(column, part, run, target[:, number])

    def gather_runs(self, runs: Runs, out: Array) -> None:
        gather_rows(self, runs, out)

    def _gather_column(self, column: _Column, rows: Rows, run: slice | None, out: Array) -> None:
        if column.values is None:
            out[...] = self._rule.missing
            return
        values = column.values
        array = values.array if isinstance(values, (ArrayStore, ArrowStore)) else None
        if run is not None and array is not None:
            self._rule.convert(array[run], out)
        else:
            numbers = np.empty(len(rows), values.dtype)
            unchecked_gather(values)(rows, numbers)
            self._rule.convert(numbers, out)
        if column.valid is not None:
            valid = np.empty(len(rows), np.bool_)
            unchecked_gather(column.valid)(rows, valid)
            out[~valid] = self._rule.missing


def _columns_of(source: Any, wanted: list[Any] | None, kind: str) -> dict[Any, _Column]:
    """Return the columns of a source by name, in the wanted order.

    Raises:
        StoreError: If the source has no columns, lacks one, or has one that pinfeed cannot read.
    """
    if (series := frame_series(source, kind)) is not None:
        column = _pandas_column if is_pandas(source) else _polars_column
        chosen = _chosen(series, wanted, kind)
        return {name: column(one, f"{kind}[{name!r}]", kind) for name, one in chosen.items()}
    if (table := arrow_table(source, kind)) is not None:
        columns, indices = table
        chosen = _chosen(columns, wanted, kind)
        return {
            name: _arrow_column(one, f"{kind}[{name!r}]", indices) for name, one in chosen.items()
        }
    if isinstance(source, Mapping):
        chosen = _chosen(source, wanted, kind)
        return {name: _other_column(one, f"{kind}[{name!r}]") for name, one in chosen.items()}
    tables = " or ".join(one.table for one in FORMATS.values() if one.table)
    raise StoreError(
        f"MatrixStore: got {kind}; expected a pandas or polars DataFrame, a pyarrow.Table, a "
        f"Hugging Face dataset, or a dict of columns; for a table in a file, give {tables}, and "
        "give an array straight to the Feeder"
    )


def _chosen(columns: Mapping[Any, Any], wanted: list[Any] | None, kind: str) -> dict[Any, Any]:
    names = list(columns) if wanted is None else wanted
    for name in names:
        if name not in columns:
            raise StoreError(
                f"{kind} has no column {name!r}; expected one of {', '.join(map(repr, columns))}"
            )
    if not names:
        raise StoreError(f"{kind} has no columns; expected at least one")
    return {name: columns[name] for name in names}


def _check_lengths(columns: Mapping[Any, _Column], label: str) -> None:
    """Check that all columns have equally many rows.

    Raises:
        StoreError: If they do not.
    """
    found = [(name, one.values) for name, one in columns.items() if one.values is not None]
    for (one, first), (name, values) in itertools.pairwise(found):
        if first.n_rows != values.n_rows:
            raise StoreError(
                f"{label}: unequal numbers of rows: {one!r} has {first.n_rows:,}, {name!r} "
                f"{values.n_rows:,}; expected equal numbers"
            )


def _pandas_column(series: Any, name: str, kind: str) -> _Column:
    if type(series.dtype).__name__ == "ArrowDtype":
        return _arrow_column(series.array.__arrow_array__(), name)
    is_missing = series.isna().to_numpy()
    n_missing = int(np.count_nonzero(is_missing))
    numbers = numbers_of_masked(series.dtype)
    if not n_missing or numbers is None:
        values: Store = pandas_store(series, kind)
    else:
        values = ArrayStore(series.to_numpy(dtype=numbers, na_value=0), name=name)
    return _Column(values, ArrayStore(~is_missing) if n_missing else None, n_missing)


def _polars_column(series: Any, name: str, kind: str) -> _Column:
    if series.null_count():
        return _arrow_column(polars_to_arrow(series, name), name)
    return _Column(_numbers(polars_store(series, kind), name))


def _arrow_column(column: Any, name: str, indices: Any = None) -> _Column:
    """Return an Arrow column, on its memory."""
    import pyarrow

    dtype = numeric_dtype(column.type, name)
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    if dtype is None:
        n_rows = len(column) if indices is None else len(indices)
        return _Column(None, None, n_rows)
    values = pyarrow.chunked_array(list(map(without_nulls, chunks)), column.type)
    store = ArrowStore(values, name=name, indices=indices)
    if not column.null_count:
        return _Column(store)
    valid = pyarrow.chunked_array(list(map(validity, chunks)), pyarrow.bool_())
    return _Column(store, ArrowStore(valid, name=name, indices=indices), column.null_count)


def _other_column(source: Any, name: str) -> _Column:
    if is_of(source, "pyarrow", "ChunkedArray", "Array"):
        return _arrow_column(source, name)
    is_opened = not is_store(source)
    store = open_store(source, name) if is_opened else source
    return _Column(_numbers(store, name), is_opened=is_opened)


def _numbers(store: Store, name: str) -> Store:
    """Return a store, if it has one number in each row.

    Raises:
        StoreError: If it has not.
    """
    if store.row_shape:
        raise StoreError(
            f"{name}: rows of shape {store.row_shape}; expected one number in each row, because it "
            "becomes one column of a matrix; give it as a source of its own"
        )
    return store
