"""RowMoves: the rows that a GPU moves itself, as compiled functions take them; see direct.c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

RowDirection = Literal["gather", "scatter"]
"""Whether rows are read from their tables, or distinct rows are written to them."""
# In the order of PF_FROM_TABLES and PF_TO_TABLES of pinfeed.h.
_DIRECTIONS: tuple[RowDirection, ...] = ("gather", "scatter")
MAX_TABLES = 8
"""Largest number of tables in one launch."""
# PF_MOST_BUCKETS of pinfeed.h, which is 4096.
_BUCKET_BITS = 12
# Rows of at least this many bytes take longer on the link than the GPU takes to find them, and so
# do all rows of a table that it finds in few pages.
_SHORT_NBYTES = 1 << 10
_LARGE_NBYTES = 64 << 20


class Table(NamedTuple):
    """Rows of a store in page-locked memory."""

    address: int
    row_nbytes: int
    store: int
    """Position of the store in a batch."""


class KernelLaunch(NamedTuple):
    """A kernel, and the tables whose rows one launch moves, at most ``MAX_TABLES``."""

    kernel: int
    """Handle of the kernel."""
    n_blocks: int
    """Most blocks."""
    n_threads: int
    """Threads of a block."""
    width: int
    """Bytes of a word."""
    tables: Sequence[Table]


class RowMoves(NamedTuple):
    """Rows that a GPU reads or writes itself, by row indices in its own memory."""

    index_nbytes: int
    """Bytes of a row index: 4 for int32, 8 for int64."""
    shift: int
    """-1, or the indices are pairs of a row and its place, both int32, sorted by row >> shift."""
    launches: Sequence[KernelLaunch]

    @property
    def indices(self) -> StagedIndices:
        """The row indices of a job as a source of an engine."""
        return StagedIndices(self.index_nbytes if self.shift < 0 else 8)

    def description(
        self, part_of: Callable[[Table], int], index_part: int
    ) -> npt.NDArray[np.int64]:
        """Return a ``pf_direct`` of pinfeed.h.

        Args:
            part_of: Returns the position of a table's rows among the parts of a job.
            index_part: Position of the row indices among them.
        """
        n_tables = sum(len(launch.tables) for launch in self.launches)
        numbers = [self.index_nbytes, self.shift, index_part, n_tables, len(self.launches)]
        for *launch, tables in self.launches:
            numbers += [*launch, len(tables)]
            for table in tables:
                numbers += [table.address, table.row_nbytes, part_of(table)]
            numbers += [0] * 3 * (MAX_TABLES - len(tables))
        return np.array(numbers, np.int64)


class StagedIndices(NamedTuple):
    """The row indices of a job, as a source of an engine."""

    row_nbytes: int
    """Bytes of the entry of a row."""

    @property
    def description(self) -> list[int]:
        """Description of the source, as the compiled functions take it."""
        return [self.row_nbytes, 0]

    @property
    def row_type(self) -> tuple[tuple[int, ...], np.dtype[np.int32]]:
        """Shape and dtype of the entry of a row."""
        return (self.row_nbytes // 4,), np.dtype(np.int32)


class RowMove(NamedTuple):
    """Rows of one batch that a GPU moves itself."""

    fields: tuple[int, int, int, int]
    """Arguments of ``pf_move_rows`` of pinfeed.h, from ``direct`` to ``n``."""
    devices: tuple[int, ...]
    """Addresses on the GPU: the row indices, and the rows of each table."""
    kept: object
    """Tensor of the row indices, which must live until the move is queued."""


class RowMover:
    """Describes moves of rows by a GPU itself, one for all tables of a batch.

    Args:
        moves: The rows.
        kind: Direction.
    """

    def __init__(self, moves: RowMoves, kind: RowDirection) -> None:
        self._description = moves.description(lambda table: 1 + table.store, 0)
        self._address = self._description.ctypes.data
        self._direction = _DIRECTIONS.index(kind)

    def move(
        self, start: int, n: int, indices: int, packed: Sequence[int], kept: object = None
    ) -> RowMove:
        """Return a move of one batch.

        Args:
            start: First row, if the rows follow each other; -1 otherwise.
            n: Number of rows.
            indices: Address of the row indices on the GPU; 0 if the rows follow each other.
            packed: Address of the rows of each table on the GPU, in the order of ``Table.store``.
            kept: Tensor of the row indices.
        """
        fields = self._address, self._direction, start, n
        return RowMove(fields, (indices, *packed), kept)


def sort_shift(n_rows: int, row_nbytes: int) -> int:
    """Return ``RowMoves.shift`` for the longest rows of a launch.

    Args:
        n_rows: Rows of the table.
        row_nbytes: Bytes of a row.
    """
    if row_nbytes >= _SHORT_NBYTES or n_rows * row_nbytes < _LARGE_NBYTES or n_rows >= 1 << 31:
        return -1
    return bucket_shift(n_rows)


def bucket_shift(n_rows: int) -> int:
    """Return the least ``RowMoves.shift`` with which a table of ``n_rows`` may be sorted."""
    return max(0, (n_rows - 1).bit_length() - _BUCKET_BITS)
