"""Rows for the test suites, of any dtype and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sample(n: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make ``n`` rows that differ from each other, whatever the dtype."""
    numbers = np.arange(n * int(np.prod(row_shape))).reshape(n, *row_shape)
    return (numbers % 2 == 0) if dtype.kind == "b" else (numbers % 251).astype(dtype)
