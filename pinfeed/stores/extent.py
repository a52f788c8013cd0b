"""Extent: where the rows of one file are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import StoreError


@dataclass(frozen=True)
class Extent:
    """Rows that lie one after another in a file."""

    path: str
    dtype: np.dtype[Any]
    """As in the file, which may have the other byte order."""
    n_rows: int
    row_shape: tuple[int, ...]
    offset: int
    """Bytes before the first row."""

    @property
    def row_nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def end(self) -> int:
        """Bytes that the file needs to have."""
        return self.offset + self.n_rows * self.row_nbytes

    def check(self, size: int) -> Extent:
        """Itself, if a file of ``size`` bytes holds it.

        Raises:
            StoreError: The file is truncated.
        """
        if self.end > size:
            raise StoreError(
                f"{self.path} is truncated: {self.n_rows} rows of {self.row_nbytes} bytes from byte {self.offset} on need {self.end} bytes "
                f"in all; the file has {size}; copy or save it again"
            )
        return self
