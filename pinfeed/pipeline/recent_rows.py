"""RecentRows: the rows of the latest batches, and the rows that a new batch shares with them.

Each batch is compared with the earlier batches whose writes it may not see. Reader threads do most
of this in parallel: they sort the rows of a batch, and search them in the earlier batches. Between
the two steps, each batch is added to the history of the loop, in order.

The history of a group of rows is a hash table. Every row of a batch has a place, which is a number:
the rows of a batch have consecutive places, and the next batch continues. An entry of the table has
the last place of a row with this entry. Each row links to the previous batch that has it: its place
links to the previous place of a row with the same entry. So the links lead from the newest batch to
the oldest one that has a row.

The rows of a batch are sorted by their hashes. Therefore the processor reads the table and the rows
of other batches in ascending order, which is several times faster than random access.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.memory.limits import n_held
from pinfeed.pipeline.forwarding import Overlap, PositionRange, Positions, SharedRows
from pinfeed.rows.orders import Rows

Places = npt.NDArray[np.uint32]
"""Places of rows, modulo 2^32."""
Pair = tuple[Positions, Positions]
"""Positions of rows that two batches have in common: in the later one, and in the earlier one."""

# A sort key has the hash of a row in its high bits, and the position of the row in the others.
_HASH_BITS = 40
_POSITION_BITS = 64 - _HASH_BITS
# Odd integer nearest to 2^40 divided by the golden ratio, which spreads the hashes of ranges of
# rows (Knuth, "The Art of Computer Programming", section 6.4), in the bits of the hash.
_FACTOR = np.uint64(0x9E3779B97F << _POSITION_BITS)
_LAST_PLACE = (1 << 32) - 1
# Entries of a new table contain place 0, from which the first place is far.
_FIRST_PLACE = 1 << 31

_NOTHING: npt.NDArray[np.intp] = np.empty(0, np.intp)
_NO_PAIR: Pair = (np.empty(0, np.int32), np.empty(0, np.int32))


class HashedRows:
    """The rows of a group in one batch, sorted by their hashes.

    Args:
        rows: Row indices, shape (n,). They are copied, because the user may change them.

    Attributes:
        rows: The row indices, ascending by their hashes; equal rows are adjacent.
        order: For each of these, its position in the batch.
        repeated: A row index that occurs twice; None if all are distinct.
    """

    def __init__(self, rows: Rows) -> None:
        keys = _hashes(rows)
        if len(rows) >> _POSITION_BITS or int(rows.max(initial=0)) >> _HASH_BITS:
            # Different rows may have the same hash.
            order = np.lexsort((rows, keys))
        else:
            # numpy sorts integers many times faster than it finds the order that sorts them.
            keys |= np.arange(len(rows), dtype=np.uint64)
            keys.sort()
            keys &= np.uint64((1 << _POSITION_BITS) - 1)
            order = keys.view(np.int64)
        self.rows = rows.take(order)
        self.order: Positions = order.astype(np.int32)
        repeats = self.rows[1:] == self.rows[:-1]
        self.repeated = int(self.rows[repeats.argmax()]) if repeats.any() else None


class KeptBatch(NamedTuple):
    """The rows that a batch may write.

    Attributes:
        number: Number of the batch.
        begin: Place of its first row.
        rows: Its rows, all distinct.
        older: For each row, the previous place with the same entry in the table.
    """

    number: int
    begin: int
    rows: HashedRows
    older: Places

    def positions(self, places: Places) -> Places:
        """Return positions among the sorted rows; they are too large for rows of other batches."""
        return places - np.uint32(self.begin & _LAST_PLACE)


@dataclass(frozen=True)
class RowSearch:
    """The search for the rows of a batch in earlier batches; any thread may make it.

    Later batches may be added to the history before the search. Batches that are dropped before it
    may be left out.

    Attributes:
        rows: The rows.
        places: For each row, the last place with the same entry when the batch was added.
        batches: The batches that were kept then, oldest first.
        end: The place after the last one of these batches.
    """

    rows: HashedRows
    places: Places
    batches: tuple[KeptBatch, ...]
    end: int

    @classmethod
    def of_nothing(cls, rows: HashedRows) -> RowSearch:
        """Return a search without earlier batches."""
        return cls(rows, np.empty(0, np.uint32), (), 0)

    def find(self) -> list[tuple[KeptBatch, tuple[Pair, Pair]]]:
        """Find the rows that each earlier batch shares with the batch.

        Returns:
            Batches that share rows, newest first. Each has the shared rows that no later batch
            contains, and the other shared rows. Positions are those in the batches.
        """
        found: list[tuple[KeptBatch, tuple[Pair, Pair]]] = []
        if not self.batches:
            return found
        n_places = np.uint32((self.end - self.batches[0].begin) & _LAST_PLACE)
        # Other entries are empty, or have rows of older batches.
        left = np.flatnonzero(np.uint32((self.end - 1) & _LAST_PLACE) - self.places < n_places)
        places = self.places.take(left)
        is_new = np.ones(len(self.places), bool)
        for batch in reversed(self.batches):
            later, earlier = self._follow(batch, left, places)
            if not len(later):
                continue
            pair = self.rows.order.take(later), batch.rows.order.take(earlier)
            pairs = pair, _NO_PAIR
            if found:
                newest = is_new.take(later)
                pairs = _selected(pair, newest), _selected(pair, ~newest)
            is_new[later] = False
            found.append((batch, pairs))
        return found

    def _follow(
        self, batch: KeptBatch, left: Rows, places: Places
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Follow the links through one batch.

        Args:
            batch: The batch.
            left: Positions of the rows to find, among the sorted rows.
            places: Their places. Those in the batch are replaced by links to older batches.

        Returns:
            Positions of the shared rows, in this batch and in the other one, among the sorted rows.
        """
        n_rows = np.uint32(len(batch.older))
        found = []
        inside = np.flatnonzero(batch.positions(places) < n_rows)
        while len(inside):
            later = left.take(inside)
            earlier = batch.positions(places.take(inside)).astype(np.intp)
            is_same = batch.rows.rows.take(earlier) == self.rows.rows.take(later)
            found.append((later.compress(is_same), earlier.compress(is_same)))
            older = batch.older.take(earlier)
            places[inside] = older
            inside = inside.compress(batch.positions(older) < n_rows)
        if not found:
            return _NOTHING, _NOTHING
        every_later, every_earlier = zip(*found, strict=True)
        return np.concatenate(every_later), np.concatenate(every_earlier)


class RowHistory:
    """The rows of one group in the latest batches.

    Args:
        n_batches: Number of batches for whose rows the table has entries, at least 2; more batches
            share these entries.
    """

    def __init__(self, n_batches: int) -> None:
        self._n_batches = n_batches
        self._n_rows = 0
        self._table: Places = np.zeros(2, np.uint32)
        self._end = _FIRST_PLACE
        # Batches by number, in order.
        self._batches: dict[int, KeptBatch] = {}

    @property
    def numbers(self) -> list[int]:
        """Numbers of the batches that are kept."""
        return list(self._batches)

    def add(self, number: int, rows: HashedRows, kept: HashedRows) -> RowSearch:
        """Return a search for the rows of a new batch, and keep the batch.

        A batch in which a row repeats cannot be written. So it is not kept.

        Args:
            number: Number of the batch.
            rows: Rows that the batch gathers.
            kept: Rows that the batch may write.
        """
        if len(kept.rows) > self._n_rows:
            self._grow(len(kept.rows))
        batches = tuple(self._batches.values())
        end = self._end
        entries = self._entries(rows)
        places = self._table.take(entries)
        if kept.repeated is None and kept is rows:
            self._insert(number, kept, entries, places.copy())
        elif kept.repeated is None:
            self._insert_new(number, kept)
        return RowSearch(rows, places, batches, end)

    def drop(self, number: int) -> None:
        """Drop the rows of a batch that no later batch is compared with."""
        dropped = self._batches.pop(number)
        if number < min(self._batches, default=number + 1):
            # Links to the oldest batch are the last ones, so they may stay.
            return
        for batch in self._batches.values():
            _link_past(dropped, batch.older)
        entries = self._entries(dropped.rows)
        places = self._table.take(entries)
        _link_past(dropped, places)
        self._table[entries] = places

    def _entries(self, rows: HashedRows) -> npt.NDArray[np.int64]:
        """Return the entry of each row in the table, ascending."""
        n_bits = len(self._table).bit_length() - 1
        hashes = _hashes(rows.rows)
        hashes >>= np.uint64(64 - n_bits)
        return hashes.view(np.int64)

    def _insert_new(self, number: int, rows: HashedRows) -> None:
        """Add a batch with distinct rows to the table."""
        entries = self._entries(rows)
        self._insert(number, rows, entries, self._table.take(entries))

    def _insert(
        self, number: int, rows: HashedRows, entries: npt.NDArray[np.int64], older: Places
    ) -> None:
        """Add a batch with distinct rows to the table.

        Args:
            number: Number of the batch.
            rows: Its rows.
            entries: The entry of each row.
            older: The places in these entries, which the batch keeps.
        """
        batch = KeptBatch(number, self._end, rows, older)
        self._end += len(entries)
        new = np.arange(len(entries), dtype=np.uint32)
        new += np.uint32(batch.begin & _LAST_PLACE)
        # The last of several rows with the same entry is in the table, and links to the others.
        self._table[entries] = new
        np.copyto(older[1:], new[:-1], where=entries[1:] == entries[:-1])
        self._batches[number] = batch

    def _grow(self, n_rows: int) -> None:
        """Make a larger table, for batches with ``n_rows`` rows."""
        self._n_rows = n_rows
        self._table = np.zeros(n_entries(self._n_batches * n_rows), np.uint32)
        kept = list(self._batches.values())
        for batch in kept:
            self._insert_new(batch.number, batch.rows)


def n_entries(n_rows: int) -> int:
    """Return the number of entries, a power of two, of a table for ``n_rows`` rows."""
    return 1 << min((n_rows - 1).bit_length(), _HASH_BITS)


def _selected(pair: Pair, mask: npt.NDArray[np.bool_]) -> Pair:
    later, earlier = pair
    return later.compress(mask), earlier.compress(mask)


def _hashes(rows: Rows) -> npt.NDArray[np.uint64]:
    """Return the hash of each row in the highest bits of a number, whose other bits are 0."""
    return rows.view(np.uint64) * _FACTOR


def _link_past(dropped: KeptBatch, places: Places) -> None:
    """Replace places of a dropped batch by the older ones that they link to."""
    while True:
        positions = dropped.positions(places)
        inside = np.flatnonzero(positions < len(dropped.older))
        if not len(inside):
            return
        places[inside] = dropped.older.take(positions.take(inside))


class HashedGroups(NamedTuple):
    """The rows of a batch, sorted by their hashes."""

    gathered: Sequence[HashedRows]
    """For each group, the rows that the batch gathers."""
    written: Sequence[HashedRows]
    """For each group, the rows that the batch may write."""

    @property
    def repeated(self) -> list[int | None]:
        """For each group, a row index that occurs twice, or None if every row is distinct."""
        return [rows.repeated for rows in self.gathered]


def hash_groups(groups: Sequence[Rows], written: Sequence[Rows]) -> HashedGroups:
    """Sort the rows of a batch by their hashes (any thread).

    Args:
        groups: For each group, the indices of the rows that the batch gathers, shape (n,); they may
            repeat.
        written: For each group, the indices of the rows that the batch may write, shape (m,); the
            same array if it may write the rows that it gathers.
    """
    gathered = [HashedRows(rows) for rows in groups]
    triples = zip(groups, gathered, written, strict=True)
    return HashedGroups(
        gathered,
        [hashed if other is rows else HashedRows(other) for rows, hashed, other in triples],
    )


@dataclass(frozen=True)
class SharedRowSearch:
    """The search for the rows of a batch in earlier batches; any thread may make it."""

    searches: Sequence[RowSearch]
    """A search for each group."""

    def find(self) -> SharedRows:
        """Return the rows that the batch shares with earlier batches."""
        pieces: list[Positions] = []
        overlaps: list[dict[int, Overlap]] = []
        begin = 0
        for search in self.searches:
            found = {}
            for earlier, pairs in search.find():
                ranges = []
                for pair in pairs:
                    pieces += pair
                    ranges.append(PositionRange(begin, len(pair[0])))
                    begin += 2 * len(pair[0])
                found[earlier.number] = Overlap(*ranges)
            overlaps.append(found)
        return SharedRows(np.concatenate(pieces) if pieces else np.empty(0, np.int32), overlaps)


class RecentRows:
    """The rows of the latest batches of a loop.

    Args:
        n_ahead: Number of earlier batches that may still be written when a batch is added.
    """

    def __init__(self, n_ahead: int) -> None:
        self._n_ahead = n_ahead
        self._groups: list[RowHistory] = []

    def add(self, number: int, groups: HashedGroups, pending: Collection[int]) -> SharedRowSearch:
        """Add a batch, and return the search for its rows in batches that may be written later.

        These are the ``n_ahead`` previous batches, and the batches in ``pending``.

        Args:
            number: Number of the batch. Every batch is added, in order.
            groups: Rows of the batch.
            pending: Numbers of batches with writes that are not completed.
        """
        if not self._n_ahead:
            return SharedRowSearch([RowSearch.of_nothing(rows) for rows in groups.gathered])
        if not self._groups:
            self._groups = [RowHistory(n_held(self._n_ahead)) for _ in groups.gathered]
        searches = []
        for history, rows, written in zip(self._groups, *groups, strict=True):
            for batch in history.numbers:
                if batch < number - self._n_ahead and batch not in pending:
                    history.drop(batch)
            searches.append(history.add(number, rows, written))
        return SharedRowSearch(searches)
