"""MemoryRows: rows in memory, which compiled functions copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import address_of, library, packing

Indices = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""

# Bytes of a line of the processor's caches.
_LINE = 64


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
        self._parts = parts
        self.description = _description(row_nbytes, parts)
        """Description of the rows, as the compiled functions take it."""
        self._pack = packing(7 + len(self.description))
        self._copy = found.copy
        self._copy_runs = found.copy_runs

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> MemoryRows | None:
        """Return the rows of an array; None if the array, or the installation, has none."""
        if library() is None or not array[0].flags.c_contiguous:
            return None
        part = MemoryPart(array.ctypes.data, len(array), array.strides[0])
        return cls(array, array[0].nbytes, [part])

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> MemoryRows | None:
        """Return the rows of several arrays, one after the other; None as for ``of_array``.

        Args:
            arrays: Arrays with rows of one shape and dtype, at least one.
        """
        found = [rows for rows in map(cls.of_array, arrays) if rows is not None]
        if len(found) < len(arrays):
            return None
        parts = [part for rows in found for part in rows._parts]
        return cls(arrays, found[0].row_nbytes, parts)

    def windows(self, length: int, arrays: Sequence[Sequence[int]]) -> MemoryRows | None:
        """Return runs of rows as rows, which may overlap; None if a run is not in one part.

        Args:
            length: Rows of each run.
            arrays: For runs at equal distances: the first row of the first one, the number of runs,
                and the rows from the beginning of one to the beginning of the next.
        """
        found: list[MemoryPart] = []
        for first, n, step in arrays:
            last = first + (n - 1) * step + length
            before = 0
            for part in self._parts:
                if before <= first and last <= before + part.n_rows:
                    address = part.address + (first - before) * part.stride
                    whole = part._replace(address=address, n_rows=n, stride=step * part.stride)
                    found.append(whole)
                    break
                before += part.n_rows
        is_dense = all(part.stride == self.row_nbytes for part in self._parts)
        if len(found) < len(arrays) or not is_dense:
            return None
        return MemoryRows(self.owner, length * self.row_nbytes, found, self.error)

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
            places = address_of(positions)
        request = (
            address_of(rows),
            len(rows),
            address_of(out),
            len(out),
            self.row_nbytes,
            places,
            bypass,
        )
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
        addresses = list(map(address_of, runs))
        request = (*addresses, len(starts), address_of(out), len(out))
        pack = packing(6 + len(self.description))
        if self._copy_runs(pack(*request, *self.description)):
            raise self.error()

    @property
    def has_whole_lines(self) -> bool:
        """Whether each row consists of whole lines of the caches, so that writes bypass them."""
        return not any(
            part.address % _LINE or part.stride % _LINE or self.row_nbytes % _LINE
            for part in self._parts
        )

    def scatter(self, rows: Indices, values: npt.NDArray[Any]) -> None:
        """Write rows, past the caches of the processor if they have whole lines.

        The rows are those of an array. If a row occurs twice, its last value remains.

        Args:
            rows: Row indices in range, shape (m,).
            values: C-contiguous, with m rows.
        """
        (part,) = self._parts
        rows = np.ascontiguousarray(rows, np.int64)
        n = len(rows)
        request = (0, n, part.address, part.n_rows, part.stride, address_of(rows), True)
        source = MemoryPart(address_of(values), n, self.row_nbytes)
        self._copy(self._pack(*request, *_description(self.row_nbytes, [source])))


def _description(row_nbytes: int, parts: Sequence[MemoryPart]) -> list[int]:
    """Return the description of rows that the compiled functions take."""
    numbers = [row_nbytes, len(parts)]
    first = 0
    for part in parts:
        numbers += [*part, first]
        first += part.n_rows
    return numbers
