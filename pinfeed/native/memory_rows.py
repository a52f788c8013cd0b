"""MemoryRows: rows at equal distances in memory, which compiled functions copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import library, packing

Indices = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""

# Bytes of a line of the processor's caches.
_LINE = 64

_pack_copy = packing(15)
_pack_copy_runs = packing(14)


class MappedPart(NamedTuple):
    """The file in which mapped rows are."""

    limit: int
    """Address of the end of the file in memory."""
    size: int
    """Bytes that the file has at least."""
    fd: int
    """Descriptor of the file."""


_MEMORY = MappedPart(0, 0, -1)


class MemoryRows:
    """Rows at equal distances in memory, and the compiled functions that copy them.

    Methods raise ``error()`` if a mapped file has shrunk, or a page of it could not be loaded.

    Args:
        owner: Object that keeps the memory alive.
        address: Address of the first row.
        n_rows: Number of rows, at least one.
        stride: Bytes from one row to the next; rows may overlap.
        row_nbytes: Bytes of a row.
        file: File that is mapped; by default, the rows are in memory that cannot fail.
        error: Returns the error of a copy that has failed.
    """

    __slots__ = ("_copy", "_copy_runs", "description", "error", "owner", "row_nbytes")

    def __init__(
        self,
        owner: object,
        address: int,
        n_rows: int,
        stride: int,
        row_nbytes: int,
        file: MappedPart = _MEMORY,
        error: Callable[[], Exception] = RuntimeError,
    ) -> None:
        found = library()
        assert found is not None
        self.owner = owner
        self.error = error
        self.row_nbytes = row_nbytes
        self.description = (address, n_rows, stride, *file, row_nbytes)
        """Description of the rows, as the compiled functions take it."""
        self._copy = found.copy
        self._copy_runs = found.copy_runs

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> MemoryRows | None:
        """Return the rows of an array; None if the array, or the installation, has none."""
        if library() is None or not array[0].flags.c_contiguous:
            return None
        return cls(array, array.ctypes.data, len(array), array.strides[0], array[0].nbytes)

    def gather(
        self,
        rows: Indices,
        out: npt.NDArray[Any],
        positions: Indices | None = None,
        *,
        bypass: bool = False,
    ) -> None:
        """Copy rows into ``out``.

        Args:
            rows: Row indices in range, shape (m,).
            out: C-contiguous, with n rows.
            positions: Positions in ``out``, shape (m,); None for the first m.
            bypass: Whether to write past the caches of the processor, if ``out`` permits it.
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
            self.row_nbytes,
            places,
            bypass,
        )
        if self._copy(_pack_copy(*self.description, *request)):
            raise self.error()

    def gather_to(self, rows: Indices, address: int) -> None:
        """Copy rows to memory for as many rows, given its address."""
        rows = np.ascontiguousarray(rows, np.int64)
        n = len(rows)
        request = (rows.ctypes.data, 0, n, address, n, self.row_nbytes, 0, 0)
        if self._copy(_pack_copy(*self.description, *request)):
            raise self.error()

    def read_run(self, first: int, out: npt.NDArray[Any]) -> None:
        """Copy the rows from ``first`` on into ``out``."""
        request = (0, first, len(out), *self._target(out), 0, 0)
        if self._copy(_pack_copy(*self.description, *request)):
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
        request = (*addresses, len(starts), *self._target(out))
        if self._copy_runs(_pack_copy_runs(*self.description, *request)):
            raise self.error()

    @property
    def has_whole_lines(self) -> bool:
        """Whether each row consists of whole lines of the caches, so that writes bypass them."""
        address, _, stride = self.description[:3]
        return not (address % _LINE or stride % _LINE or self.row_nbytes % _LINE)

    def scatter(self, rows: Indices, values: npt.NDArray[Any]) -> None:
        """Write rows, past the caches of the processor if they have whole lines.

        The rows are in memory, not in a mapped file. Of a row that occurs twice, the last value
        remains.

        Args:
            rows: Row indices in range, shape (m,).
            values: C-contiguous, with m rows.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        address, n_rows, stride = self.description[:3]
        n = len(rows)
        source = (values.ctypes.data, n, self.row_nbytes, *_MEMORY, self.row_nbytes)
        request = (0, 0, n, address, n_rows, stride, rows.ctypes.data, True)
        self._copy(_pack_copy(*source, *request))

    def _target(self, out: npt.NDArray[Any]) -> tuple[int, int, int]:
        return out.ctypes.data, len(out), self.row_nbytes
