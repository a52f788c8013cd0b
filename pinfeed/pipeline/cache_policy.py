"""CachePolicy: chooses the rows of a table that the device keeps until the loop ends.

A row enters the cache when a batch uses it for the second time, while there is room, and stays
until the loop ends. In later loops, only the rows that earlier loops have used most enter. A
compiled function decides; see cache.c.

Reader threads decide ahead of the training thread, which carries the decisions out. The rows that
enter take the slots in order. So the device has the rows in the first slots, up to those of the
last batch that was carried out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.native.library import address_of, library, packing
from pinfeed.rows.orders import Positions, Rows

# These are pf_cache_slot and pf_cache of pinfeed.h.
_SLOT = np.dtype([("row", np.int64), ("n_uses", np.int32), ("last_used", np.uint32)])
_NUMBERS = ("rows", "slots", "capacity", "n_used", "n_batches", "least")
_CACHE = np.dtype([(name, np.int64) for name in _NUMBERS])

_pack = packing(6)


class CacheMoves(NamedTuple):
    """The rows of one batch by their place.

    Hits are in the cache before the batch. Admitted rows are in the cache only after it, and
    bypassed rows not even then. Rows of one kind ascend.
    """

    number: int
    """Position of the batch among those of the loop."""
    n: int
    """Number of its rows."""
    n_hits: int
    n_admitted: int
    positions: Positions
    """Positions in the batch of hits, admitted rows and bypassed rows, and then the slots of hits
    and admitted rows."""
    gathered: Rows
    """Row indices of admitted rows, and then of bypassed ones."""

    @property
    def n_held(self) -> int:
        """Number of rows that are in the cache after the batch."""
        return self.n_hits + self.n_admitted

    @property
    def n_bypassed(self) -> int:
        return self.n - self.n_held


class CachePolicy:
    """Decides for each batch which rows enter the cache, by a compiled function; see cache.c.

    The rows that enter take the slots in order. So the device has the rows in the first slots, up
    to those of the last batch that was carried out.

    A loop calls ``begin``, and then ``decide`` for every batch, in order. The decisions depend on
    nothing but these calls. One thread calls each of the two at a time.

    Args:
        n_rows: Rows of the table.
        capacity: Rows that the cache holds, from 1 to ``n_rows``.

    Attributes:
        nbytes: Bytes of the bookkeeping.
    """

    def __init__(self, n_rows: int, capacity: int) -> None:
        self._rows = np.zeros(n_rows, np.int32)
        self._slots = np.zeros(capacity, _SLOT)
        addresses = self._rows.ctypes.data, self._slots.ctypes.data
        self._cache: Any = np.array((*addresses, capacity, 0, 0, 0), _CACHE)
        self.nbytes = self._rows.nbytes + self._slots.nbytes
        # Batches and slots whose decisions are carried out, and the first batch whose rows may have
        # changed since the last flush.
        self._n_done = 0
        self._n_filled = 0
        self._first_changed = 0

    def begin(self) -> None:
        """Empty the cache for a new loop (no other thread runs).

        Uses in earlier loops count half as much.
        """
        held = self._slots[: self._cache["n_used"]]
        capacity = len(self._slots)
        self._rows[held["row"]] = held["n_uses"]
        self._rows >>= 1
        least = 0
        if capacity < len(self._rows):
            # Rows that are used as often as the last of the most frequent ones enter at any use.
            # A partition takes much longer, because most numbers are equal.
            least = max(2, np.sort(self._rows)[-capacity].item() + 1)
        self._cache["least"] = least
        self._cache["n_used"] = self._cache["n_batches"] = 0
        self._n_done = self._n_filled = self._first_changed = 0

    def decide(self, rows: Rows) -> CacheMoves:
        """Decide for the next batch (reader).

        Args:
            rows: Distinct row indices, ascending, shape (n,).
        """
        native = library()
        assert native is not None
        number, n = int(self._cache["n_batches"]), len(rows)
        rows = np.ascontiguousarray(rows, np.int64)
        positions, gathered = np.empty(3 * n, np.int32), np.empty(n, np.int64)
        counts = np.empty(2, np.int64)
        outputs = [address_of(array) for array in (positions, gathered, counts)]
        native.decide(_pack(address_of(self._cache), address_of(rows), n, *outputs))
        n_hits, n_admitted = counts.tolist()
        packed = positions[: n + n_hits + n_admitted]
        return CacheMoves(number, n, n_hits, n_admitted, packed, gathered[: n - n_hits])

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return for each row whether the cache holds it after the decisions so far, shape (n,)."""
        return self._rows.take(rows) < 0

    def note_done(self, moves: CacheMoves) -> None:
        """Note that the next decision is carried out (consumer)."""
        self._n_filled += moves.n_admitted
        self._n_done = moves.number + 1

    def changed_rows(self) -> tuple[Rows, Positions]:
        """Return the rows that may have changed since the last flush, and their slots.

        The rows ascend, and are on the device. Those that a later batch uses are among them,
        because its decision has replaced their last use. Readers may continue to decide.
        """
        filled = self._slots[: self._n_filled]
        slots = np.flatnonzero(filled["last_used"] >= self._first_changed)
        rows = filled["row"][slots]
        order = np.argsort(rows)
        return rows[order], slots[order].astype(np.int32)

    def note_flushed(self) -> None:
        """Note that all changed rows were written (consumer).

        The last batch may change its rows afterwards.
        """
        self._first_changed = max(0, self._n_done - 1)
