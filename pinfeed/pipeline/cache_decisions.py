"""CachedRows and CacheDecisions: the rows of a batch that enter, use and leave a cache.

Reader threads decide, in the order of batches, ahead of the consumer thread. So the device has the
rows of the policy now, without the last decisions. One assignment notes that the decision about a
batch is carried out, so an error or an interrupt is before or after it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Stream, Tensor
from pinfeed.pipeline.cache_policy import CacheMoves, CachePolicy
from pinfeed.pipeline.forwarding import Positions
from pinfeed.rows.orders import Rows

if TYPE_CHECKING:
    from pinfeed.pipeline.row_cache import RowCache

PositionRange = tuple[int, int]
"""Range [begin, end) of the positions of a batch."""


@dataclass(eq=False)
class CachedRows:
    """The rows of a group in one batch: those in the cache, and those that enter and leave it."""

    cache: RowCache
    rows: Rows
    """All rows of the batch, ascending, each once."""
    moves: CacheMoves
    number: int
    """Position among the batches of the loop."""
    part: int = -1
    """Index of the part of the batch that has the positions on the device."""
    positions: Tensor | None = None
    """``packed_positions`` on the device, while the batch is lent."""
    gathered_values: list[Tensor] = field(default_factory=list)
    """Values of the gathered rows for each store, as they were lent."""
    evicted_values: list[Tensor] = field(default_factory=list)
    """Values of the evicted rows for each store, after they were copied from the cache."""
    written_values: list[Tensor] = field(default_factory=list)
    """Values of the rows in the last write of the batch, for each store."""
    stream: Stream | None = None
    """Stream that used these values last."""
    may_have_moved: bool = False
    """Whether slots of rows that enter and leave the cache may have been overwritten."""
    has_moved: bool = False
    """Whether the rows have entered and left the cache."""

    def undo(self, rows_of_slots: Rows) -> None:
        """Replace the rows in the slots by those before the decision.

        While the decision is carried out, rows that enter the cache have their old values in the
        stores, and rows that leave it are in ``evicted_values``.
        """
        slots = self.packed_positions
        rows_of_slots[slots[slice(*self.admitted_slots)]] = -1
        if not self.may_have_moved:
            rows_of_slots[slots[slice(*self.evicted_slots)]] = self.evicted

    def release(self) -> None:
        """Free the device memory of the rows, because their batch is over."""
        self.positions = None
        self.gathered_values = []
        self.evicted_values = []
        self.written_values = []

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors of the batch that the cache needs until the batch is over."""
        assert self.positions is not None
        values = (self.gathered_values, self.evicted_values, self.written_values)
        return [self.positions, *itertools.chain.from_iterable(values)]

    @property
    def packed_positions(self) -> Positions:
        """Positions of rows in the batch, and then slots, as they are copied to the device.

        The ranges below divide them.
        """
        return self.moves.positions[: self.held_slots[1]]

    @property
    def gathered(self) -> Rows:
        """Rows that are not in the cache: admitted ones, then bypassed ones."""
        return self.moves.rows[self.moves.n_hits : len(self.rows)]

    @property
    def written(self) -> Rows:
        """Rows that the batch writes to the stores: bypassed ones, then evicted ones."""
        return self.moves.rows[self._n_held : len(self.rows) + self.moves.n_evicted]

    @property
    def evicted(self) -> Rows:
        return self.written[self.n_bypassed :]

    @property
    def n_bypassed(self) -> int:
        return len(self.rows) - self._n_held

    @property
    def n_gathered(self) -> int:
        return len(self.rows) - self.moves.n_hits

    @property
    def _n_held(self) -> int:
        return self.moves.n_hits + self.moves.n_admitted

    @property
    def hit_positions(self) -> PositionRange:
        return 0, self.moves.n_hits

    @property
    def held_positions(self) -> PositionRange:
        """Rows that are in the cache after the batch: hits, then admitted ones."""
        return 0, self._n_held

    @property
    def gathered_positions(self) -> PositionRange:
        return self.moves.n_hits, len(self.rows)

    @property
    def bypassed_positions(self) -> PositionRange:
        return self._n_held, len(self.rows)

    @property
    def hit_slots(self) -> PositionRange:
        return len(self.rows), len(self.rows) + self.moves.n_hits

    @property
    def admitted_slots(self) -> PositionRange:
        return self.hit_slots[1], self.held_slots[1]

    @property
    def held_slots(self) -> PositionRange:
        """Slots of the rows of ``held_positions``."""
        return len(self.rows), len(self.rows) + self._n_held

    @property
    def evicted_slots(self) -> PositionRange:
        """Slots of the evicted rows, which the last admitted rows get."""
        end = self.held_slots[1]
        return end - self.moves.n_evicted, end


class CacheDecisions:
    """Decisions about the rows of batches, and the number of decisions that are carried out.

    Args:
        n_rows: Number of rows of the stores.
        capacity: Number of rows that the cache holds.
    """

    def __init__(self, n_rows: int, capacity: int) -> None:
        self._policy = CachePolicy(n_rows, capacity)
        # Batches whose decisions have not been carried out, perhaps after some others.
        self._kept: deque[CachedRows] = deque()
        self._n_decided = 0
        # Number of decisions carried out since the loop began, and the same number at the last
        # flush without the last batch, because its rows may have changed after the flush.
        self._n_done = 0
        self._n_flushed = 0
        # Held while a decision is made, and while the rows in the cache are listed, because a
        # signal handler may close the feeder then.
        self._deciding = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._policy.nbytes

    def begin(self) -> None:
        """Empty the cache for a new loop; no reader thread runs then."""
        self._policy.begin()
        self._kept.clear()
        self._n_decided = 0
        self._n_done = 0
        self._n_flushed = 0

    def close(self) -> None:
        """Release the batches, because the loop has ended; no reader thread runs then."""
        self._kept.clear()

    def decide(self, cache: RowCache, rows: Rows) -> CachedRows:
        """Decide about the next batch, with its distinct rows (reader)."""
        with self._deciding:
            cached = CachedRows(cache, rows, CacheMoves(len(rows)), self._n_decided)
            self._n_decided += 1
            while self._kept and self._kept[0].has_moved:
                self._kept.popleft()
            # Before the decision, because an interrupt or a signal handler may follow it.
            self._kept.append(cached)
            self._policy.decide(rows, cached.moves)
        return cached

    def contains(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return whether each row is in the cache for the next batch to decide (reader)."""
        return self._policy.contains(rows)

    def note_done(self, cached: CachedRows) -> None:
        """Note that a decision is carried out (consumer; in the order of batches)."""
        self._n_done = cached.number + 1
        cached.has_moved = True

    def changed_rows(self) -> tuple[Rows, Positions]:
        """Return the rows that may have changed since the last flush, ascending, and their slots.

        These are rows that the device has now. Rows that a later batch uses are among them, because
        its decision has replaced their last use. Reader threads may continue to decide.
        """
        with self._deciding:
            rows = self._policy.rows_of_slots.copy()
            is_changed = self._policy.last_used >= self._n_flushed
            for cached in reversed(self._kept):
                if not cached.has_moved:
                    cached.undo(rows)
        slots = np.flatnonzero(is_changed & (rows >= 0))
        order = np.argsort(rows[slots])
        return rows[slots][order], slots[order].astype(np.int32)

    def note_flushed(self) -> None:
        """Note that all changed rows were written (consumer)."""
        self._n_flushed = max(0, self._n_done - 1)
