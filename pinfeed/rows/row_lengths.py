"""RowLengths: numbers of rows of each length, and bounds of batches that follow from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, described
from pinfeed.rows.orders import (
    Rows,
)

# Up to this length, lengths are counted in a table, which is faster than sorting them.
_MOST_COUNTED = 1 << 20
# Places at which blocks may begin, relative to the length of a block, for their bound.
_N_CUTS = 16


class RowLengths:
    """Numbers of rows of each length; bounds of a batch follow from them.

    Args:
        lengths: Length of each row, shape (n_rows,), integers of 0 or more, at least one row.

    Attributes:
        longest: Length of the longest row.
        n_rows: Number of rows.
        mean: Mean length of a row.
        nbytes: Bytes of the table.
    """

    def __init__(self, lengths: npt.NDArray[Any]) -> None:
        self.longest = int(lengths.max())
        if self.longest < _MOST_COUNTED:
            counts = np.bincount(lengths)
            kinds = np.flatnonzero(counts)
            counts = counts[kinds]
        else:
            kinds, counts = np.unique(lengths, return_counts=True)
        self._kinds = kinds.astype(np.int64)
        self._counts = counts
        self.n_rows = int(counts.sum())
        self.mean = float(counts @ self._kinds) / self.n_rows
        self.nbytes = 4 * self._kinds.nbytes
        # Rows and elements of the longest rows together, by how many lengths these have.
        self._most_rows = np.cumsum(counts[::-1])
        self._most_elements = np.cumsum((counts * self._kinds)[::-1])

    def most_elements(self, n_rows: int) -> int:
        """Return the elements of the ``n_rows`` longest rows together."""
        n_whole = int(np.searchsorted(self._most_rows, n_rows, side="right"))
        rows = self._most_rows.item(n_whole - 1) if n_whole else 0
        elements = self._most_elements.item(n_whole - 1) if n_whole else 0
        if n_whole == len(self._kinds):
            return elements
        return elements + (n_rows - rows) * self._kinds.item(-1 - n_whole)

    def usual_elements(self, n_rows: int, *, padded: bool) -> int:
        """Return a number of elements that few batches of ``n_rows`` random rows exceed.

        Args:
            n_rows: Number of rows of a batch.
            padded: Whether each row counts as many elements as the longest one of the batch.
        """
        if padded:
            # About one batch in 64 has a row that is longer.
            n_longer = self.n_rows - np.cumsum(self._counts)
            kind = int((n_longer * 64 * n_rows <= self.n_rows).argmax())
            return n_rows * self._kinds.item(kind)
        variance = float(self._counts @ (self._kinds - self.mean) ** 2) / self.n_rows
        return math.ceil(n_rows * self.mean + 6 * math.sqrt(n_rows * variance))

    def most_rows(self, max_elements: int, *, padded: bool, repeats: bool) -> int:
        """Return the most rows that a batch of at most ``max_elements`` elements may have.

        Args:
            max_elements: Most elements of a batch, at least the length of each row.
            padded: Whether each row counts as many elements as the longest one of the batch.
            repeats: Whether a batch may contain a row several times.

        Returns:
            The number of rows, or at least the rows of an epoch if rows without elements may
            repeat.
        """
        shortest = self._kinds.item(0)
        if repeats:
            return max_elements // shortest if shortest else self.n_rows + max_elements
        if padded:
            ends = np.cumsum(self._counts)
            # The rows of each length and all shorter rows, until the batch is full.
            fitting = np.where(self._kinds > 0, max_elements // np.maximum(self._kinds, 1), ends)
            return int(np.minimum(ends, fitting).max())
        elements = np.cumsum(self._counts * self._kinds)
        n_whole = int(np.searchsorted(elements, max_elements, side="right"))
        n_rows = int(self._counts[:n_whole].sum())
        if n_whole < len(self._kinds):
            before = elements.item(n_whole - 1) if n_whole else 0
            n_rows += (max_elements - before) // self._kinds.item(n_whole)
        return n_rows


def checked_lengths(lengths: Any) -> Rows:
    """Return a read-only copy of lengths, shape (n_rows,), int64.

    Raises:
        ArgumentError: If they are not integers of 0 or more, or if the array is empty.
    """
    expected = "expected integers of 0 or more, shape (n_rows,), such as store.lengths"
    try:
        given = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"lengths: {described(error)}; {expected}") from None
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise ArgumentError(f"lengths: got shape {given.shape} of {given.dtype}; {expected}")
    checked: Rows = given.astype(np.int64)
    if checked.min() < 0:
        row = int(checked.argmin())
        raise ArgumentError(f"lengths: row {row} has {given[row]} elements; {expected}")
    checked.flags.writeable = False
    return checked


def longest_first(rows: Rows, lengths: Rows) -> Rows:
    """Return row indices in descending length; rows of equal length keep their order.

    Args:
        rows: Row indices, shape (n,).
        lengths: Length of each row of the store, shape (n_rows,).
    """
    return rows[np.argsort(-lengths[rows], kind="stable")]


def most_in_blocks(offsets: Rows, n_blocks: int, block_rows: int) -> int:
    """Return a bound on the elements of some blocks of consecutive rows together.

    Args:
        offsets: First element of each row, followed by the number of elements.
        n_blocks: Number of blocks.
        block_rows: Most rows of a block. All rows, as a ring, are cut into blocks at any row.
    """
    n_rows = len(offsets) - 1
    block_rows = min(block_rows, n_rows)
    # Wherever the ring is cut, each block is within one of these longer blocks. After the last row,
    # blocks begin at other rows than before it, unless ``n_rows`` is divisible.
    step = max(1, block_rows // _N_CUTS)
    begins = block_rows * np.arange(-1, -(-n_rows // block_rows))
    most = 0
    for cut in range(0, block_rows, step):
        starts = np.concatenate([begins + cut, begins + (cut - n_rows) % block_rows])
        sums = _in_ring(offsets, starts + block_rows + step - 1) - _in_ring(offsets, starts)
        sums.sort()
        most = max(most, int(sums[-n_blocks:].sum()))
    return min(most, int(offsets[-1]))


def _in_ring(offsets: Rows, rows: Rows) -> Rows:
    """Return the first element of rows of a ring, which repeats all rows."""
    times, row = np.divmod(rows, len(offsets) - 1)
    first: Rows = offsets[row] + times * offsets[-1]
    return first
