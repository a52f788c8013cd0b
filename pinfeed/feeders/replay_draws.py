"""UniformDraws, PrioritizedDraws: random rows of a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
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


Generator = np.random.Generator | np.random.RandomState

# Steps whose priorities are set together.
_MOST_NEW = 1024


class UniformDraws:
    """Draws steps, and then environments, with replacement, as Stable-Baselines3 does.

    Args:
        generator: Random generator of numpy.
        n_envs: Number of environments; each step has one row for each.
    """

    def __init__(self, generator: Generator, n_envs: int) -> None:
        is_new = isinstance(generator, np.random.Generator)
        self.generator = generator
        self._integers: Any = generator.integers if is_new else generator.randint  # type: ignore[union-attr]
        self._n_envs = n_envs

    def add(self, first: int) -> None:
        """Do nothing, because all rows are equally likely."""

    def draw(self, n_steps: int, n: int) -> tuple[Rows, npt.NDArray[np.float32] | None]:
        """Return n rows of the first ``n_steps`` steps, without weights."""
        rows = self._integers(0, n_steps, size=n)
        # To draw from one environment takes no random numbers.
        if self._n_envs > 1:
            rows = rows * self._n_envs + self._integers(0, self._n_envs, size=n)
        return rows, None


@dataclass(eq=False)
class PrioritizedDraws:
    """Draws rows in proportion to ``priority ** alpha``, as CleanRL's Rainbow does.

    The sum of all priorities is cut into as many equal segments as a batch has rows, and each
    segment gives one row. New rows have the largest priority so far.

    Args:
        generator: Random generator of numpy.
        n_rows: Number of rows.
        n_envs: Number of environments.
        alpha: Exponent of the priorities; 0 makes all rows equally likely.
        beta: Exponent of the importance weights; 1 corrects the draws fully.
        epsilon: Added to each absolute priority, so that no row is lost.
    """

    generator: Generator
    n_rows: InitVar[int]
    n_envs: int
    alpha: float
    beta: float
    epsilon: float

    def __post_init__(self, n_rows: int) -> None:
        self._max_priority = 1.0
        self.tree = SumTree(n_rows)
        # First rows of the steps that were added since the last draw, with their priorities. They
        # are set together.
        self._new: list[tuple[int, float]] = []

    def add(self, first: int) -> None:
        """Give the rows of a step, from a first one on, the largest priority so far."""
        self._new.append((first, self._max_priority**self.alpha))
        # A program may add many steps before its first draw.
        if len(self._new) == _MOST_NEW:
            self._set_new()

    def draw(self, n_steps: int, n: int) -> tuple[Rows, npt.NDArray[np.float32] | None]:
        """Return n rows, and their importance weights, of which the largest is 1.

        Raises:
            ArgumentError: If all priorities are 0.
        """
        self._set_new()
        tree = self.tree
        if not tree.total:
            raise ArgumentError(
                "all transitions have priority 0, so none can be drawn; expected at least one "
                "above 0; give epsilon=1e-6"
            )
        segment = tree.total / n
        starts = segment * np.arange(n)
        rows = tree.rows_at(self.generator.uniform(starts, segment * np.arange(1, n + 1)))
        shares = tree.priorities[rows] / tree.total
        weights = (n_steps * self.n_envs * shares) ** -self.beta
        return rows, (weights / weights.max()).astype(np.float32)

    def update(self, rows: Rows, priorities: npt.NDArray[np.float64]) -> None:
        """Set the priorities of rows."""
        self._set_new()
        if not len(rows):
            return
        priorities = np.abs(priorities) + self.epsilon
        self._max_priority = max(self._max_priority, float(priorities.max()))
        self.tree.set(rows, priorities**self.alpha)

    def state(self) -> dict[str, Any]:
        """Return the priorities, as plain values and an array."""
        self._set_new()
        priorities = self.tree.priorities
        return {"priorities": priorities, "max_priority": self._max_priority, "alpha": self.alpha}

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the priorities to those of a state."""
        self._new.clear()
        self._max_priority = float(state["max_priority"])
        self.tree.set(np.arange(len(self.tree.priorities)), state["priorities"])

    def _set_new(self) -> None:
        if self._new:
            firsts, priorities = zip(*self._new, strict=True)
            rows = np.array(firsts)[:, None] + np.arange(self.n_envs)
            self.tree.set(rows.reshape(-1), np.repeat(priorities, self.n_envs))
            self._new.clear()
