"""Layout of the rows of a file without a header."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence

import numpy.typing as npt

from pinfeed.errors import FileMissing, StoreError
from pinfeed.stores.base import whole_numbers
from pinfeed.stores.row_layout import RowLayout, require_regular
from pinfeed.tensors.dtypes import numpy_dtype_of


def raw_layout(path: str, shape: Sequence[int], dtype: npt.DTypeLike, offset: int) -> RowLayout:
    """Return the layout of the rows that begin after ``offset`` bytes of a file.

    Args:
        path: The file.
        shape: Shape (n_rows, *row_shape); an n_rows of -1 stands for all rows of the file.
        dtype: Dtype of the items, as numpy or torch spells it.
        offset: Bytes before the first row.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the shape or the offset is invalid, the file is truncated, n_rows is -1 and
            the file does not end with a whole row, or torch does not have the dtype.
    """
    items = numpy_dtype_of(dtype, path)
    size = size_of(path)
    n_rows, *row_shape = whole_numbers(shape, path)
    if type(offset) is bool or not hasattr(offset, "__index__"):
        raise StoreError(f"{path}: offset={offset!r}; expected a whole number of bytes")
    if n_rows < -1 or min(row_shape, default=0) < 0 or offset < 0:
        raise StoreError(
            f"{path}: shape={shape}, offset={offset}; expected (n_rows, ...), or (-1, ...) for "
            "all rows of the file"
        )
    row_nbytes = items.itemsize * math.prod(row_shape)
    if not row_nbytes:
        raise StoreError(
            f"{path}: shape={shape} of {items} has rows of 0 bytes; expected at least 1 on each "
            "axis"
        )
    if n_rows == -1:
        n_rows, rest = divmod(max(0, size - offset), row_nbytes)
        if rest:
            raise StoreError(
                f"{path}: {size} bytes minus offset={offset} are {n_rows} rows of {row_nbytes} "
                f"bytes and {rest} more bytes; expected whole rows; give the shape, dtype and "
                "offset that the file was written with, or the number of rows"
            )
    return RowLayout(path, items, n_rows, tuple(row_shape), int(offset)).check(size)


def size_of(path: str) -> int:
    """Return the size of a file, in bytes.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the path is a directory, a pipe, a socket or a device.
    """
    try:
        require_regular(path)
        status = os.stat(path)
    except FileNotFoundError:
        raise FileMissing(f"{path}: no such file (looked in {os.getcwd()})") from None
    if stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path} is a directory; expected a file, or a pattern such as {path}/*")
    return status.st_size
