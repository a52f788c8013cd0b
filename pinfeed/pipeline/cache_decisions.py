"""CachedRows and CacheDecisions: the rows of a batch that enter, use and leave a cache.

Reader threads decide, in the order of batches, ahead of the consumer thread. So the rows that the
device has now are stored separately from those of the policy. They change when the decision about a
batch is carried out. This is one assignment, so an error or an interrupt is before or after it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

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
        return self.moves.positions

    @property
    def gathered(self) -> Rows:
        """Rows that are not in the cache: admitted ones, then bypassed ones."""
        return self.moves.rows[self.moves.n_hits : len(self.rows)]

    @property
    def written(self) -> Rows:
        """Rows that the batch writes to the stores: bypassed ones, then evicted ones."""
        return self.moves.rows[self._n_held :]

    @property
    def admitted(self) -> Rows:
        return self.moves.rows[self.moves.n_hits : self._n_held]

    @property
    def evicted(self) -> Rows:
        return self.moves.rows[len(self.rows) :]

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


class _Slots(NamedTuple):
    """Slots of the memory of a cache."""

    rows: Rows
    """The row in each slot; -1 for none."""
    used: npt.NDArray[np.int32]
    """Number of the last batch that used the row."""

    def move(self, cached: CachedRows) -> None:
        """Carry out the decision about a batch.

        During this, rows that enter the cache have their old values in the stores, and rows that
        leave it are in ``evicted_values``.
        """
        slots = cached.packed_positions
        admitted = slots[slice(*cached.admitted_slots)]
        self.rows[admitted] = cached.admitted if cached.has_moved else -1
        self.used[slots[slice(*cached.held_slots)]] = cached.number


class CacheDecisions:
    """Decisions about the rows of batches, and the number of decisions that are carried out.

    Args:
        n_rows: Number of rows of the stores.
        capacity: Number of rows that the cache holds.
    """

    def __init__(self, n_rows: int, capacity: int) -> None:
        self._policy = CachePolicy(n_rows, capacity)
        # Slots on the device, before the batches in _kept.
        self._slots = _Slots(np.full(capacity, -1, np.int64), np.full(capacity, -1, np.int32))
        # Decided batches: some may have been carried out, and the later ones have not.
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
        return self._policy.nbytes + self._slots.rows.nbytes + self._slots.used.nbytes

    def begin(self) -> None:
        """Empty the cache for a new loop; no reader thread runs then."""
        self._policy.begin()
        self._slots.rows[...] = -1
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
            cached = CachedRows(cache, rows, self._policy.decide(rows), self._n_decided)
            self._n_decided += 1
            while self._kept and self._kept[0].has_moved:
                self._slots.move(self._kept[0])
                self._kept.popleft()
            self._kept.append(cached)
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

        These are rows that the device has now. Reader threads may continue to decide.
        """
        with self._deciding:
            now = _Slots(self._slots.rows.copy(), self._slots.used.copy())
            for cached in self._kept:
                if cached.may_have_moved:
                    now.move(cached)
        slots = np.flatnonzero((now.used >= self._n_flushed) & (now.rows >= 0))
        order = np.argsort(now.rows[slots])
        return now.rows[slots][order], slots[order].astype(np.int32)

    def note_flushed(self) -> None:
        """Note that all changed rows were written (consumer)."""
        self._n_flushed = max(0, self._n_done - 1)
