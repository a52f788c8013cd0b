"""SlidingWindows: rows that are windows of consecutive items of a flat file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.npy import MAGIC, read_header, strange
from pinfeed.stores.raw_file import size_of
from pinfeed.stores.row_layout import RowLayout
from pinfeed.tensors.dtypes import dtype_of, numpy_dtype_of
from pinfeed.validation.arguments import whole_number
from pinfeed.validation.suggestions import of_file


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of equal length that begin at equal distances in a series of items."""

    length: int
    step: int
    start: int
    """Items before the first window."""
    span: int
    """Items that the file must have from ``i * step`` on for window i to exist."""

    @classmethod
    def of_arguments(cls, length: Any, step: Any, start: Any, span: Any) -> SlidingWindows:
        """Return the windows that the arguments of a user describe.

        Raises:
            ArgumentError: If an argument is not a whole number, ``length`` or ``step`` is below 1,
                ``start`` is negative, or ``span`` ends before the window.
        """
        length = whole_number(length, "length")
        step = whole_number(step, "step")
        start = whole_number(start, "start", least=0)
        if span is None:
            return cls(length, step, start, start + length)
        note = f", because start={start} and length={length} need this many items"
        return cls(length, step, start, whole_number(span, "span", least=start + length, note=note))

    def layouts(self, series: Sequence[RowLayout]) -> list[RowLayout]:
        """Return the layouts of the windows of files, given layouts in which a row is one item.

        Raises:
            StoreError: If items have 0 bytes, or if no file is as long as ``span``.
        """
        for items in series:
            if not items.row_nbytes:
                raise StoreError(
                    f"{items.path}: items of shape {items.row_shape} have 0 bytes; expected at "
                    "least 1 on each axis"
                )
        found = [self._layout(items) for items in series]
        if not any(layout.n_rows for layout in found):
            longest = max(series, key=lambda items: items.n_rows)
            raise StoreError(
                f"{longest.path} has {longest.n_rows:,} items; expected at least {self.span:,} "
                f"for one window of length={self.length} with start={self.start} and "
                f"span={self.span}; give a smaller length, or a longer file"
            )
        return found

    def _layout(self, items: RowLayout) -> RowLayout:
        n_rows = max(0, (items.n_rows - self.span) // self.step + 1)
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
            file, or cannot be read.
    """
    offset = whole_number(offset, "offset", least=0)
    size = size_of(path)
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
    return read_header(path, None if dtype is None else dtype_of(dtype, "MmapStore"))


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
