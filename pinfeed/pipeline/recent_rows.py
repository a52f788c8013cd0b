"""RecentRows: the rows of the latest batches, and which of them a new batch has in common.

The rows of each batch are compared with those of the batches whose writes it may not see. Two
tables of marks have many times more entries than a batch has rows. Each entry tells which batch was
the last to hold one of the rows of that entry, so that most rows of a large table are found to be
new by two looks. The others are searched among the sorted rows of the earlier batches, the newest
first. Where an earlier batch holds a row, that batch knows which one held it before, so the older
ones need no search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pinfeed.pipeline.forwarding import Overlap, Positions, SharedRows, Span
from pinfeed.rows.distinct import sort_rows
from pinfeed.rows.orders import Rows

# Entries for each row of a batch in either table. With more, fewer rows are searched in vain.
_MARKS_PER_ROW = 32
# Rows that have the same entry in the first table are scattered over so many in the second, by the
# high bits of their multiples of a large odd number.
_PAGE = (1 << 12) - 1
_SCATTER = 0x5851F42D4C957F2D
# Rows are marked in steps whose numbers stay in the cache.
_STEP_ROWS = 8192

_NONE: Positions = np.empty(0, np.int32)
_Pair = tuple[Positions, Positions]
"""Positions of rows that two batches have in common: in the later one, and in the earlier one."""
_NO_PAIR: _Pair = (_NONE, _NONE)


class RecentRows:
    """The rows of the latest batches of a loop.

    Args:
        n_ahead: Number of batches before a batch that may still be written when it is added.
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

        It is compared with the ``n_ahead`` batches before it, and with those in ``pending``.

        Args:
            number: Number of the batch. Every batch is added, in order.
            groups: For each group of rows the indices of those that the batch gathers, shape (n,);
                they may repeat.
            pending: Numbers of the batches whose writes are not completed.
            written: For each group the indices of the rows that the batch may write, shape (m,),
                which are kept; by default those that it gathers.

        Returns:
            The rows that the batch has in common with earlier ones; and for each group a row index
            that occurs twice in it, or None if every row is distinct.
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
    """The sorted rows of a group of one batch, and who held each of them before.

    Attributes:
        number: Number of the batch.
        rows: Row indices, ascending.
        repeated: A row index that occurs twice; None if all are distinct.
        ages: For each row, how many batches ago it was held last; 0 for a row that is new. Empty
            until the batch was compared with others.
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
            # Copied, because the user has the rows of the batch and may change them.
            self.rows = rows.copy()
            return
        self.rows, order = sort_rows(rows)
        self._order = order.astype(np.int32)
        repeated = np.flatnonzero(self.rows[1:] == self.rows[:-1])
        if len(repeated):
            self.repeated = int(self.rows[repeated[0]])

    def find(self, rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return which of some rows are among these, and where; only found rows have a place."""
        if not len(self.rows):
            return np.zeros(len(rows), bool), np.zeros(len(rows), np.intp)
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return self.rows[places] == rows, places

    def unsorted(self, positions: Positions) -> Positions:
        """Return the positions in the batch of positions among the sorted rows."""
        return positions if self._order is None else self._order[positions]


class _GroupHistory:
    """The latest batches' rows of one group."""

    def __init__(self) -> None:
        # Batches by number, in order.
        self._batches: dict[int, _SortedRows] = {}
        self._marks = _Marks(0)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the batches that are kept."""
        return list(self._batches)

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the rows of batches that no later batch has to be compared with."""
        for number in numbers:
            dropped = self._batches.pop(number)
            if number < min(self._batches, default=number):
                # No batch is left that held a row before the dropped one.
                continue
            for batch in self._batches.values():
                # An older batch may have held a row before the dropped one.
                passed = np.flatnonzero(batch.ages == batch.number - number)
                places = batch.sources[passed]
                ages = dropped.ages[places]
                batch.ages[passed] = np.where(ages, ages + (batch.number - number), 0)
                batch.sources[passed] = dropped.sources[places]

    def add(
        self, rows: _SortedRows, kept: _SortedRows
    ) -> list[tuple[_SortedRows, tuple[_Pair, _Pair]]]:
        """Find the rows that each kept batch has in common with a new one, and keep that one.

        Args:
            rows: Rows that the new batch gathers.
            kept: Rows that it may write.

        Returns:
            Batches that have rows in common with it, newest first, each with the rows that no later
            one holds, and with the others. The positions are those among the sorted rows.
        """
        self._grow_marks(len(kept.rows))
        latest = self._latest(rows, marks=kept is rows)
        if kept is not rows:
            self._latest(kept, marks=True)
        # Rows by the number of the batch that held them before a later batch did.
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
        """Make room for the marks of batches of so many rows."""
        if n_rows > self._marks.n_rows:
            self._marks = _Marks(n_rows)
            for batch in self._batches.values():
                self._marks.ages(batch, renew=True)

    def _latest(self, rows: _SortedRows, *, marks: bool) -> dict[int, _Pair]:
        """Find the newest kept batch that holds each row, and note it in ``rows``.

        Args:
            rows: Rows of a new batch.
            marks: Whether the batch is going to be kept with these rows.
        """
        found: dict[int, _Pair] = {}
        ages = self._marks.ages(rows, renew=marks)
        rows.ages = np.zeros(len(rows.rows), np.int32)
        rows.sources = np.empty(len(rows.rows), np.int32)
        if not self._batches:
            return found
        # Positions of rows that an earlier batch may hold.
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
    """Numbers of the batches that held the rows of each entry last, modulo 256.

    Every row has an entry in each of two tables. A row is new if one of its marks is too old. A
    mark of more than 256 batches ago may look recent, and its row is then searched in vain.

    Args:
        n_rows: Rows of the largest batch.
    """

    def __init__(self, n_rows: int) -> None:
        n_entries = max(_PAGE + 1, 1 << (_MARKS_PER_ROW * n_rows - 1).bit_length())
        self.n_rows = n_entries // _MARKS_PER_ROW
        """Rows of the largest batch for which there is room."""
        self._tables = np.zeros((2, n_entries), np.uint8)

    def ages(self, batch: _SortedRows, *, renew: bool) -> npt.NDArray[np.uint8]:
        """Return for each row of a batch how many batches ago, at least, it was held last.

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
            # The entries of sorted rows are close in the second table, too, as memory wants it.
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
