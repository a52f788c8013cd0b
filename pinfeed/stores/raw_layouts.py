"""Layouts of the rows of files without a header, and of windows over the items of a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.npy_header import MAGIC, read_header, strange
from pinfeed.stores.paths import file_size
from pinfeed.stores.sharded_file import RowLayout
from pinfeed.stores.store import whole_numbers
from pinfeed.tensors.dtypes import dtype_of, numpy_dtype_of
from pinfeed.validation.arguments import whole_number
from pinfeed.validation.suggestions import of_file


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
    size = file_size(path)
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


class Windows:
    """Windows of consecutive items of a flat file, as ``NpyStore.windows`` describes them.

    Raises:
        ArgumentError: If an argument is not a whole number, ``length`` or ``step`` is below 1,
            ``start`` is negative, or ``span`` ends before the window.
    """

    def __init__(self, length: Any, step: Any, start: Any, span: Any) -> None:
        self.length = whole_number(length, "length")
        self.step = whole_number(step, "step")
        self.start = whole_number(start, "start", least=0)
        least = self.start + self.length
        note = f", because start={start} and length={length} need this many items"
        self.span = least if span is None else whole_number(span, "span", least=least, note=note)

    @property
    def in_words(self) -> str:
        """The items that one window needs, for errors."""
        return (
            f"{self.span:,} for one window of length={self.length} with start={self.start} and "
            f"span={self.span}"
        )

    def count(self, n_items: int) -> int:
        """Return the number of windows of a sequence of items."""
        return max(0, (n_items - self.span) // self.step + 1)

    def layouts(self, series: Sequence[RowLayout]) -> list[RowLayout]:
        """Return the layouts of the windows of files, given layouts in which a row is one item.

        Raises:
            StoreError: If no file is as long as ``span``.
        """
        found = [self._layout(items) for items in series]
        if not any(layout.n_rows for layout in found):
            longest = max(series, key=lambda items: items.n_rows)
            raise StoreError(
                f"{longest.path} has {longest.n_rows:,} items; expected at least {self.in_words}; "
                "give a smaller length, a longer file, or across_files=True if all files are one "
                "sequence"
            )
        return found

    def _layout(self, items: RowLayout) -> RowLayout:
        n_rows = self.count(items.n_rows)
        return dataclasses.replace(
            items,
            n_rows=n_rows,
            row_shape=(self.length, *items.row_shape),
            offset=items.begin(self.start if n_rows else 0),
            # Without a second window, the step may be longer than any file.
            gap=(self.step - self.length) * items.row_nbytes if n_rows > 1 else 0,
        )


def series_layout(path: str, dtype: npt.DTypeLike | None, offset: int) -> RowLayout:
    """Return the layout of the items of a .npy file, or of a flat file without a header.

    A file with the signature of a .npy file is read as one. Any other file needs a dtype.

    Args:
        path: The file.
        dtype: Dtype of the items; None takes the dtype from the header of a .npy file.
        offset: Bytes before the first item of a file without a header.

    Raises:
        FileMissing: If there is no such file.
        ArgumentError: If ``offset`` is given for a .npy file, or is negative.
        StoreError: If the file has neither a header nor a dtype, is named .npy and is not a .npy
            file, or cannot be read, or if its items have 0 bytes.
    """
    offset = whole_number(offset, "offset", least=0)
    size = file_size(path)
    with open(path, "rb") as file:
        start = file.read(12)
    if not start.startswith(MAGIC):
        if dtype is None or path.endswith(".npy"):
            raise StoreError(_no_series(path, start))
        return _flat_layout(path, size, dtype, offset)
    if offset:
        raise ArgumentError(
            f"{path}, offset={offset}: the header of a .npy file says where the items begin; "
            "leave offset out, and give start= to begin at a later item"
        )
    items = read_header(path, None if dtype is None else dtype_of(dtype, "NpyStore"))
    if not items.row_nbytes:
        raise StoreError(
            f"{path}: items of shape {items.row_shape} have 0 bytes; expected at least 1 on each "
            "axis"
        )
    return items


def _flat_layout(path: str, size: int, dtype: npt.DTypeLike, offset: int) -> RowLayout:
    """Return the layout of all items of a file without a header, which has ``size`` bytes."""
    items = numpy_dtype_of(dtype, path)
    n_items, rest = divmod(max(0, size - offset), items.itemsize)
    if rest:
        raise StoreError(
            f"{path}: {size:,} bytes minus offset={offset} are {n_items:,} items of {items} and "
            f"{rest} more bytes; expected whole items; give the dtype and the offset that the "
            "file was written with"
        )
    return RowLayout(path, items, n_items, (), offset).check(size)


def _no_series(path: str, start: bytes) -> str:
    """Return an error message about a file that has neither a header nor a dtype."""
    if not start or path.endswith(".npy") or of_file(path, start):
        return strange(path, start)
    return (
        f"{path} has no header (it starts with {start[:6]!r}), so the dtype of its items is "
        'unknown; expected a .npy file, or dtype= of the items, such as dtype="uint16"'
    )
