"""The fewest rows that a cache can miss, given the whole future or only probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.cache_streams import Probabilities, Rows
from pinfeed.pipeline.cache_policy import CachePolicy

Counts = npt.NDArray[np.int64]


def belady_misses(batches: Sequence[Rows], n_rows: int, capacity: int) -> Counts:
    """Return how many rows of each batch are missed by Belady's offline optimum, with bypass.

    After each batch, the cache keeps the rows that are used soonest, from its own rows and those of
    the batch. So the function only counts how many cached rows each later batch uses next.
    """
    n = len(batches)
    next_use = np.full(n_rows, n, np.int32)
    next_uses = np.zeros((n, n + 1), np.int32)
    for number in reversed(range(n)):
        rows = batches[number]
        next_uses[number] = np.bincount(next_use[rows], minlength=n + 1)
        next_use[rows] = number
    # Rows that no later batch uses are not kept.
    held = np.zeros(n, np.int64)
    misses = np.empty(n, np.int64)
    for number, rows in enumerate(batches):
        misses[number] = len(rows) - held[number]
        held[number] = 0
        held += next_uses[number, :n]
        room = capacity - np.cumsum(held) + held
        held = np.clip(held, 0, np.maximum(room, 0))
    return misses


def fixed_misses(batches: Sequence[Rows], probabilities: Probabilities, capacity: int) -> Counts:
    """Return how many rows of each batch are missed if the most probable rows are always cached.

    This is the optimum for independent draws, if no batch is known ahead.
    """
    is_cached = np.zeros(len(probabilities), bool)
    is_cached[np.argpartition(-probabilities, capacity - 1)[:capacity]] = True
    return np.array([len(rows) - np.count_nonzero(is_cached[rows]) for rows in batches])


class InformedPolicy(CachePolicy):
    """The policy with the probabilities of the rows instead of counts.

    Args:
        probabilities: Relative probability of each row, shape (n_rows,).
        capacity: Rows that the cache holds.
    """

    def __init__(self, probabilities: Probabilities, capacity: int) -> None:
        super().__init__(len(probabilities), capacity)
        # Any factor works if float32 can represent the counts.
        self._counts[:] = probabilities / probabilities.max()
        self._use = 0.0
