"""SumTree: priorities of rows, and draws of rows in proportion to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows

Floats = npt.NDArray[np.float64]

# To add all nodes of a level takes less time than to gather a few of them.
_FEW_NODES = 64


class SumTree:
    """Sums of priorities in a binary tree, so that a draw takes the logarithm of the rows.

    Node 1 is the root, node i has the children ``2 * i`` and ``2 * i + 1``, and the last ``n_rows``
    nodes are the leaves. This is the tree of OpenAI Baselines and CleanRL, with sums in float64.

    Args:
        n_rows: Number of rows, at least one. Their priorities are 0 at first.
    """

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._sums: Floats = np.zeros(2 * n_rows)
        # All leaves are on the lowest level of the tree, or on the one above it.
        self._lowest_level = (2 * n_rows - 1).bit_length() - 1

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._sums[1])

    @property
    def priorities(self) -> Floats:
        """Priorities of all rows, on the memory of the tree."""
        return self._sums[self._n_rows :]

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return self._sums.nbytes

    def set(self, rows: Rows, priorities: Any) -> None:
        """Set the priorities of rows. If a row occurs twice, its last priority counts."""
        sums = self._sums
        nodes = rows + self._n_rows
        sums[nodes] = priorities
        level = self._lowest_level
        # The lowest level may have fewer nodes than its parents have places for.
        is_lowest = nodes >= 1 << level
        if level:
            level -= 1
            self._add_children(nodes[is_lowest] >> 1)
            # From here on, all nodes are on one level, so each sum has both of its terms.
            nodes = np.where(is_lowest, nodes >> 1, nodes)
        while level and 1 << level > max(len(nodes), _FEW_NODES):
            level -= 1
            nodes = nodes >> 1
            self._add_children(nodes)
        while level:
            begin, stop = 1 << level, 2 << level
            level -= 1
            np.add(sums[begin:stop:2], sums[begin + 1 : stop : 2], out=sums[1 << level : begin])

    def rows_at(self, values: Floats) -> Rows:
        """Return the row at which the sum of priorities from row 0 on reaches each value.

        Rows are summed in the order of the leaves. A row without priority is never returned, unless
        all rows are without.

        Args:
            values: Numbers from 0 to ``total``.
        """
        left_values = values.copy()
        nodes = np.ones(len(values), np.int64)
        for _ in range(self._lowest_level - 1):
            self._descend(nodes, left_values)
        is_inner = nodes < self._n_rows
        inner = nodes[is_inner]
        self._descend(inner, left_values[is_inner])
        nodes[is_inner] = inner
        # Rounding may leave a value above all sums, and a value may be 0.
        for i in np.flatnonzero(self._sums[nodes] == 0).tolist():
            nodes[i] = self._leaf_with_priority(float(values[i]))
        return nodes - self._n_rows

    def _descend(self, nodes: Rows, values: Floats) -> None:
        """Replace nodes by the children that have their values, and values by those within."""
        np.left_shift(nodes, 1, out=nodes)
        sums = self._sums.take(nodes)
        goes_right = values > sums
        nodes += goes_right
        values -= sums * goes_right

    def _leaf_with_priority(self, value: float) -> int:
        """Return the leaf of a value, or another one near it if that has no priority."""
        node = 1
        while node < self._n_rows:
            left, right = self._sums[2 * node : 2 * node + 2].tolist()
            goes_right = right > 0 and (value > left or left == 0)
            value -= left * goes_right
            node = 2 * node + goes_right
        return node

    def _add_children(self, nodes: Rows) -> None:
        """Set the sums of nodes."""
        pairs = self._sums.reshape(-1, 2)[nodes]
        self._sums[nodes] = pairs[:, 0] + pairs[:, 1]
