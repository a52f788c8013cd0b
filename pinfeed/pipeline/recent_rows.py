"""RecentRows: the rows of the latest batches, and the rows that a new batch shares with them.

Each batch is compared with the earlier batches whose writes it may not see. The rows of every batch
are kept in ascending order, so two batches are compared in one pass over both; see overlap.c.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pinfeed.native.library import library, packing
from pinfeed.pipeline.forwarding import Overlap, PositionRange, SharedRows
from pinfeed.rows.indices import sort_rows
from pinfeed.rows.orders import Positions, Rows

SPARE_ROW_NBYTES = 8 + 1
"""Bytes of each row of a batch while it is compared: a pair of positions, and a flag."""


@dataclass(eq=False)
class SortedRows:
    """The rows of a group in one batch."""

    rows: Rows
    """Row indices, ascending."""
    order: Positions
    """For each of these, its position in the batch."""
    repeated: int | None = None
    """A row index that occurs twice; None if all are distinct."""

    @functools.cached_property
    def description(self) -> tuple[int, int, int]:
        """The rows as ``pf_sorted`` of pinfeed.h."""
        return self.rows.ctypes.data, self.order.ctypes.data, len(self.rows)


class _Comparison(NamedTuple):
    """The rows of a batch, and the rows that it shares with earlier batches."""

    batch: SortedRows
    found: Positions
    """Positions of the shared rows, and the unread rows, as overlap.c writes them."""
    counts: list[int]
    """For each earlier batch, the number of latest rows, then that of hidden ones."""
    n_unread: int
    """Number of unread rows; ``found`` does not have them if they are all rows."""


class RecentRows:
    """The rows of the latest batches of a loop.

    Args:
        n_ahead: Number of earlier batches that may still be written when a batch is added.
    """

    def __init__(self, n_ahead: int) -> None:
        self._n_ahead = n_ahead
        # For each group, the rows that batches may write, by number of the batch, in order.
        self._groups: list[dict[int, SortedRows]] = []

    def add(
        self,
        number: int,
        gathered: Sequence[Rows],
        written: Sequence[Rows],
        pending: Collection[int],
        finds_unread: Sequence[bool],
    ) -> tuple[SharedRows, list[int | None]]:
        """Add a batch, and find its rows in earlier batches that may be written later.

        These are the ``n_ahead`` previous batches, and the batches in ``pending``. A batch in which
        a row repeats cannot be written, so no later batch shares its rows.

        Args:
            number: Number of the batch. Every batch is added, in order.
            gathered: For each group, the indices of the rows that the batch gathers, shape (n,);
                they may repeat.
            written: For each group, the indices of the rows that the batch may write, shape (m,);
                the same array if it may write the rows that it gathers.
            pending: Numbers of batches with writes that are not completed.
            finds_unread: For each group, whether to find the rows that no earlier batch has; all
                are below 2^31.

        Returns:
            The shared rows; and for each group a gathered row that occurs twice, or None.
        """
        if not self._groups:
            self._groups = [{} for _ in gathered]
        pieces: list[Positions] = []
        overlaps: list[dict[int, Overlap]] = []
        repeated: list[int | None] = []
        unread: list[PositionRange | None] = []
        begin = 0
        groups = zip(self._groups, gathered, written, finds_unread, strict=True)
        for recent, rows, own, finds in groups:
            for earlier in list(recent):
                if earlier < number - self._n_ahead and earlier not in pending:
                    del recent[earlier]
            batch, found, counts, n_unread = _compare(
                rows, list(reversed(recent.values())), finds_unread=finds
            )
            overlaps.append(_overlaps(list(reversed(recent)), counts, begin))
            begin += len(found)
            is_part = finds and n_unread < len(rows)
            unread.append(PositionRange(begin - 2 * n_unread, n_unread) if is_part else None)
            pieces.append(found)
            repeated.append(batch.repeated)
            kept = batch if own is rows else _compare(own, ()).batch
            if self._n_ahead and kept.repeated is None:
                recent[number] = kept
        positions = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return SharedRows(positions, overlaps, unread), repeated


def _overlaps(numbers: Sequence[int], counts: Sequence[int], begin: int) -> dict[int, Overlap]:
    """Return the overlap with each earlier batch that shares rows.

    Args:
        numbers: Numbers of the earlier batches.
        counts: The counts of ``_Comparison``.
        begin: Number of positions before those of the group.
    """
    overlaps = {}
    for number, n_latest, n_hidden in zip(numbers, counts[::2], counts[1::2], strict=True):
        if n_latest or n_hidden:
            hidden = PositionRange(begin + 2 * n_latest, n_hidden)
            overlaps[number] = Overlap(PositionRange(begin, n_latest), hidden)
            begin += 2 * (n_latest + n_hidden)
    return overlaps


def _compare(
    rows: Rows, earlier: Sequence[SortedRows], *, finds_unread: bool = False
) -> _Comparison:
    """Sort the rows of a batch, and find them in earlier batches, newest first."""
    native = library()
    if native is None:
        return _compare_in_numpy(rows, earlier, finds_unread=finds_unread)
    rows = np.ascontiguousarray(rows, np.int64)
    batch = SortedRows(np.empty_like(rows), np.empty(len(rows), np.int32))
    spare = np.empty(SPARE_ROW_NBYTES * len(rows), np.uint8)
    found = np.empty(2 * len(rows) * (len(earlier) + finds_unread), np.int32)
    numbers = np.empty(2 * len(earlier) + 1, np.int64)
    arguments = [array.ctypes.data for array in (rows, spare, found, numbers)]
    arguments += [finds_unread, *batch.description, len(earlier)]
    for other in earlier:
        arguments += other.description
    # Comparing takes 2.4 ns a row on one processor, and finding distinct rows 7 ns.
    n_compared = len(rows) + sum(len(other.rows) for other in earlier)
    functions = native.of_rows(n_compared // 3)
    at = functions.overlaps(packing(len(arguments))(*arguments))
    if at < 0:
        return _compare_in_numpy(rows, earlier, finds_unread=finds_unread)
    if at < len(rows):
        batch.repeated = batch.rows.item(at)
    *counts, n_unread = numbers.tolist()
    return _found(batch, found, counts, n_unread)


def _found(batch: SortedRows, found: Positions, counts: list[int], n_unread: int) -> _Comparison:
    """Return a comparison without the unread rows, if they are all rows, and without spare room."""
    n = 2 * (sum(counts) + n_unread) if n_unread < len(batch.rows) else 0
    return _Comparison(batch, found[:n], counts, n_unread)


def _compare_in_numpy(
    rows: Rows, earlier: Sequence[SortedRows], *, finds_unread: bool
) -> _Comparison:
    """Compare rows without compiled functions, or rows that are too large for them."""
    ascending, positions = sort_rows(rows)
    order = positions.astype(np.int32)
    repeats = ascending[1:][ascending[1:] == ascending[:-1]]
    batch = SortedRows(ascending, order, repeats.item(-1) if len(repeats) else None)
    is_hidden = np.zeros(len(rows), bool)
    pieces = [np.empty(0, np.int32)]
    counts: list[int] = []
    for other in earlier:
        at = np.searchsorted(other.rows, ascending)
        later = np.flatnonzero(np.searchsorted(other.rows, ascending, "right") > at)
        for kind in (False, True):
            shared = later[is_hidden[later] == kind]
            pieces += [order[shared], other.order[at[shared]]]
            counts.append(len(shared))
        is_hidden[later] = True
    left = np.flatnonzero(~is_hidden)[: len(rows) * finds_unread]
    pieces.append(np.stack([ascending[left], order[left]], axis=1).astype(np.int32).reshape(-1))
    return _found(batch, np.concatenate(pieces), counts, len(left))
