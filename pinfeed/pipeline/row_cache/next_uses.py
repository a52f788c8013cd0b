"""NextUses: which announced batch uses the rows of each announced batch next."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows

NEVER = np.iinfo(np.int32).max
"""Value in place of a batch number, for a row that no announced batch uses."""

_MAX_PLACE = np.iinfo(np.int32).max


class NextUses:
    """Numbers of the batches that use the rows of each announced batch next.

    Every announced use of a row has a place, in order. A row knows the place of its last announced
    use, where the next batch that uses the row writes its number.

    Args:
        n_rows: Rows of the table.
    """

    def __init__(self, n_rows: int) -> None:
        self._places = np.full(n_rows, -1, np.int32)
        self._sizes: deque[int] = deque()
        # Range of the places of batches that were not popped.
        self._begin = 0
        self._end = 0
        # Place of the first number.
        self._origin = 0
        self._numbers = np.empty(0, np.int32)

    @property
    def n_reserved(self) -> int:
        """Number of rows of announced batches that fit the allocated memory."""
        return len(self._numbers)

    def clear(self) -> None:
        """Forget all announced batches."""
        self._sizes.clear()
        self._begin = self._end

    def add(self, rows: Rows, number: int) -> Rows:
        """Note that a batch uses rows.

        Args:
            rows: Distinct row indices, shape (n,).
            number: Number of the batch.

        Returns:
            The rows that no other announced batch uses.
        """
        self._reserve(len(rows))
        begin = self._end
        self._end += len(rows)
        self._sizes.append(len(rows))
        places = self._places.take(rows)
        self._places[rows] = np.arange(begin, self._end, dtype=np.int32)
        is_announced = places >= self._begin
        self._numbers[begin - self._origin : self._end - self._origin] = NEVER
        self._numbers[places.compress(is_announced) - self._origin] = number
        return rows.compress(~is_announced)

    def pop(self) -> npt.NDArray[np.int32]:
        """Return the number of the next batch that uses each row of the oldest batch.

        The array is valid until the next call of ``add``.
        """
        begin = self._begin - self._origin
        size = self._sizes.popleft()
        self._begin += size
        return self._numbers[begin : begin + size]

    def _reserve(self, n_rows: int) -> None:
        """Make room for the numbers of ``n_rows`` rows."""
        if self._end + n_rows > _MAX_PLACE:
            np.maximum(self._places - np.int32(self._begin), -1, out=self._places)
            self._origin -= self._begin
            self._end -= self._begin
            self._begin = 0
        if self._end + n_rows - self._origin <= len(self._numbers):
            return
        kept = self._numbers[self._begin - self._origin : self._end - self._origin].copy()
        n_needed = len(kept) + n_rows
        if 2 * n_needed > len(self._numbers):
            # With room for twice as many numbers, they are moved rarely.
            self._numbers = np.empty(2 * n_needed, np.int32)
        self._numbers[: len(kept)] = kept
        self._origin = self._begin
