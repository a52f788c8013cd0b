"""RecentRows: the rows of the latest batches, and the rows that a new batch shares with them.

Each batch is compared with the earlier batches whose writes it may not see. Two tables of marks
have many more entries than a batch has rows. Each entry stores the last batch that contained one of
the entry's rows. So two look-ups show that most rows of a large table are new. The other rows are
searched in the sorted rows of the earlier batches, from the newest to the oldest. An earlier batch
that contains a row knows the batch before it with that row, so older batches need no search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pinfeed.pipeline.forwarding import Overlap, Positions, SharedRows, Span
from pinfeed.rows.distinct import sort_rows
from pinfeed.rows.orders import Rows

# Entries per row of a batch in each table. With more entries, fewer rows are searched in vain.
_MARKS_PER_ROW = 32
# Rows with the same entry in the first table are scattered over so many entries of the second one,
# by the high bits of their products with a large odd number.
_PAGE = (1 << 12) - 1
_SCATTER = 0x5851F42D4C957F2D
# Rows are marked in steps of this size, whose numbers fit into the processor's cache.
_STEP_ROWS = 8192

_NONE: Positions = np.empty(0, np.int32)
_Pair = tuple[Positions, Positions]
"""Positions of rows that two batches have in common: in the later one, and in the earlier one."""
_NO_PAIR: _Pair = (_NONE, _NONE)


class RecentRows:
    """The rows of the latest batches of a loop.

    Args:
        n_ahead: Number of earlier batches that may still be written when a batch is added.
    """

    def __init__(self, n_ahead: int) -> None:
        self._n_ahead = n_ahead
        self._groups: list[_GroupHistory] = []

    def add(
        self,
        number: int,
        groups: Sequence[Rows],
        pending: Collection[int],
        written: Sequence[Rows] | None = None,
    ) -> tuple[SharedRows, list[int | None]]:
        """Compare the rows that a batch gathers with those that earlier batches may write.

        These are the ``n_ahead`` previous batches, and the batches in ``pending``.

        Args:
            number: Number of the batch. Every batch is added, in order.
            groups: For each group, the indices of the rows that the batch gathers, shape (n,); they
                may repeat.
            pending: Numbers of batches with writes that are not completed.
            written: For each group, the indices of the rows that the batch may write, shape (m,),
                which are kept; None for the rows that it gathers.

        Returns:
            The rows that the batch shares with earlier batches; and for each group a row index that
            occurs twice, or None if every row is distinct.
        """
        if not self._groups:
            self._groups = [_GroupHistory() for _ in groups]
        sorted_groups = [_SortedRows(number, rows) for rows in groups]
        pieces: list[Positions] = []
        overlaps = []
        begin = 0
        for i, (history, rows) in enumerate(zip(self._groups, sorted_groups, strict=True)):
            kept = rows
            if written is not None and written[i] is not groups[i]:
                kept = _SortedRows(number, written[i])
            found: dict[int, Overlap] = {}
            old = [batch for batch in history.numbers if batch < number - self._n_ahead]
            history.drop(batch for batch in old if batch not in pending)
            for earlier, pairs in history.add(rows, kept) if self._n_ahead else ():
                spans = []
                for later_pos, earlier_pos in pairs:
                    pieces += [rows.unsorted(later_pos), earlier.unsorted(earlier_pos)]
                    spans.append(Span(begin, len(later_pos)))
                    begin += 2 * len(later_pos)
                found[earlier.number] = Overlap(*spans)
            overlaps.append(found)
        positions = np.concatenate(pieces) if pieces else _NONE
        return SharedRows(positions, overlaps), [rows.repeated for rows in sorted_groups]


class _SortedRows:
    """The sorted rows of a group in one batch, and the last earlier batch with each row.

    Attributes:
        number: Number of the batch.
        rows: Row indices, ascending.
        repeated: A row index that occurs twice; None if all are distinct.
        ages: For each row, the number of batches since its last use; 0 for a new row. Empty until
            the batch was compared with others.
        sources: For each row that is not new, its position among the sorted rows of that batch.
    """

    def __init__(self, number: int, rows: Rows) -> None:
        self.number = number
        self.rows = rows
        self.repeated: int | None = None
        # Positions of the sorted rows; None if the rows are sorted already.
        self._order: Positions | None = None
        self.ages: Positions = _NONE
        self.sources: Positions = _NONE
        if bool((rows[1:] > rows[:-1]).all()):
            # This is a copy, because the user has the rows of the batch and may change them.
            self.rows = rows.copy()
            return
        self.rows, order = sort_rows(rows)
        self._order = order.astype(np.int32)
        repeated = np.flatnonzero(self.rows[1:] == self.rows[:-1])
        if len(repeated):
            self.repeated = int(self.rows[repeated[0]])

    def find(self, rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return whether the batch contains each given row, and the places of contained rows."""
        if not len(self.rows):
            return np.zeros(len(rows), bool), np.zeros(len(rows), np.intp)
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return self.rows[places] == rows, places

    def unsorted(self, positions: Positions) -> Positions:
        """Convert positions among the sorted rows to positions in the batch."""
        return positions if self._order is None else self._order[positions]


class _GroupHistory:
    """The rows of one group in the latest batches."""

    def __init__(self) -> None:
        # Batches by number, in order.
        self._batches: dict[int, _SortedRows] = {}
        self._marks = _Marks(0)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the batches that are kept."""
        return list(self._batches)

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the rows of batches that no later batch is compared with."""
        for number in numbers:
            dropped = self._batches.pop(number)
            if number < min(self._batches, default=number):
                # No batch remains that had a row before the dropped one.
                continue
            for batch in self._batches.values():
                # An older batch may have had a row before the dropped one.
                passed = np.flatnonzero(batch.ages == batch.number - number)
                places = batch.sources[passed]
                ages = dropped.ages[places]
                batch.ages[passed] = np.where(ages, ages + (batch.number - number), 0)
                batch.sources[passed] = dropped.sources[places]

    def add(
        self, rows: _SortedRows, kept: _SortedRows
    ) -> list[tuple[_SortedRows, tuple[_Pair, _Pair]]]:
        """Find the rows that each kept batch shares with a new batch, and keep the new batch.

        Args:
            rows: Rows that the new batch gathers.
            kept: Rows that the new batch may write.

        Returns:
            Batches that share rows with the new one, newest first. Each has the shared rows that no
            later batch contains, and the other shared rows. Positions are among the sorted rows.
        """
        self._grow_marks(len(kept.rows))
        latest = self._latest(rows, marks=kept is rows)
        if kept is not rows:
            self._latest(kept, marks=True)
        # Shared rows by the number of an older batch that a later batch has pointed to.
        passed_on: dict[int, list[_Pair]] = {}
        found = []
        for batch in reversed(self._batches.values()):
            if batch.number not in latest and batch.number not in passed_on:
                continue
            newest = latest.get(batch.number, _NO_PAIR)
            hidden = _joined(passed_on.get(batch.number, []))
            found.append((batch, (newest, hidden)))
            later_pos, places = _joined([newest, hidden])
            ages = batch.ages[places]
            for age in np.flatnonzero(np.bincount(ages)).tolist():
                if age:
                    chosen = np.flatnonzero(ages == age)
                    pair = (later_pos[chosen], batch.sources[places[chosen]])
                    passed_on.setdefault(batch.number - age, []).append(pair)
        self._batches[kept.number] = kept
        return found

    def _grow_marks(self, n_rows: int) -> None:
        """Make room for the marks of batches with ``n_rows`` rows."""
        if n_rows > self._marks.n_rows:
            self._marks = _Marks(n_rows)
            for batch in self._batches.values():
                self._marks.ages(batch, renew=True)

    def _latest(self, rows: _SortedRows, *, marks: bool) -> dict[int, _Pair]:
        """Find the newest kept batch that contains each row, and note it in ``rows``.

        Args:
            rows: Rows of a new batch.
            marks: Whether the history will keep the batch with these rows.
        """
        found: dict[int, _Pair] = {}
        ages = self._marks.ages(rows, renew=marks)
        rows.ages = np.zeros(len(rows.rows), np.int32)
        rows.sources = np.empty(len(rows.rows), np.int32)
        if not self._batches:
            return found
        # Positions of rows that an earlier batch may contain.
        left = np.flatnonzero(ages <= rows.number - min(self._batches))
        for batch in reversed(self._batches.values()):
            if not len(left):
                break
            is_there, places = batch.find(rows.rows[left])
            later_pos = left[is_there].astype(np.int32)
            if len(later_pos):
                sources = places[is_there].astype(np.int32)
                rows.ages[later_pos] = rows.number - batch.number
                rows.sources[later_pos] = sources
                found[batch.number] = later_pos, sources
                left = left[~is_there]
        return found


class _Marks:
    """Numbers, modulo 256, of the last batches that contained a row of each entry.

    Every row has an entry in each of two tables. A row is new if one of its marks is too old. A
    mark that is more than 256 batches old may look recent; its row is then searched in vain.

    Args:
        n_rows: Rows of the largest batch.
    """

    def __init__(self, n_rows: int) -> None:
        n_entries = max(_PAGE + 1, 1 << (_MARKS_PER_ROW * n_rows - 1).bit_length())
        self.n_rows = n_entries // _MARKS_PER_ROW
        """Maximum number of rows of a batch."""
        self._tables = np.zeros((2, n_entries), np.uint8)

    def ages(self, batch: _SortedRows, *, renew: bool) -> npt.NDArray[np.uint8]:
        """Return the minimum number of batches since the last use of each row of a batch.

        Args:
            batch: The batch.
            renew: Whether to mark the rows as those of this batch.
        """
        number = np.uint8(batch.number & 0xFF)
        one, other = self._tables
        ages = np.empty(len(batch.rows), np.uint8)
        for begin in range(0, len(ages), _STEP_ROWS):
            rows = batch.rows[begin : begin + _STEP_ROWS]
            in_one = rows & (len(one) - 1)
            # The entries of sorted rows are also close in the second table, so memory is fast.
            in_other = (in_one & ~_PAGE) | ((rows * _SCATTER) >> 40) & _PAGE
            np.maximum(
                number - one[in_one],
                number - other[in_other],
                out=ages[begin : begin + _STEP_ROWS],
            )
            if renew:
                one[in_one] = number
                other[in_other] = number
        return ages


def _joined(pairs: Sequence[_Pair]) -> _Pair:
    pairs = [pair for pair in pairs if len(pair[0])]
    if len(pairs) < 2:
        return pairs[0] if pairs else _NO_PAIR
    later_pos, earlier_pos = zip(*pairs, strict=True)
    return np.concatenate(later_pos), np.concatenate(earlier_pos)
