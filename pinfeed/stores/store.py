"""Store: rows on the host. Checks of the arguments of its methods."""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows

if TYPE_CHECKING:
    from typing_extensions import Self

Array = npt.NDArray[Any]

SMALL_GATHER_BYTES = 64 << 10
"""Up to this size, copying row by row is faster than checking whether the rows are a slice."""


@runtime_checkable
class Store(Protocol):
    """Rows of equal shape and dtype, in host memory or in files.

    Any class that passes ``pinfeed.testing.suites.StoreTests`` is a store.

    Several reader threads call ``gather`` while the writer thread calls ``scatter``. If a row is
    gathered while it is being written, the result may be the old row, the new row or a mixture;
    pinfeed corrects it. pinfeed calls both with int64 row indices in range. Both must refuse
    invalid arguments before they change anything; ``checked_gather`` and ``checked_scatter`` of
    ``pinfeed.stores.store`` check the arguments for any store.

    Examples:
        >>> store = pinfeed.ArrayStore(np.arange(12.0).reshape(4, 3))
        >>> isinstance(store, pinfeed.Store)
        True
        >>> out = np.empty((2, *store.row_shape), store.dtype)
        >>> store.gather(np.array([3, 0]), out)
        >>> out[:, 0]
        array([9., 0.])
    """

    @property
    def n_rows(self) -> int:
        """Number of rows."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; ``()`` if a row is a single number."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the rows, one of ``pinfeed.tensors.dtypes.DTYPES``.

        bfloat16 is ``ml_dtypes.bfloat16``.
        """

    @property
    def writable(self) -> bool:
        """Whether rows can be written with ``scatter``."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of host memory that ``gather`` and ``scatter`` may need besides the rows."""

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``.

        Args:
            rows: Row indices, shape (n,); they may repeat.
            out: C-contiguous, shape (n, *row_shape), of the store's dtype.

        Raises:
            RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array
                of integers.
            ArgumentError: If ``out`` has another shape, dtype or layout, or is read-only.
        """

    def scatter(self, rows: Rows, values: Array) -> None:
        """Store values as rows.

        Args:
            rows: Distinct row indices, shape (n,).
            values: Shape (n, *row_shape), of the store's dtype.

        Raises:
            RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array
                of integers.
            WriteBackError: If the store is read-only, or if ``values`` is not a numpy array of this
                shape and dtype.
        """

    def flush(self) -> None:
        """Wait until all scattered rows are as durable as the medium allows."""

    def close(self) -> None:
        """Free the resources of the store. Further calls do nothing."""


def is_store(value: Any) -> bool:
    """Return whether an object is a Store, and not the class of one.

    ``isinstance`` takes 15 µs for a protocol with properties, so most other objects are excluded
    first.
    """
    is_like_store = hasattr(value, "row_shape") and not isinstance(value, type)
    return is_like_store and isinstance(value, Store)


def whole_numbers(shape: Any, name: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of int, each of any size and sign.

    Raises:
        StoreError: If it is not a tuple or list, is empty, or has an item that is not a whole
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
    """Return ``shape`` as a tuple of int, if a store of this shape and dtype can be made.

    Raises:
        StoreError: If it is not (n_rows, *row_shape) with at least one row, or has more bytes than
            can be addressed.
    """
    sizes = whole_numbers(shape, name)
    if sizes[0] < 1 or min(sizes) < 0:
        raise StoreError(
            f"{name}: shape {sizes} has no rows; expected (n_rows, ...) with at least one row"
        )
    # Memory and files are allocated in whole pages, and a file has a header.
    most = sys.maxsize - 2 * mmap.PAGESIZE
    # Axes of length zero do not count, because numpy also refuses an array with such an axis if the
    # other axes are too long.
    nbytes = math.prod(filter(None, sizes)) * dtype.itemsize
    if nbytes > most:
        raise StoreError(
            f"{name}: shape {sizes} of {dtype} needs {nbytes:,} bytes; expected at most {most:,}; "
            "use fewer or smaller rows"
        )
    return sizes


def row_nbytes(store: Store) -> int:
    """Return the number of bytes of one row."""
    return math.prod(store.row_shape) * store.dtype.itemsize


def in_words(store: Store) -> str:
    """Describe the number, the shape and the dtype of the rows."""
    return f"{store.n_rows:,} rows of shape {store.row_shape}, {store.dtype}"


class ClosedOnExit:
    """A context manager that closes itself at the end of a ``with`` block."""

    _owned: Sequence[Any] = ()
    """Stores that it has opened, and closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what the object has opened. Further calls do nothing."""
        with contextlib.ExitStack() as stack:
            for store in self._owned:
                stack.callback(store.close)


class ReadOnly(ClosedOnExit):
    """A store that refuses to write."""

    writable: bool = False

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse to write: the store is read-only.

        Raises:
            WriteBackError: Always.
        """
        raise WriteBackError(f"{self!r} is read-only; write to its sources themselves")

    def flush(self) -> None:
        """Do nothing, because nothing was written."""


def checked_gather(store: Store, rows: Any, out: Any) -> Rows:
    """Return ``rows`` as int64, if ``store.gather(rows, out)`` is possible.

    Raises:
        RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array of
            integers.
        ArgumentError: If ``out`` is not a writable, C-contiguous array of the shape and dtype of
            the rows.
    """
    checked = check_rows(rows, store.n_rows)
    if (problem := _misfit(store, len(checked), out)) is not None:
        raise ArgumentError(
            f"gather of {len(checked):,} rows into {problem}; give np.empty(shape, store.dtype)"
        )
    flags = out.flags
    if not (flags.c_contiguous and flags.writeable):
        problem = "read-only" if flags.c_contiguous else "not C-contiguous"
        raise ArgumentError(
            f"gather into an array that is {problem}; expected a writable, C-contiguous array; "
            "give np.empty(shape, store.dtype)"
        )
    return checked


def checked_scatter(store: Store, rows: Any, values: Any) -> Rows:
    """Return ``rows`` as int64, if ``store.scatter(rows, values)`` is possible.

    Raises:
        RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array of
            integers.
        WriteBackError: If ``values`` is not an array of the shape and dtype of the rows.
    """
    checked = check_rows(rows, store.n_rows)
    if (problem := _misfit(store, len(checked), values)) is not None:
        raise WriteBackError(
            f"scatter of {len(checked):,} rows from {problem}; convert with "
            "np.asarray(values, store.dtype)"
        )
    return checked


def _misfit(store: Store, n: int, array: Any) -> str | None:
    """Describe how an array differs from one that can hold n rows; return None if it can."""
    shape = (n, *store.row_shape)
    if isinstance(array, np.ndarray):
        if array.shape == shape and array.dtype == store.dtype:
            return None
        found = f"an array of shape {array.shape}, {array.dtype}"
    else:
        found = f"a {type(array).__name__}"
    return f"{found}; expected a numpy array of shape {shape}, {store.dtype}"


def run_of(rows: Rows) -> slice | None:
    """Return the rows as a slice, or None if they are not consecutive and ascending."""
    n = len(rows)
    if not n:
        return None
    first = rows.item(0)
    if rows.item(-1) - first != n - 1:
        return None
    if n > 2:
        # The n - 1 steps add up to n - 1, so all are 1 if none is less.
        steps = rows[1:] - rows[:-1]
        if steps.item(steps.argmin()) < 1:
            return None
    return slice(first, first + n)
