"""Store: rows of equal shape and dtype that live on the host."""

from __future__ import annotations

import math
import mmap
import operator
import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows

Array = npt.NDArray[Any]


@runtime_checkable
class Store(Protocol):
    """Where rows live on the host.

    Anything that passes ``pinfeed.testing.suites.StoreTests`` is one.

    ``gather`` is called by several readers' threads and ``scatter`` by the writer's, at the same
    time; a gather of a row that is being written may give the old row, the new one or a mixture,
    and pinfeed repairs it. pinfeed calls both with row numbers of int64, in range. Both refuse
    arguments that do not fit before anything changes; ``checked_gather`` and ``checked_scatter`` of
    ``pinfeed.stores.base`` do that for any store.
    """

    @property
    def n_rows(self) -> int:
        """Number of rows."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; ``()`` for a column of numbers."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the rows, one of ``pinfeed.tensors.dtypes.DTYPES``; bfloat16 is ``ml_dtypes.bfloat16``."""

    @property
    def writable(self) -> bool:
        """Whether ``scatter`` works."""

    @property
    def resident_bytes(self) -> int:
        """Host memory that ``gather`` and ``scatter`` may take beside the rows themselves, in bytes."""

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy the rows, shape (n,), into ``out``, C-contiguous, shape (n, *row_shape), of the store's dtype. Rows may repeat.

        Raises:
            RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array
                of integers.
            ArgumentError: If ``out`` has another shape, dtype or layout, or is read-only.
        """

    def scatter(self, rows: Rows, values: Array) -> None:
        """Store ``values``, shape (n, *row_shape), of the store's dtype, as the rows, shape (n,), each of which is there once.

        Raises:
            RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array
                of integers.
            WriteBackError: If ``values`` is no numpy array of this shape and dtype.
        """

    def flush(self) -> None:
        """Return when all scattered rows are as durable as the medium allows."""

    def close(self) -> None:
        """Free what the store holds. Idempotent."""


def whole_numbers(shape: Any, name: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of int, each of any size and sign.

    Raises:
        StoreError: If it is no tuple or list, is empty, or has something in it that is not a whole
            number.
    """
    try:
        if (
            not isinstance(shape, (tuple, list))
            or not shape
            or any(isinstance(n, (bool, np.bool_)) for n in shape)
        ):
            raise TypeError
        return tuple(map(operator.index, shape))
    except TypeError:
        raise StoreError(
            f"{name}: shape={shape!r}; expected (n_rows, ...), whole numbers with at least one row"
        ) from None


def shape_to_make(shape: Any, dtype: np.dtype[Any], name: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of int, if a store of this shape and dtype can be made as far as can be said before it is.

    Raises:
        StoreError: If it is not (n_rows, *row_shape) with at least one row, or has more bytes than
            an address can tell.
    """
    sizes = whole_numbers(shape, name)
    if sizes[0] < 1 or min(sizes) < 0:
        raise StoreError(
            f"{name}: shape {sizes} has no rows; expected (n_rows, ...) with at least one row"
        )
    # Memory and files are made in whole pages, and a file has a header.
    most = sys.maxsize - 2 * mmap.PAGESIZE
    # Axes of length zero do not count: numpy refuses such an array, too, if the others are too
    # long.
    nbytes = math.prod(filter(None, sizes)) * dtype.itemsize
    if nbytes > most:
        raise StoreError(
            f"{name}: shape {sizes} of {dtype} takes {nbytes:,} bytes; expected at most {most:,}; make fewer or smaller rows"
        )
    return sizes


def row_nbytes(store: Store) -> int:
    """Bytes of one row."""
    return math.prod(store.row_shape) * store.dtype.itemsize


def in_words(store: Store) -> str:
    """The number, the shape and the dtype of the rows."""
    return f"{store.n_rows:,} rows of shape {store.row_shape}, {store.dtype}"


def checked_gather(store: Store, rows: Any, out: Any) -> Rows:
    """Return ``rows`` as int64, if ``store.gather(rows, out)`` can be done.

    Raises:
        RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array of
            integers.
        ArgumentError: If ``out`` is no writable, C-contiguous array of the shape and dtype of the
            rows.
    """
    checked = _in_range(rows, store)
    if (problem := _misfit(store, len(checked), out)) is not None:
        raise ArgumentError(
            f"gather of {len(checked):,} rows into {problem}; give np.empty(shape, store.dtype)"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ArgumentError(
            f"gather into an array that is {'read-only' if out.flags.c_contiguous else 'not C-contiguous'}; expected one that can be "
            "written and is C-contiguous; give np.empty(shape, store.dtype)"
        )
    return checked


def checked_scatter(store: Store, rows: Any, values: Any) -> Rows:
    """Return ``rows`` as int64, if ``store.scatter(rows, values)`` can be done.

    Raises:
        RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array of
            integers.
        WriteBackError: If ``values`` is no array of the shape and dtype of the rows.
    """
    checked = _in_range(rows, store)
    if (problem := _misfit(store, len(checked), values)) is not None:
        raise WriteBackError(
            f"scatter of {len(checked):,} rows from {problem}; convert with np.asarray(values, store.dtype)"
        )
    return checked


def _in_range(rows: Any, store: Store) -> Rows:
    # Every gather of a loop passes here. Negative numbers are large ones as uint64, so that one
    # maximum is enough.
    is_plain = type(rows) is np.ndarray and rows.dtype == np.int64 and rows.ndim == 1
    if is_plain and len(rows) and np.maximum.reduce(rows.view(np.uint64)) < store.n_rows:
        checked: Rows = rows
        return checked
    return check_rows(rows, store.n_rows)


def _misfit(store: Store, n: int, array: Any) -> str | None:
    """Return in words how an array differs from one that can hold n rows; None if it is one."""
    shape = (n, *store.row_shape)
    if isinstance(array, np.ndarray):
        if array.shape == shape and array.dtype == store.dtype:
            return None
        found = f"an array of shape {array.shape}, {array.dtype}"
    else:
        found = f"a {type(array).__name__}"
    return f"{found}; expected a numpy array of shape {shape}, {store.dtype}"


def run_of(rows: Rows) -> slice | None:
    """The rows as a slice, if they are consecutive and ascending."""
    n = len(rows)
    if n and rows[-1] - rows[0] == n - 1 and (n < 3 or bool((rows[1:] - rows[:-1] == 1).all())):
        return slice(int(rows[0]), int(rows[0]) + n)
    return None
