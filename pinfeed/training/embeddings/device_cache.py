"""The size of a table's cache on the device: the user's argument, and the number of rows."""

from __future__ import annotations

import numbers
from typing import Any, Literal

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human, parse_size

DeviceCacheSize = int | float | str
"""Bytes as an int or as text such as ``"4GiB"``, a share of the rows as a float, or ``"auto"``.

``"auto"`` fits the memory limits.
"""


def check_device_cache(size: Any) -> int | float | Literal["auto"] | None:
    """Return the size of a cache as an int, a float or ``"auto"``, or None for no cache.

    Raises:
        ArgumentError: If it is something else, is not above 0, or is a share above 1.
    """
    if size is None:
        return None
    if isinstance(size, str) and size == "auto":
        return "auto"
    is_share = isinstance(size, numbers.Real) and not isinstance(size, numbers.Integral)
    if is_share and 0 < float(size) <= 1:
        return float(size)
    note = ", or a share of the rows as a float above 0 and up to 1.0 (0.1), 'auto' or None"
    return parse_size(size, "device_cache", note=note)


def n_cached_rows(size: int | float, n_rows: int, row_nbytes: int, name: str) -> int:
    """Return the number of rows that a cache of a given size holds, at most all rows.

    Args:
        size: Bytes as an int, or a share of the rows as a float. A share is at least one row.
        n_rows: Rows of the table.
        row_nbytes: Bytes of a row with its optimizer state.
        name: Name of the table in errors.

    Raises:
        ArgumentError: If the size is smaller than a row.
    """
    if isinstance(size, float):
        return max(1, int(size * n_rows))
    n = size // row_nbytes
    if not n:
        raise ArgumentError(
            f"device_cache={size} of {name} holds no row: a row with its optimizer state has "
            f"{human(row_nbytes)}; expected at least as many bytes, or a share of the rows as a "
            "float (1.0 for all rows)"
        )
    return min(n_rows, n)
