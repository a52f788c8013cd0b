"""RowLengths: how many ragged rows there are of each length, and what a batch of them has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Up to this length, lengths are counted in a table, which is faster than sorting them.
_MOST_COUNTED = 1 << 20


class RowLengths:
    """Numbers of rows of each length; bounds of a batch follow from them.

    Args:
        lengths: Length of each row, shape (n_rows,), integers of 0 or more, at least one row.
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

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self._counts.sum())

    @property
    def mean(self) -> float:
        """Mean length of a row."""
        return float(self._counts @ self._kinds) / self.n_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._kinds.nbytes + self._counts.nbytes

    def most_elements(self, n_rows: int) -> int:
        """Return the elements of the ``n_rows`` longest rows together."""
        kinds = self._kinds[::-1]
        ends = np.cumsum(self._counts[::-1])
        n_whole = int(np.searchsorted(ends, n_rows, side="right"))
        elements = int(self._counts[::-1][:n_whole] @ kinds[:n_whole])
        if n_whole < len(kinds):
            before = ends.item(n_whole - 1) if n_whole else 0
            elements += (n_rows - before) * kinds.item(n_whole)
        return elements

    def most_rows(self, max_elements: int, *, padded: bool, repeats: bool) -> int:
        """Return the most rows that a batch of at most ``max_elements`` elements may have.

        Args:
            max_elements: Most elements of a batch, at least the length of each row.
            padded: Whether each row counts as many elements as the longest one of the batch.
            repeats: Whether a batch may have a row several times.

        Returns:
            The number of rows; at least that of an epoch if rows without elements may repeat.
        """
        shortest = self._kinds.item(0)
        if repeats:
            return max_elements // shortest if shortest else self.n_rows + max_elements
        if padded:
            ends = np.cumsum(self._counts)
            # The rows of each length and the shorter ones, as far as they fit.
            fitting = np.where(self._kinds > 0, max_elements // np.maximum(self._kinds, 1), ends)
            return int(np.minimum(ends, fitting).max())
        elements = np.cumsum(self._counts * self._kinds)
        n_whole = int(np.searchsorted(elements, max_elements, side="right"))
        n_rows = int(self._counts[:n_whole].sum())
        if n_whole < len(self._kinds):
            before = elements.item(n_whole - 1) if n_whole else 0
            n_rows += (max_elements - before) // self._kinds.item(n_whole)
        return n_rows
