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

from pinfeed.devices.device import OVERLAP_CHUNK_BYTES, aligned
from pinfeed.memory.depth import n_held
from pinfeed.memory.pages import block_nbytes
from pinfeed.memory.plan import Allocation
from pinfeed.pipeline.forwarding import Overlap, Positions, SharedRows, Span
from pinfeed.pipeline.row_history import HashedRows, RowHistory, RowSearch, n_entries
from pinfeed.rows.orders import Rows

# For each row of a kept batch: its index, its position, and a link to an earlier batch.
_KEPT_ROW_NBYTES = 8 + 2 * 4


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


def shared_row_allocations(
    n_rows: int, n_ahead: int, largest: int, *, unified: bool
) -> list[Allocation]:
    """List the buffers that find and copy rows that a batch shares with earlier ones.

    Args:
        n_rows: Rows of a batch.
        n_ahead: Number of prefetched batches, at least 1.
        largest: Bytes of the largest part of a batch that may be written back.
        unified: Whether the batches live in host memory.
    """
    n_written = n_held(n_ahead)
    n_batches = n_ahead + 2
    table = n_entries(n_written * n_rows) * np.dtype(np.uint32).itemsize
    # At most, every row is in every batch with which it is compared.
    positions = 2 * n_rows * n_written * np.dtype(np.int32).itemsize
    # A reader thread may search rows in batches that a later batch no longer needs.
    n_recent = n_written + n_ahead
    found = [
        Allocation("rows of recent batches", "host", n_recent, n_rows * _KEPT_ROW_NBYTES),
        Allocation("table of recent rows", "host", 1, table),
        Allocation("positions of shared rows", "host", n_batches, positions),
    ]
    if unified:
        return found
    # The device copies whole rows, with their indices in both batches.
    copied = max(largest // n_rows, min(OVERLAP_CHUNK_BYTES, largest)) + 2 * n_rows * 8
    staged = block_nbytes(positions)
    return [
        *found,
        Allocation("staged positions of shared rows", "pinned", n_ahead + 1, staged),
        Allocation("uploaded positions of shared rows", "device", n_batches, staged),
        Allocation("shared rows that are copied", "device", 1, aligned(copied)),
    ]
