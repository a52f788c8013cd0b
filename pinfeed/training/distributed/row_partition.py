"""RowPartition: the assignment of a table's rows to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows


@dataclass(frozen=True)
class RowPartition:
    """Row r is on rank ``r % size``, as row ``r // size`` of that rank.

    Consecutive rows are on different ranks. Ids are often assigned by age or by frequency. If each
    rank had a range of consecutive rows, one rank would have most of the looked-up rows.
    """

    n_rows: int
    """Number of rows of the whole table."""
    size: int
    """Number of ranks."""

    def n_own(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return len(range(rank, self.n_rows, self.size))

    def own(self, rank: int, start: int, stop: int) -> Rows:
        """Return the row indices in [start, stop) that a rank owns, ascending."""
        return np.arange(start + (rank - start) % self.size, stop, self.size)

    def local(self, rows: Rows) -> Rows:
        """Return the row indices in the store of the rank that owns the rows."""
        return rows // self.size

    def by_owner(self, rows: Rows) -> tuple[npt.NDArray[np.intp], list[int]]:
        """Sort rows by the rank that owns them.

        Returns:
            Positions of the rows, ordered by rank and then by their original order, and the number
            of rows of each rank.
        """
        # numpy sorts numbers of one or two bytes with a radix sort, which is faster.
        owner = (rows % self.size).astype(np.min_scalar_type(self.size))
        return np.argsort(owner, kind="stable"), np.bincount(owner, minlength=self.size).tolist()
