"""A policy of a row cache that decides at random, so that rows enter and leave in every way."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from pinfeed.pipeline.cache_policy import CacheMoves


class RandomPolicy:
    """Policy with the interface of ``CachePolicy`` and random decisions.

    Args:
        n_rows: Rows of the table.
        capacity: Rows of the cache.
        seed: Seed of the decisions.
    """

    nbytes = 0

    def __init__(self, n_rows: int, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self._rng = np.random.default_rng(seed)
        self.begin()

    def begin(self) -> None:
        self.rows_of_slots = np.full(self.capacity, -1, np.int64)
        self.last_used = np.zeros(self.capacity, np.int64)
        self._n = 0

    def contains(self, rows: np.ndarray) -> Any:
        return np.isin(rows, self.rows_of_slots)

    def decide(self, rows: np.ndarray, moves: CacheMoves) -> None:
        is_hit = self.contains(rows)
        hits, misses = np.flatnonzero(is_hit), np.flatnonzero(~is_hit)
        slot_of = {row: slot for slot, row in enumerate(self.rows_of_slots.tolist())}
        hit_slots = [slot_of[row] for row in rows[hits].tolist()]
        free = self._some(np.flatnonzero(self.rows_of_slots < 0))
        others = np.flatnonzero(~np.isin(self.rows_of_slots, [-1, *rows]))
        chosen = self._some(misses)
        slots = np.concatenate([free, self._rng.permutation(others)])[: len(chosen)]
        admitted = np.sort(chosen[: len(slots)])
        evicted_rows = self.rows_of_slots[slots[len(free) :]]
        self.rows_of_slots[slots] = rows[admitted]
        positions = np.concatenate([hits, admitted, np.setdiff1d(misses, admitted)])
        held = np.concatenate([hit_slots, slots]).astype(np.int64)
        self.last_used[held] = self._n
        self._n += 1
        moves.positions[: len(rows) + len(held)] = np.concatenate([positions, held])
        moves.rows[: len(rows) + len(evicted_rows)] = np.concatenate(
            [rows[positions], evicted_rows]
        )
        moves.counts[:] = len(hits), len(admitted), len(evicted_rows)

    def _some(self, numbers: np.ndarray) -> np.ndarray:
        """Return none, some or all of the numbers, in any order."""
        n = self._rng.choice([0, len(numbers), self._rng.integers(0, len(numbers) + 1)])
        return self._rng.permutation(numbers)[:n]


@contextlib.contextmanager
def random_policy(seed: int | None) -> Iterator[None]:
    """Let new caches decide at random, or as usual if the seed is None."""
    if seed is None:
        yield
        return
    policy = partial(RandomPolicy, seed=seed)
    with mock.patch("pinfeed.pipeline.cache_decisions.CachePolicy", policy):
        yield
