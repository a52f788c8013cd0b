"""Store: rows of equal shape and dtype that live on the host."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..rows import Rows

Array = npt.NDArray[Any]


@runtime_checkable
class Store(Protocol):
    """Where rows live on the host. Anything that passes ``pinfeed.testing.suites.StoreTests`` is one.

    ``gather`` is called by several readers' threads and ``scatter`` by the writer's, at the same time; a gather of a row that is being
    written may give the old row, the new one or a mixture, and pinfeed repairs it. Row numbers are int64, in range.
    """

    @property
    def n_rows(self) -> int:
        """Number of rows."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; ``()`` for a column of numbers."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native dtype of the rows, one of ``pinfeed.dtypes.DTYPES``; bfloat16 is ``ml_dtypes.bfloat16``."""

    @property
    def writable(self) -> bool:
        """Whether ``scatter`` works."""

    @property
    def resident_bytes(self) -> int:
        """Host memory that ``gather`` and ``scatter`` may take beside the rows themselves, in bytes."""

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy the rows, shape (n,), into ``out``, C-contiguous, shape (n, *row_shape), of the store's dtype. Rows may repeat."""

    def scatter(self, rows: Rows, values: Array) -> None:
        """Store ``values``, shape (n, *row_shape), as the rows, shape (n,), each of which is there once."""

    def flush(self) -> None:
        """Return when all scattered rows are as durable as the medium allows."""

    def close(self) -> None:
        """Free what the store holds. Idempotent."""


def row_nbytes(store: Store) -> int:
    """Bytes of one row."""
    return math.prod(store.row_shape) * store.dtype.itemsize


def run_of(rows: Rows) -> slice | None:
    """The rows as a slice, if they are consecutive and ascending."""
    n = len(rows)
    if n and rows[-1] - rows[0] == n - 1 and (n < 3 or bool((rows[1:] - rows[:-1] == 1).all())):
        return slice(int(rows[0]), int(rows[0]) + n)
    return None
