"""RecentRows: the rows of the latest batches, and the rows that a new batch shares with them.

Each batch is compared with the earlier batches whose writes it may not see. Reader threads do most
of this in parallel: they sort the rows of a batch, and search them in the earlier batches. Between
the two steps, each batch is added to the history of the loop, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pinfeed.memory.depth import n_held
from pinfeed.pipeline.forwarding import Overlap, Positions, SharedRows, Span
from pinfeed.pipeline.row_history import HashedRows, RowHistory, RowSearch
from pinfeed.rows.orders import Rows


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


def hash_groups(groups: Sequence[Rows], written: Sequence[Rows] | None = None) -> HashedGroups:
    """Sort the rows of a batch by their hashes (any thread).

    Args:
        groups: For each group, the indices of the rows that the batch gathers, shape (n,); they may
            repeat.
        written: For each group, the indices of the rows that the batch may write, shape (m,); None
            for the rows that it gathers.
    """
    gathered = [HashedRows(rows) for rows in groups]
    if written is None:
        return HashedGroups(gathered, gathered)
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
                spans = []
                for pair in pairs:
                    pieces += pair
                    spans.append(Span(begin, len(pair[0])))
                    begin += 2 * len(pair[0])
                found[earlier.number] = Overlap(*spans)
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
