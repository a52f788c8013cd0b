"""RowPartition: which rank has which row of a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows


@dataclass(frozen=True)
class RowPartition:
    """Row r is on rank ``r % size``, there as row ``r // size``.

    Ids are often given out in the order in which things came, or by how frequent they are: in
    ranges of equal length, one rank would have most of what is looked up. Like this, neighbours are
    on different ranks.
    """

    n_rows: int
    """Of the whole table."""
    size: int
    """Number of ranks."""

    def n_own(self, rank: int) -> int:
        """How many rows a rank has."""
        return len(range(rank, self.n_rows, self.size))

    def own(self, rank: int, start: int, stop: int) -> Rows:
        """Those of the table's rows [start, stop) that a rank has, ascending."""
        return np.arange(start + (rank - start) % self.size, stop, self.size)

    def here(self, rows: Rows) -> Rows:
        """What rows are called on the rank that has them."""
        return rows // self.size

    def by_owner(self, rows: Rows) -> tuple[npt.NDArray[np.intp], list[int]]:
        """Positions of the rows, those of rank 0 first, else in their order; and how many each rank has."""
        # Of two bytes, numpy sorts by counting.
        owner = (rows % self.size).astype(np.min_scalar_type(self.size))
        return np.argsort(owner, kind="stable"), np.bincount(owner, minlength=self.size).tolist()
