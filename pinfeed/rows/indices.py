"""check_rows: validation of the row indices that a user gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import RowIndexError, described
from pinfeed.rows.orders import Rows

_UINT64 = np.dtype(np.uint64)


def check_rows(rows: Any, n_rows: int, name: str = "rows", *, copy: bool = False) -> Rows:
    """Convert row indices to a contiguous int64 array, and check that all are in range.

    Args:
        rows: Row indices, an array or a sequence of shape (n,).
        n_rows: Number of rows that exist.
        name: Name of the argument, for error messages.
        copy: Whether the result must not share memory with ``rows``, which the user may change.

    Returns:
        Row indices, shape (n,), int64, each in [0, n_rows).

    Raises:
        RowIndexError: If an element is not an integer, is negative or is too large.
    """
    # Every batch passes this check. As uint64, negative numbers are large, so one maximum is
    # enough. argmax takes a third of the time of max, which is a function in Python.
    if type(rows) is np.ndarray and rows.dtype == np.int64 and rows.ndim == 1 and len(rows):
        # The copy is checked, because the user may change the array now.
        if copy or not rows.flags.c_contiguous:
            rows = rows.copy()
        if 0 <= rows.item(rows.view(_UINT64).argmax()) < n_rows:
            checked: Rows = rows
            return checked
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise RowIndexError(
            f"{name}: {described(error)}; expected a 1-d array of integer row indices"
        ) from None
    if array.shape == (0,):
        # numpy gives an empty list the dtype float64.
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wanted = "integer row indices" if array.ndim == 1 else "a 1-d array of integer row indices"
        hint = "; for a mask, give np.flatnonzero(mask)" if array.dtype.kind == "b" else ""
        raise RowIndexError(
            f"{name}: got shape {array.shape} of {array.dtype}; expected {wanted}{hint}"
        )
    if copy:
        array = array.copy()
    if len(array):
        low = int(array.min())
        high = int(array.max())
        if low < 0 or high >= n_rows:
            wrong = low if low < 0 else high
            raise RowIndexError(
                f"{name}: row {wrong} is out of range; expected 0 <= row < {n_rows}"
            )
    return np.ascontiguousarray(array, dtype=np.int64)
