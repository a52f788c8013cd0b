"""ArrowStore: rows of an Arrow column, gathered from Arrow's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import StoreError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import COPIED_BYTES
from pinfeed.stores.arrow_arrays import (
    BYTES_PER_BIT,
    N_BITS,
    copy_chunk_runs,
    ragged_error,
    rows_of_chunk,
)
from pinfeed.stores.host_rows import gather_rows
from pinfeed.stores.libraries import imported
from pinfeed.stores.store import Array, checked_gather, in_words, run_of
from pinfeed.validation.safe_repr import safe_repr

# Most gathers that run at the same time.
_MAX_GATHERS = 8


class ArrowStore:
    """Read-only rows of an Arrow column, on Arrow's memory.

    If the column is in a memory-mapped file, a gather reads only the rows that it needs.

    The column contains numbers, or lists of numbers that all have the same length. Nested lists
    give the shape of a row. Lists of fixed size, ``FixedShapeTensorType`` and the ``Array2D`` of
    Hugging Face are also supported. A gather unpacks booleans, which are bits in Arrow. A column
    may have any number of chunks; a random gather needs a few microseconds for each chunk that it
    touches.

    Args:
        column: A ``pyarrow.ChunkedArray`` or ``pyarrow.Array``, at least one row.
        name: Name of the column in error messages.
        indices: A column of row indices: row i of the store is row ``indices[i]`` of ``column``. By
            default, it is row i.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If the column has no rows, has nulls, has lists of different lengths, or
            contains anything but numbers.

    Examples:
        >>> import pyarrow
        >>> table = pyarrow.table({"x": [1.0, 2.0, 3.0]})
        >>> store = pinfeed.ArrowStore(table["x"], name="x")
        >>> with pinfeed.Feeder(store, batch_size=3) as feeder:
        ...     (batch,) = feeder
        >>> batch
        tensor([1., 2., 3.], dtype=torch.float64)
    """

    writable = False

    def __init__(self, column: Any, *, name: str = "column", indices: Any = None) -> None:
        pyarrow = imported("pyarrow", f"{name}: pyarrow is needed; pip install pyarrow")
        if not isinstance(column, (pyarrow.ChunkedArray, pyarrow.Array)):
            raise StoreError(
                f"{name}: got {type(column).__name__}; expected a pyarrow.ChunkedArray or a "
                "pyarrow.Array"
            )
        chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        self._name = name
        self._chunks = [rows_of_chunk(chunk, name) for chunk in chunks if len(chunk)]
        if not self._chunks:
            raise StoreError(f"{name}: the column has no rows; expected at least one")
        for chunk in self._chunks:
            if chunk.shape[1:] != self.row_shape:
                raise ragged_error(name, self.row_shape, chunk.shape[1:])
        self._ends = np.cumsum([chunk.shape[0] for chunk in self._chunks])
        self._indices = (
            None if indices is None else ArrowStore(indices, name=f"{name}: its indices")
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {in_words(self)}>"

    @property
    def n_rows(self) -> int:
        return int(self._ends[-1]) if self._indices is None else self._indices.n_rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._chunks[0].shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._chunks[0].dtype

    @property
    def arrays(self) -> list[Array]:
        """The rows of the chunks that contain numbers, not bits."""
        return [chunk for chunk in self._chunks if isinstance(chunk, np.ndarray)]

    @property
    def resident_bytes(self) -> int:
        if len(self.arrays) == len(self._chunks) == 1:
            return 0
        return _MAX_GATHERS * (COPIED_BYTES + BYTES_PER_BIT * N_BITS)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        rows = checked_gather(self, rows, out)
        if self._indices is not None:
            numbers = np.empty(len(rows), self._indices.dtype)
            self._indices.gather(rows, numbers)
            rows = check_rows(numbers, int(self._ends[-1]), f"{self._name}: its indices")
        chunks = self.arrays
        if len(chunks) == len(self._chunks) == 1 and run_of(rows) is None:
            # Rows are in range. With mode="raise", numpy would gather into a temporary buffer
            # first.
            chunks[0].take(rows, 0, out, "clip")
        else:
            self._copy(Runs(rows, np.ones_like(rows), np.arange(len(rows))), out)

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their places in ``out``. The caller has checked all arguments."""
        if self._indices is not None:
            gather_rows(self, runs, out)
        else:
            self._copy(runs, out)

    def scatter(self, rows: Rows, values: Array) -> None:
        """Refuse to write: Arrow columns do not change.

        Raises:
            WriteBackError: Always.
        """
        raise WriteBackError(f"{self._name}: an Arrow column is read-only")

    def flush(self) -> None:
        """Do nothing, because nothing was written."""

    def close(self) -> None:
        """Do nothing, because the column belongs to the caller."""

    def _copy(self, runs: Runs, out: Array) -> None:
        for number, part in runs.merged().by_part(self._ends):
            copy_chunk_runs(self._chunks[number], part, out)
