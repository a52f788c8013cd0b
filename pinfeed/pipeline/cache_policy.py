"""CachePolicy: chooses the rows of a table that the device keeps between batches.

It keeps the rows that the batches have used most. A later batch counts more (LFU with exponential
ageing). A missed row displaces one of the next slots of a hand that moves over all slots, if the
row in that slot was used less. A compiled function decides; see cache.c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import library, packing
from pinfeed.rows.orders import Rows

# These are pf_cache_slot and pf_cache of pinfeed.h.
_SLOT = np.dtype([("row", np.int64), ("count", np.float32), ("last_used", np.uint32)])
_NUMBERS = ("rows", "n_rows", "slots", "capacity", "n_used", "hand", "n_batches")
_CACHE = np.dtype([*((name, np.int64) for name in _NUMBERS), ("use", np.float64)])

_pack = packing(6)


class CacheMoves(NamedTuple):
    """Rows of one batch by their place, and the rows that enter and leave the cache after its step.

    Hits are rows that the cache holds before and after the step. Admitted rows are in the cache
    only after it, and bypassed rows neither before nor after. Rows of one kind ascend. Evicted rows
    leave the cache, and none of them is in the batch. The last admitted rows get their slots, in
    the same order.

    Attributes:
        positions: Positions in the batch of hits, admitted rows and bypassed rows, and then the
            slots of hits and admitted rows.
        rows: Row indices of hits, admitted rows, bypassed rows and evicted rows.
        n_hits: Number of hits.
        n_admitted: Number of admitted rows.
        n_evicted: Number of evicted rows.
    """

    positions: npt.NDArray[np.int32]
    rows: Rows
    n_hits: int
    n_admitted: int
    n_evicted: int


class CachePolicy:
    """Decides for each batch which rows enter the cache, and which rows leave it for them.

    A loop calls ``begin``, and then ``decide`` for every batch, in order. The time of a decision
    grows with the rows of the batch, and not with the capacity. The decisions depend on nothing but
    these calls. One thread calls the policy at a time.

    Args:
        n_rows: Rows of the table.
        capacity: Rows that the cache holds, from 1 to ``n_rows``.

    Attributes:
        nbytes: Bytes of the bookkeeping.
    """

    def __init__(self, n_rows: int, capacity: int) -> None:
        native = library()
        assert native is not None
        self._decide = native.decide
        self._rows = np.zeros(n_rows, np.int32)
        self._slots = np.zeros(capacity, _SLOT)
        addresses = self._rows.ctypes.data, self._slots.ctypes.data
        self._cache = np.array((addresses[0], n_rows, addresses[1], capacity, 0, 0, 0, 1.0), _CACHE)
        self.nbytes = self._rows.nbytes + self._slots.nbytes

    @property
    def rows_of_slots(self) -> Rows:
        """Row index in each slot that is in use."""
        rows: Rows = self._slots["row"][: int(self._cache["n_used"])]
        return rows

    def begin(self) -> None:
        """Empty the cache for a new loop; the counts stay."""
        rows = self.rows_of_slots
        self._rows.view(np.float32)[rows] = self._slots["count"][: len(rows)]
        self._cache["n_used"] = 0

    def decide(self, rows: Rows) -> CacheMoves:
        """Decide for the next batch.

        Args:
            rows: Distinct row indices, ascending, shape (n,).
        """
        rows = np.ascontiguousarray(rows, np.int64)
        n = len(rows)
        positions = np.empty(3 * n, np.int32)
        moved = np.empty(2 * n, np.int64)
        counts = np.empty(3, np.int64)
        outputs = [array.ctypes.data for array in (positions, moved, counts)]
        self._decide(_pack(self._cache.ctypes.data, rows.ctypes.data, n, *outputs))
        n_hits, n_admitted, n_evicted = counts.tolist()
        n_held = n_hits + n_admitted
        return CacheMoves(
            positions[: n + n_held], moved[: n + n_evicted], n_hits, n_admitted, n_evicted
        )

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each row whether the cache holds it after the decisions so far, shape (n,)."""
        return self._rows.take(rows) < 0
