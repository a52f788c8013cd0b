"""A policy of a row cache that decides at random, so that rows enter in every way."""

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import numpy as np

from pinfeed.pipeline.cache_policy import CacheMoves, CachePolicy


class RandomPolicy(CachePolicy):
    """A policy with random decisions.

    Args:
        n_rows: Rows of the table.
        capacity: Rows of the cache.
        seed: Seed of the decisions.
    """

    def __init__(self, n_rows: int, capacity: int, seed: int = 0) -> None:
        super().__init__(n_rows, capacity)
        self._rng = np.random.default_rng(seed)

    def decide(self, rows: np.ndarray) -> CacheMoves:
        is_hit = self.contains(rows)
        hits, misses = np.flatnonzero(is_hit), np.flatnonzero(~is_hit)
        n_used = int(self._cache["n_used"])
        hit_slots = ~self._rows[rows[hits]]
        admitted = np.sort(self._some(misses)[: len(self._slots) - n_used])
        slots = np.arange(n_used, n_used + len(admitted))
        number = int(self._cache["n_batches"])
        self._rows[rows[admitted]] = ~slots
        self._slots["row"][slots] = rows[admitted]
        self._slots["last_used"][[*hit_slots, *slots]] = number
        self._cache["n_used"] += len(admitted)
        self._cache["n_batches"] += 1
        bypassed = np.setdiff1d(misses, admitted)
        positions = np.concatenate([hits, admitted, bypassed, hit_slots, slots]).astype(np.int32)
        gathered = rows[np.concatenate([admitted, bypassed])]
        return CacheMoves(number, len(rows), len(hits), len(admitted), positions, gathered)

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
    with mock.patch("pinfeed.pipeline.row_cache.CachePolicy", policy):
        yield
