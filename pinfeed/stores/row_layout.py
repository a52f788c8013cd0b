"""RowLayout: position, shape and dtype of the rows of one file."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pinfeed.errors import StoreError


@dataclass(frozen=True)
class RowLayout:
    """Layout of rows that begin at equal distances in a file; they may overlap."""

    path: str
    dtype: np.dtype[Any]
    """Dtype as in the file, which may have the other byte order."""
    n_rows: int
    row_shape: tuple[int, ...]
    offset: int
    """Bytes before the first row."""
    gap: int = 0
    """Bytes from the end of one row to the beginning of the next; negative if rows overlap."""

    @functools.cached_property
    def row_nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)

    @functools.cached_property
    def stride(self) -> int:
        """Bytes from the beginning of one row to the beginning of the next."""
        return self.row_nbytes + self.gap

    @functools.cached_property
    def end(self) -> int:
        """Smallest size of the file, in bytes."""
        return self.offset + self.span(self.n_rows)

    def span(self, n_rows: int) -> int:
        """Return the bytes from the beginning of a row to the end of ``n_rows`` rows."""
        return n_rows * self.stride - self.gap if n_rows else 0

    def begin(self, row: int) -> int:
        """Return the bytes before a row."""
        return self.offset + row * self.stride

    def check(self, size: int) -> RowLayout:
        """Return the layout itself, if a file of ``size`` bytes holds it.

        Raises:
            StoreError: If the file is truncated, or if rows of 0 bytes are too many to count.
        """
        shape = (self.n_rows, *self.row_shape)
        # numpy refuses axes whose product is too large even if another axis is zero.
        nbytes_without_zeros = math.prod(filter(None, shape)) * self.dtype.itemsize
        if nbytes_without_zeros > sys.maxsize >= self.end:
            raise StoreError(
                f"{self.path}: shape {shape} has rows of 0 bytes, and more rows than numpy can "
                "count"
            )
        if self.end > size:
            raise StoreError(
                f"{self.path} is truncated: {self.n_rows} rows of {self.row_nbytes} bytes from "
                f"byte {self.offset} on need {self.end} bytes in all; the file has {size}; copy or "
                "save it again"
            )
        return self


def covered_nbytes(layouts: Iterable[RowLayout]) -> int:
    """Return the bytes of files from the first row of each layout to its last.

    A byte that several layouts cover counts once.
    """
    total = 0
    path = None
    reached = 0
    for layout in sorted(layouts, key=lambda layout: (layout.path, layout.offset)):
        if layout.path != path:
            path = layout.path
            reached = 0
        total += max(0, layout.end - max(layout.offset, reached))
        reached = max(reached, layout.end)
    return total
