"""SumTree: priorities of rows, and draws of rows in proportion to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows

Floats = npt.NDArray[np.float64]


class SumTree:
    """Sums of priorities in a binary tree, so that a draw takes the logarithm of the rows.

    Node i has the children ``2 * i + 1`` and ``2 * i + 2``, and the last ``n_rows`` nodes are the
    leaves. This is the tree of OpenAI Baselines and CleanRL, with sums in float64.

    Args:
        n_rows: Number of rows, at least one. Their priorities are 0 at first.
    """

    def __init__(self, n_rows: int) -> None:
        self._first_leaf = n_rows - 1
        self._sums: Floats = np.zeros(2 * n_rows - 1)
        # All leaves are on the lowest level of the tree, or on the one above it.
        self._lowest_level = self._sums.size.bit_length() - 1

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._sums[0])

    @property
    def priorities(self) -> Floats:
        """Priorities of all rows, on the memory of the tree."""
        return self._sums[self._first_leaf :]

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return self._sums.nbytes

    def set(self, rows: Rows, priorities: Any) -> None:
        """Set the priorities of rows. If a row occurs twice, its last priority counts."""
        nodes = rows + self._first_leaf
        self._sums[nodes] = priorities
        is_lowest = nodes >= (1 << self._lowest_level) - 1
        if not is_lowest.all():
            # From here on, all nodes are on one level, so each sum has both of its terms.
            parents = (nodes - 1) >> 1
            self._add_children(parents[is_lowest])
            nodes = np.where(is_lowest, parents, nodes)
        while nodes.size and nodes[0]:
            nodes = (nodes - 1) >> 1
            self._add_children(nodes)

    def rows_at(self, values: Floats) -> Rows:
        """Return the row at which the sum of priorities from row 0 on reaches each value.

        Rows are summed in the order of the leaves. A row without priority is never returned, unless
        all rows are without.

        Args:
            values: Numbers from 0 to ``total``.
        """
        nodes = np.zeros(len(values), np.int64)
        for _ in range(self._lowest_level - 1):
            nodes, values = self._descend(nodes, values)
        is_inner = nodes < self._first_leaf
        nodes[is_inner], _ = self._descend(nodes[is_inner], values[is_inner])
        return nodes - self._first_leaf

    def _descend(self, nodes: Rows, values: Floats) -> tuple[Rows, Floats]:
        """Return the child of each node that has its value, and the value within the child."""
        left = 2 * nodes + 1
        sums = self._sums[left]
        # Rounding may leave a value above the sum of both children, and a value may be 0.
        goes_right = ((values > sums) | (sums == 0)) & (self._sums[left + 1] > 0)
        return left + goes_right, np.where(goes_right, values - sums, values)

    def _add_children(self, nodes: Rows) -> None:
        """Set the sums of nodes."""
        left = 2 * nodes + 1
        self._sums[nodes] = self._sums[left] + self._sums[left + 1]
