"""CachePolicy: chooses the rows of a table that the device keeps between batches.

It keeps the rows that the batches have used most. A later batch counts more (LFU with exponential
ageing). A missed row displaces one of the next slots of a hand that moves over all slots, if the
row in that slot was used less. A compiled function decides; see cache.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import library, packing
from pinfeed.rows.orders import Rows

# These are pf_cache_slot and pf_cache of pinfeed.h.
_SLOT = np.dtype([("row", np.int64), ("count", np.float32), ("last_used", np.uint32)])
_NUMBERS = ("rows", "n_rows", "slots", "capacity", "n_used", "hand", "n_batches")
_CACHE = np.dtype([*((name, np.int64) for name in _NUMBERS), ("use", np.float64)])

_pack = packing(6)


class CacheMoves:
    """Rows of one batch by their place, and the rows that enter and leave the cache after its step.

    Hits are rows that the cache holds before and after the step. Admitted rows are in the cache
    only after it, and bypassed rows neither before nor after. Rows of one kind ascend. Evicted rows
    leave the cache, and none of them is in the batch. The last admitted rows get their slots, in
    the same order. Before the decision, there is no row of any kind.

    Args:
        n: Number of rows of the batch.

    Attributes:
        positions: Positions in the batch of hits, admitted rows and bypassed rows, and then the
            slots of hits and admitted rows. The memory is larger.
        rows: Row indices of hits, admitted rows, bypassed rows and evicted rows, in larger memory.
        counts: Numbers of hits, admitted rows and evicted rows.
    """

    def __init__(self, n: int) -> None:
        self.positions: npt.NDArray[np.int32] = np.empty(3 * n, np.int32)
        self.rows: Rows = np.empty(2 * n, np.int64)
        self.counts: npt.NDArray[np.int64] = np.zeros(3, np.int64)

    @property
    def n_hits(self) -> int:
        return self.counts.item(0)

    @property
    def n_admitted(self) -> int:
        return self.counts.item(1)

    @property
    def n_evicted(self) -> int:
        return self.counts.item(2)


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
        rows: Rows = self._used("row")
        return rows

    @property
    def last_used(self) -> npt.NDArray[np.uint32]:
        """Number of the last batch of the loop that used each of these rows."""
        numbers: npt.NDArray[np.uint32] = self._used("last_used")
        return numbers

    def begin(self) -> None:
        """Empty the cache for a new loop; the counts stay."""
        self._rows.view(np.float32)[self.rows_of_slots] = self._used("count")
        self._cache["n_used"] = 0
        self._cache["n_batches"] = 0

    def decide(self, rows: Rows, moves: CacheMoves) -> None:
        """Decide for the next batch.

        Args:
            rows: Distinct row indices, ascending, shape (n,).
            moves: Receives the decision, in one step that no signal handler interrupts.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        outputs = [array.ctypes.data for array in (moves.positions, moves.rows, moves.counts)]
        self._decide(_pack(self._cache.ctypes.data, rows.ctypes.data, len(rows), *outputs))

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each row whether the cache holds it after the decisions so far, shape (n,)."""
        return self._rows.take(rows) < 0

    def _used(self, name: str) -> Any:
        """Return a field of the slots that are in use."""
        return self._slots[name][: self._cache["n_used"]]
