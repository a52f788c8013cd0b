"""Row indices: validation of those that a user gives, and the distinct ones among several."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import RowIndexError, described
from pinfeed.native.library import address_of, library, packing
from pinfeed.validation.suggestions import of_ids

Indices = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""

_UINT64 = np.dtype(np.uint64)
_pack = packing(4)


def check_rows(rows: Any, n_rows: int, name: str = "rows", *, copy: bool = False) -> Indices:
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
            checked: Indices = rows
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
        is_mask = array.dtype.kind == "b"
        hint = "; for a mask, give np.flatnonzero(mask)" if is_mask else of_ids(array.dtype)
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


def sort_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Sort row indices.

    Args:
        rows: Row indices, shape (n,).

    Returns:
        The rows in ascending order, and the position in ``rows`` of each. Equal rows keep their
        order. Both have shape (n,).
    """
    n_bits = (len(rows) - 1).bit_length()
    # As uint64, negative numbers are large, so that one maximum is enough.
    if int(rows.view(np.uint64).max(initial=0)) >> (63 - n_bits):
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    # numpy sorts integers many times faster than it finds the order that sorts them. Therefore the
    # position of each row is in the low bits of its key.
    keys = rows << n_bits
    keys |= np.arange(len(rows))
    keys.sort()
    order = keys & ((1 << n_bits) - 1)
    keys >>= n_bits
    return keys, order


def distinct_rows(rows: Indices) -> tuple[Indices, Indices]:
    """Find the distinct rows among row indices.

    Args:
        rows: Row indices, shape (n,); they may repeat.

    Returns:
        The distinct rows in ascending order, and for each of ``rows`` its position among them,
        shape (n,).
    """
    found = _compiled("distinct_rows", rows)
    if found is not None:
        n, distinct, positions = found
        return _shortened(distinct, n), positions
    distinct, positions = np.unique(rows, return_inverse=True)
    return distinct, positions


def first_occurrences(rows: Indices) -> tuple[Indices, Indices | None]:
    """Find the distinct rows among row indices, in the order in which they first occur.

    Args:
        rows: Row indices, shape (n,); they may repeat.

    Returns:
        The distinct rows, and for each of ``rows`` its position among them, shape (n,). No position
        is greater than that of the row itself. If no row repeats, these are ``rows`` and None.
    """
    if bool((rows[1:] > rows[:-1]).all()):
        return rows, None
    found = _compiled("first_occurrences", rows)
    if found is not None:
        n, distinct, positions = found
        return (rows, None) if n == len(rows) else (_shortened(distinct, n), positions)
    _, first, places = np.unique(rows, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return rows, None
    # The number of each distinct row, by its first occurrence.
    numbers = np.argsort(np.argsort(first))
    return rows[np.sort(first)], numbers[places]


def _shortened(rows: Indices, n: int) -> Indices:
    """Return the first ``n`` rows, in memory of at most twice their size."""
    return rows[:n] if 2 * n >= len(rows) else rows[:n].copy()


def _compiled(function: str, rows: Indices) -> tuple[int, Indices, Indices] | None:
    """Call a compiled function; see distinct.c.

    Returns:
        The number of distinct rows, an array of shape (n,) that begins with them, and the position
        of each row among them, shape (n,). None without compiled functions, or if a row is negative
        or too large for them.
    """
    native = library()
    if native is None:
        return None
    rows = np.ascontiguousarray(rows, np.int64)
    distinct, positions = np.empty_like(rows), np.empty_like(rows)
    address, *outputs = map(address_of, (rows, distinct, positions))
    call = getattr(native.of_rows(len(rows)), function)
    n_distinct = call(_pack(address, len(rows), *outputs))
    return None if n_distinct < 0 else (n_distinct, distinct, positions)
