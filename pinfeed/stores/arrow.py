"""ArrowStore: rows of an Arrow column, gathered from Arrow's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError, WriteBackError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import copy_runs
from pinfeed.stores.base import Array, checked_gather, in_words, run_of
from pinfeed.stores.formats.arrow_chunk import BYTES_PER_BIT, N_BITS, ragged_error, rows_of_chunk
from pinfeed.stores.runs import gather_rows
from pinfeed.validation.safe_repr import safe_repr

# Bytes of rows that are gathered from several chunks at a time.
_COLLECTED_BYTES = 1 << 20
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
        try:
            import pyarrow
        except ImportError:
            raise MissingDependency(f"{name}: pyarrow is needed; pip install pyarrow") from None
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
        counts = [chunk.shape[0] for chunk in self._chunks]
        self._n_stored = sum(counts)
        self._starts = np.cumsum([0, *counts[:-1]])
        self._indices = (
            None if indices is None else ArrowStore(indices, name=f"{name}: its indices")
        )

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}: {in_words(self)}>"

    @property
    def n_rows(self) -> int:
        return self._n_stored if self._indices is None else self._indices.n_rows

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
        is_one_array = len(self._chunks) == 1 and isinstance(self._chunks[0], np.ndarray)
        if is_one_array:
            return 0
        return _MAX_GATHERS * (_COLLECTED_BYTES + BYTES_PER_BIT * N_BITS)

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy rows into ``out``, like ``Store.gather``."""
        rows = checked_gather(self, rows, out)
        if self._indices is not None:
            numbers = np.empty(len(rows), self._indices.dtype)
            self._indices.gather(rows, numbers)
            rows = check_rows(numbers, self._n_stored, f"{self._name}: its indices")
        if (run := run_of(rows)) is not None:
            self._copy(run, out)
        elif len(self._chunks) == 1:
            # Rows are in range. With mode="raise", numpy would gather into a temporary buffer
            # first.
            self._chunks[0].take(rows, 0, out, "clip")
        else:
            step = max(1, _COLLECTED_BYTES * len(out) // max(1, out.nbytes))
            for i in range(0, len(rows), step):
                self._collect(rows[i : i + step], out[i : i + step])

    def gather_runs(self, runs: Runs, out: Array) -> None:
        """Copy runs of rows to their places in ``out``. The caller has checked all arguments."""
        chunks = self.arrays
        if self._indices is not None or len(chunks) < len(self._chunks):
            gather_rows(self, runs, out)
            return
        ends = np.append(self._starts[1:], self._n_stored)
        for number, part in runs.by_part(ends):
            copy_runs(chunks[number], part, out)

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

    def _copy(self, run: slice, out: Array) -> None:
        """Copy consecutive rows, chunk by chunk."""
        done = 0
        number = int(np.searchsorted(self._starts, run.start, side="right")) - 1
        while done < len(out):
            chunk = self._chunks[number]
            begin = run.start + done - int(self._starts[number])
            n = min(len(out) - done, chunk.shape[0] - begin)
            out[done : done + n] = chunk[begin : begin + n]
            done += n
            number += 1

    def _collect(self, rows: Rows, out: Array) -> None:
        """Gather rows in any order: first by chunk, then each row to its position."""
        order = np.argsort(rows)
        rows = rows[order]
        begins = np.searchsorted(rows, self._starts)
        counts = np.diff(begins, append=len(rows))
        rows -= np.repeat(self._starts, counts)
        found = np.empty_like(out)
        for number in np.flatnonzero(counts).tolist():
            part = slice(begins[number], begins[number] + counts[number])
            self._chunks[number].take(rows[part], 0, found[part], "clip")
        out[order] = found
