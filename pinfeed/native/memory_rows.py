"""MemoryRows: rows in memory, which compiled functions copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import library, packing

Indices = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""


class MemoryPart(NamedTuple):
    """Rows at equal distances in memory, or in a mapped file; see ``pf_rows`` in pinfeed.h."""

    address: int
    """Address of the first row."""
    n_rows: int
    """Number of rows, at least one."""
    stride: int
    """Bytes from one row to the next; rows may overlap."""
    limit: int = 0
    """Address of the end of the mapped file; 0 for memory that cannot fail."""
    size: int = 0
    """Bytes that the file has at least."""
    fd: int = -1
    """Descriptor of the file."""


class MemoryRows:
    """Rows in memory, and the compiled functions that copy them.

    Methods raise ``error()`` if a mapped file has shrunk, or a page of it could not be loaded.

    Args:
        owner: Object that keeps the memory alive.
        row_nbytes: Bytes of a row.
        parts: The rows, in order.
        error: Returns the error of a copy that has failed.
    """

    __slots__ = ("_copy", "_copy_runs", "_pack", "description", "error", "owner", "row_nbytes")

    def __init__(
        self,
        owner: object,
        row_nbytes: int,
        parts: Sequence[MemoryPart],
        error: Callable[[], Exception] = RuntimeError,
    ) -> None:
        found = library()
        assert found is not None
        self.owner = owner
        self.error = error
        self.row_nbytes = row_nbytes
        description = [row_nbytes, len(parts)]
        first = 0
        for part in parts:
            description += [*part, first]
            first += part.n_rows
        self.description = tuple(description)
        """Description of the rows, as the compiled functions take it."""
        self._pack = packing(6 + len(description))
        self._copy = found.copy
        self._copy_runs = found.copy_runs

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> MemoryRows | None:
        """Return the rows of an array; None if the array, or the installation, has none."""
        if library() is None or not array[0].flags.c_contiguous:
            return None
        part = MemoryPart(array.ctypes.data, len(array), array.strides[0])
        return cls(array, array[0].nbytes, [part])

    def gather(
        self, rows: Indices, out: npt.NDArray[Any], positions: Indices | None = None
    ) -> None:
        """Copy rows into ``out``.

        Args:
            rows: Row indices in range, shape (m,).
            out: C-contiguous, with n rows.
            positions: Positions in ``out``, shape (m,); None for the first m.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        places = 0
        if positions is not None:
            positions = np.ascontiguousarray(positions, np.int64)
            places = positions.ctypes.data
        request = (
            rows.__array_interface__["data"][0],
            0,
            len(rows),
            out.__array_interface__["data"][0],
            len(out),
            places,
        )
        if self._copy(self._pack(*request, *self.description)):
            raise self.error()

    def gather_to(self, rows: Indices, address: int) -> None:
        """Copy rows to memory for as many rows, given its address."""
        rows = np.ascontiguousarray(rows, np.int64)
        n = len(rows)
        request = (rows.ctypes.data, 0, n, address, n, 0)
        if self._copy(self._pack(*request, *self.description)):
            raise self.error()

    def read_run(self, first: int, out: npt.NDArray[Any]) -> None:
        """Copy the rows from ``first`` on into ``out``."""
        request = (0, first, len(out), out.ctypes.data, len(out), 0)
        if self._copy(self._pack(*request, *self.description)):
            raise self.error()

    def gather_runs(
        self, starts: Indices, lengths: Indices, places: Indices, out: npt.NDArray[Any]
    ) -> None:
        """Copy runs of rows to their places in ``out``.

        Args:
            starts: First row of each run, which is in range.
            lengths: Number of rows of each run.
            places: Position in ``out`` of the first row of each run.
            out: C-contiguous, with n rows.
        """
        runs = [np.ascontiguousarray(numbers, np.int64) for numbers in (starts, lengths, places)]
        addresses = [numbers.ctypes.data for numbers in runs]
        request = (*addresses, len(starts), out.ctypes.data, len(out))
        if self._copy_runs(self._pack(*request, *self.description)):
            raise self.error()
