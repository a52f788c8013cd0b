"""Checks of row indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import RowIndexError, described
from pinfeed.rows.orders import Rows


def check_rows(rows: Any, n_rows: int, name: str = "rows", *, copy: bool = False) -> Rows:
    """Return row indices as a contiguous int64 array, shape (n,), each in [0, n_rows).

    Args:
        rows: Row indices, an array-like of integers.
        n_rows: Number of rows that exist.
        name: Name of the row indices in errors.
        copy: Copy always, because the caller may change ``rows`` later.

    Raises:
        RowIndexError: If ``rows`` is not a 1-d array of integers, or a row is negative or too
            large.
    """
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise RowIndexError(
            f"{name}: {described(error)}; expected a 1-d array of integer row numbers (mask: np.flatnonzero)"
        ) from None
    if array.shape == (0,):
        # numpy takes an empty list for floats.
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RowIndexError(
            f"{name}: got shape {array.shape} of {array.dtype}; expected a 1-d array of integer row numbers (mask: np.flatnonzero)"
        )
    if len(array):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= n_rows:
            wrong = low if low < 0 else high
            raise RowIndexError(
                f"{name}: row {wrong} is out of range; expected 0 <= row < {n_rows}"
            )
    return (
        array.astype(np.int64, order="C") if copy else np.ascontiguousarray(array, dtype=np.int64)
    )
