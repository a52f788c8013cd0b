"""CachePolicy: temporary."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np


class CacheMoves(NamedTuple):
    bypassed: np.ndarray
    admitted: np.ndarray
    hits: np.ndarray
    admitted_slots: np.ndarray
    hit_slots: np.ndarray
    evicted_rows: np.ndarray
    evicted_slots: np.ndarray


class CachePolicy:
    def __init__(self, n_rows, capacity):
        self.n_rows, self.capacity = n_rows, capacity
        self._rng = np.random.default_rng(0)
        self.begin()
        self.nbytes = 0

    def begin(self):
        self.rows_of_slots = np.full(self.capacity, -1, np.int64)
        self.last_used = np.zeros(self.capacity, np.int64)
        self._n = 0

    def announce(self, rows):
        pass

    def contains(self, rows):
        return np.isin(rows, self.rows_of_slots)

    def decide(self, rows):
        is_hit = self.contains(rows)
        slot_of = {row: i for i, row in enumerate(self.rows_of_slots.tolist())}
        hits = np.flatnonzero(is_hit)
        hit_slots = np.array([slot_of[row] for row in rows[hits].tolist()], np.int32)
        misses = np.flatnonzero(~is_hit)
        free = np.flatnonzero(self.rows_of_slots < 0)
        candidates = np.setdiff1d(np.arange(self.capacity), np.concatenate([hit_slots, free]))
        n_evict = self._rng.integers(0, min(len(candidates), len(misses)) + 1)
        evicted = self._rng.permutation(candidates)[:n_evict].astype(np.int32)
        evicted_rows = self.rows_of_slots[evicted]
        self.rows_of_slots[evicted] = -1
        free = self._rng.permutation(np.flatnonzero(self.rows_of_slots < 0))
        n_admit = min(len(free), self._rng.integers(0, len(misses) + 1))
        admitted = np.sort(self._rng.permutation(misses)[:n_admit])
        bypassed = np.setdiff1d(misses, admitted)
        slots = free[:n_admit].astype(np.int32)
        self.rows_of_slots[slots] = rows[admitted]
        self.last_used[slots] = self._n
        self.last_used[hit_slots] = self._n
        self._n += 1
        i4 = np.int32
        return CacheMoves(
            bypassed.astype(i4),
            admitted.astype(i4),
            hits.astype(i4),
            slots,
            hit_slots.astype(i4),
            evicted_rows,
            evicted,
        )
