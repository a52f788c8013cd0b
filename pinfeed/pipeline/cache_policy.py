"""CachePolicy: chooses the rows of a table that the device keeps between batches.

Rows that announced batches need have priority, in the order of their next use, as in Belady's
optimum. The other rows are ordered by the number of batches that used them. A later batch counts
more, so old counts age without a pass over all counts (LFU with exponential ageing).

The rows that a batch misses are compared with the rows in some of the slots, the *window*, which
moves over all slots from batch to batch. The best of both are in the cache afterwards.

NextUses: which announced batch uses the rows of each announced batch next.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows

Positions = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

# Counts halve while batches use this many times as many rows as the cache holds. This separates the
# least frequent rows that belong in the cache from slightly less frequent ones.
_HALF_LIFE = 64
# If a use counts more than this, all counts are scaled down.
_MAX_USE = 2.0**60
# The keys of announced rows are above all counts, and fall by a step from batch to batch. From this
# number of batches on, announced rows are ordered by their counts alone.
_KEY_STEP = np.float32(2.0**94)
_MAX_BATCHES = np.int32(1 << 24)
# The window has one slot for each missed row that is announced, and one for every
# _MISSES_PER_SLOT missed rows, but at least _MIN_WINDOW slots. A larger window lowers the misses by
# less than 1%, and moves more rows in and out.
_MIN_WINDOW = 1 << 13
_MISSES_PER_SLOT = 4

NEVER = np.iinfo(np.int32).max
"""Value in place of a batch number, for a row that no announced batch uses."""
_MAX_PLACE = np.iinfo(np.int32).max

_NO_SLOTS: Indices = np.empty(0, np.intp)


class CacheMoves(NamedTuple):
    """Rows of one batch by their place, and the rows that enter and leave the cache after its step.

    Attributes:
        bypassed: Positions of rows that the cache holds neither before nor after, ascending.
        admitted: Positions of rows that the cache holds only after the step, ascending.
        hits: Positions of rows that the cache holds before and after the step, ascending.
        admitted_slots: Slots of the admitted rows.
        hit_slots: Slots of the hits.
        evicted_rows: Indices of the rows that leave the cache; none of them is in the batch.
        evicted_slots: Slots of the evicted rows; admitted rows get them.
    """

    bypassed: Positions
    admitted: Positions
    hits: Positions
    admitted_slots: Slots
    hit_slots: Slots
    evicted_rows: Rows
    evicted_slots: Slots


class CachePolicy:
    """Decides for each batch which rows enter the cache, and which rows leave it for them.

    A loop calls ``begin``, and then ``announce`` and ``decide`` once for every batch, in order.
    Their time grows with the rows of the batch, and not with the capacity. The decisions depend on
    nothing but these calls. One thread calls the policy at a time.

    A cache that holds the whole table evicts nothing and counts nothing.

    Args:
        n_rows: Rows of the table.
        capacity: Rows that the cache holds, from 1 to ``n_rows``.

    Attributes:
        rows_of_slots: Row index in each slot, shape (capacity,); -1 in a free slot.
        last_used: Number of the last batch that used the row of each slot, shape (capacity,), where
            the first batch of the loop has number 0; -1 in a free slot.
    """

    def __init__(self, n_rows: int, capacity: int) -> None:
        self.rows_of_slots: npt.NDArray[np.int64] = np.full(capacity, -1, np.int64)
        self.last_used: npt.NDArray[np.int32] = np.full(capacity, -1, np.int32)
        self._slots = np.full(n_rows, -1, np.int32)
        self._n_used_slots = 0
        self._n_announced = 0
        self._n_decided = 0
        self._is_whole = capacity == n_rows
        n_counted, n_compared = (0, 0) if self._is_whole else (n_rows, capacity)
        self._next_uses = NextUses(n_counted)
        # Counts of the rows that are in no slot; the counts of other rows are out of date.
        self._counts = np.zeros(n_counted, np.float32)
        # The count of one use.
        self._use = 1.0
        # Counts of the rows in the slots, and numbers of the announced batches that use them next.
        self._held_counts = np.zeros(n_compared, np.float32)
        self._held_uses = np.full(n_compared, NEVER, np.int32)
        self._hand = 0

    @property
    def capacity(self) -> int:
        """Rows that the cache holds."""
        return len(self.rows_of_slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        n_announced = self._next_uses.n_reserved
        return self.nbytes_for(len(self._slots), self.capacity, n_announced)

    @staticmethod
    def nbytes_for(n_rows: int, capacity: int, n_announced: int = 0) -> int:
        """Return the bytes of the bookkeeping.

        Args:
            n_rows: Rows of the table.
            capacity: Rows that the cache holds.
            n_announced: Number of rows of announced batches that fit the allocated memory.
        """
        if capacity == n_rows:
            return 16 * n_rows
        return 12 * n_rows + 20 * capacity + 4 * n_announced

    def begin(self) -> None:
        """Empty the cache for a new loop; the counts stay."""
        used = slice(0, self._n_used_slots)
        rows = self.rows_of_slots[used]
        if not self._is_whole:
            self._counts[rows] = self._held_counts[used]
        self._slots[rows] = -1
        self.rows_of_slots[used] = -1
        self.last_used[used] = -1
        self._n_used_slots = 0
        self._n_announced = 0
        self._n_decided = 0
        self._next_uses.clear()

    def announce(self, rows: Rows) -> None:
        """Note the rows of the next batch that will be decided.

        Args:
            rows: Distinct row indices, ascending, shape (n,).
        """
        if not self._is_whole:
            # Earlier announced batches use the other rows first, and set their next use.
            slots = self._slots.take(self._next_uses.add(rows, self._n_announced))
            self._held_uses[slots.compress(slots >= 0)] = self._n_announced
        self._n_announced += 1

    def decide(self, rows: Rows) -> CacheMoves:
        """Decide for the oldest announced batch that is not decided yet.

        Args:
            rows: Distinct row indices, ascending, shape (n,), as they were announced.
        """
        slots = self._slots.take(rows)
        # numpy converts indices of other dtypes in each use.
        hits = np.flatnonzero(slots >= 0)
        misses = np.flatnonzero(slots < 0)
        hit_slots = slots.take(hits)
        held = hit_slots.astype(np.intp)
        self.last_used[held] = self._n_decided
        if self._is_whole:
            is_admitted = np.ones(len(misses), bool)
            admitted_slots = self._take_free(len(misses))
            evicted_slots = _NO_SLOTS
        else:
            next_uses = self._next_uses.pop()
            self._held_counts[held] += self._use
            self._held_uses[held] = next_uses.take(hits)
            is_admitted, admitted_slots, evicted_slots = self._admit(
                rows.take(misses), next_uses.take(misses)
            )
            self._age(len(rows))
        evicted_rows = self.rows_of_slots.take(evicted_slots)
        admitted = misses.compress(is_admitted)
        admitted_rows = rows.take(admitted)
        self._slots[evicted_rows] = -1
        self._slots[admitted_rows] = admitted_slots
        self.rows_of_slots[admitted_slots] = admitted_rows
        self.last_used[admitted_slots] = self._n_decided
        self._n_decided += 1
        return CacheMoves(
            bypassed=misses.compress(~is_admitted).astype(np.int32),
            admitted=admitted.astype(np.int32),
            hits=hits.astype(np.int32),
            admitted_slots=admitted_slots.astype(np.int32),
            hit_slots=hit_slots,
            evicted_rows=evicted_rows,
            evicted_slots=evicted_slots.astype(np.int32),
        )

    def contains(self, rows: Rows) -> Mask:
        """Return for each row whether the cache holds it after the decisions so far, shape (n,)."""
        return self._slots.take(rows) >= 0

    def _take_free(self, n: int) -> Indices:
        """Take ``n`` free slots, or all if they are fewer, for rows of the batch."""
        begin = self._n_used_slots
        self._n_used_slots = min(begin + n, self.capacity)
        self.last_used[begin : self._n_used_slots] = self._n_decided
        return np.arange(begin, self._n_used_slots)

    def _admit(self, rows: Rows, next_uses: npt.NDArray[np.int32]) -> tuple[Mask, Indices, Indices]:
        """Choose slots for missed rows, and count the use of the rows.

        Returns:
            Which rows get slots, shape (n,), those slots, and the slots whose rows are evicted.
        """
        counts = self._counts.take(rows)
        counts += self._use
        self._counts[rows] = counts
        slots = self._take_free(len(rows))
        if len(slots) == len(rows):
            is_admitted = np.ones(len(rows), bool)
            evicted_slots = _NO_SLOTS
        else:
            is_admitted, evicted_slots = self._compare(_keys(counts, next_uses), len(slots))
            self._counts[self.rows_of_slots.take(evicted_slots)] = self._held_counts[evicted_slots]
            slots = np.concatenate([slots, evicted_slots])
        self._held_counts[slots] = counts.compress(is_admitted)
        self._held_uses[slots] = next_uses.compress(is_admitted)
        return is_admitted, slots, evicted_slots

    def _compare(self, keys: Floats, n_free: int) -> tuple[Mask, Indices]:
        """Compare missed rows with those in the window.

        Args:
            keys: Keys of the missed rows, shape (n,).
            n_free: Slots that were free, fewer than the missed rows.

        Returns:
            Which missed rows are admitted, shape (n,), and the slots whose rows are evicted.
        """
        n_announced = int(np.count_nonzero(keys >= _KEY_STEP))
        size = max(_MIN_WINDOW, n_announced + len(keys) // _MISSES_PER_SLOT)
        size = min(self.capacity, size)
        begin = min(self._hand, self.capacity - size)
        window = slice(begin, begin + size)
        self._hand = window.stop % self.capacity
        held = _keys(self._held_counts[window], self._held_uses[window])
        # The rows of the batch stay.
        held[self.last_used[window] == self._n_decided] = np.inf

        n_left_out = len(keys) - n_free
        threshold = np.partition(np.concatenate([held, keys]), n_left_out)[n_left_out]
        is_evicted = held < threshold
        is_admitted = keys > threshold
        # The evicted rows and the free slots make room for the admitted rows. If one side has more,
        # rows at the threshold fill up the other.
        n_more = n_free + np.count_nonzero(is_evicted) - np.count_nonzero(is_admitted)
        is_admitted[np.flatnonzero(keys == threshold)[: max(n_more, 0)]] = True
        is_evicted[np.flatnonzero(held == threshold)[: max(-n_more, 0)]] = True
        return is_admitted, np.flatnonzero(is_evicted) + begin

    def _age(self, n_rows: int) -> None:
        """Make later uses count more, at most twice as much, after a batch of ``n_rows`` rows."""
        self._use *= 2.0 ** min(1.0, n_rows / (_HALF_LIFE * self.capacity))
        if self._use > _MAX_USE:
            self._counts /= self._use
            self._held_counts /= self._use
            self._use = 1.0


def _keys(counts: Floats, next_uses: npt.NDArray[np.int32]) -> Floats:
    """Return numbers that are higher for rows that are worth more to the cache."""
    # A row that is not announced gets a negative number in this step.
    announced = (_MAX_BATCHES - next_uses).astype(np.float32)
    announced *= _KEY_STEP
    return np.maximum(counts, announced, out=announced)


class NextUses:
    """Numbers of the batches that use the rows of each announced batch next.

    Every announced use of a row has a place, in order. A row knows the place of its last announced
    use, where the next batch that uses the row writes its number.

    Args:
        n_rows: Rows of the table.
    """

    def __init__(self, n_rows: int) -> None:
        self._places = np.full(n_rows, -1, np.int32)
        self._sizes: deque[int] = deque()
        # Range of the places of batches that were not popped.
        self._begin = 0
        self._end = 0
        # Place of the first number.
        self._origin = 0
        self._numbers = np.empty(0, np.int32)

    @property
    def n_reserved(self) -> int:
        """Number of rows of announced batches that fit the allocated memory."""
        return len(self._numbers)

    def clear(self) -> None:
        """Forget all announced batches."""
        self._sizes.clear()
        self._begin = self._end

    def add(self, rows: Rows, number: int) -> Rows:
        """Note that a batch uses rows.

        Args:
            rows: Distinct row indices, shape (n,).
            number: Number of the batch.

        Returns:
            The rows that no other announced batch uses.
        """
        self._reserve(len(rows))
        begin = self._end
        self._end += len(rows)
        self._sizes.append(len(rows))
        places = self._places.take(rows)
        self._places[rows] = np.arange(begin, self._end, dtype=np.int32)
        is_announced = places >= self._begin
        self._numbers[begin - self._origin : self._end - self._origin] = NEVER
        self._numbers[places.compress(is_announced) - self._origin] = number
        return rows.compress(~is_announced)

    def pop(self) -> npt.NDArray[np.int32]:
        """Return the number of the next batch that uses each row of the oldest batch.

        The array is valid until the next call of ``add``.
        """
        begin = self._begin - self._origin
        size = self._sizes.popleft()
        self._begin += size
        return self._numbers[begin : begin + size]

    def _reserve(self, n_rows: int) -> None:
        """Make room for the numbers of ``n_rows`` rows."""
        if self._end + n_rows > _MAX_PLACE:
            np.maximum(self._places - np.int32(self._begin), -1, out=self._places)
            self._origin -= self._begin
            self._end -= self._begin
            self._begin = 0
        if self._end + n_rows - self._origin <= len(self._numbers):
            return
        kept = self._numbers[self._begin - self._origin : self._end - self._origin].copy()
        n_needed = len(kept) + n_rows
        if 2 * n_needed > len(self._numbers):
            # With room for twice as many numbers, they are moved rarely.
            self._numbers = np.empty(2 * n_needed, np.int32)
        self._numbers[: len(kept)] = kept
        self._origin = self._begin
