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
from pinfeed.pipeline.forwarding import (
    Overlap,
    PositionRange,
    Positions,
    RowPlaces,
    SharedRows,
)
from pinfeed.rows.indices import sort_rows
from pinfeed.rows.orders import Rows

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
    """Positions of the shared rows, as overlap.c writes them."""
    counts: list[int]
    """For each earlier batch, the number of latest rows, then that of hidden ones."""
    unread: RowPlaces
    """The rows that no earlier batch has."""


class RecentRows:
    """The rows of the latest batches of a loop.

    Args:
        n_ahead: Number of earlier batches that may still be written when a batch is added.
        finds_unread: Whether to find the rows that no earlier batch has; all are below 2^31.
    """

    def __init__(self, n_ahead: int, *, finds_unread: bool = False) -> None:
        self._n_ahead = n_ahead
        self._finds_unread = finds_unread
        # For each group, the rows that batches may write, by number of the batch, in order.
        self._groups: list[dict[int, SortedRows]] = []

    def add(
        self,
        number: int,
        gathered: Sequence[Rows],
        written: Sequence[Rows],
        pending: Collection[int],
    ) -> tuple[SharedRows, list[int | None], list[RowPlaces]]:
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

        Returns:
            The shared rows; for each group a gathered row that occurs twice, or None; and for each
            group the rows that no earlier batch has, if the constructor was told to find them.
        """
        if not self._groups:
            self._groups = [{} for _ in gathered]
        pieces: list[Positions] = []
        overlaps: list[dict[int, Overlap]] = []
        repeated: list[int | None] = []
        unread: list[RowPlaces] = []
        begin = 0
        for recent, rows, own in zip(self._groups, gathered, written, strict=True):
            for earlier in list(recent):
                if earlier < number - self._n_ahead and earlier not in pending:
                    del recent[earlier]
            batch, found, counts, left = _compare(
                rows, list(reversed(recent.values())), finds_unread=self._finds_unread
            )
            overlaps.append(_overlaps(list(reversed(recent)), counts, begin))
            pieces.append(found)
            unread.append(left)
            begin += len(found)
            repeated.append(batch.repeated)
            kept = batch if own is rows else _compare(own, ()).batch
            if self._n_ahead and kept.repeated is None:
                recent[number] = kept
        positions = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return SharedRows(positions, overlaps), repeated, unread


def _overlaps(numbers: Sequence[int], counts: Sequence[int], begin: int) -> dict[int, Overlap]:
    """Return the overlap with each earlier batch that shares rows.

    Args:
        numbers: Numbers of the earlier batches.
        counts: For each of them, the number of latest rows, then that of hidden ones.
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
        return _compare_in_numpy(rows, earlier)
    rows = np.ascontiguousarray(rows, np.int64)
    batch = SortedRows(np.empty_like(rows), np.empty(len(rows), np.int32))
    spare = np.empty(SPARE_ROW_NBYTES * len(rows), np.uint8)
    found = np.empty(2 * len(rows) * len(earlier), np.int32)
    numbers = np.empty(2 * len(earlier) + 1, np.int64)
    unread = np.empty((len(rows) * finds_unread, 2), np.int32)
    arguments = [array.ctypes.data for array in (rows, spare, found, numbers)]
    arguments += [unread.ctypes.data * finds_unread, *batch.description, len(earlier)]
    for other in earlier:
        arguments += other.description
    at = native.overlaps(packing(len(arguments))(*arguments))
    if at < 0:
        return _compare_in_numpy(rows, earlier)
    if at < len(rows):
        batch.repeated = batch.rows.item(at)
    *counts, n_unread = numbers.tolist()
    return _Comparison(batch, found[: 2 * sum(counts)], counts, unread[:n_unread])


def _compare_in_numpy(rows: Rows, earlier: Sequence[SortedRows]) -> _Comparison:
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
    left = np.flatnonzero(~is_hidden)
    unread = np.stack([ascending[left], order[left]], axis=1).astype(np.int32)
    return _Comparison(batch, np.concatenate(pieces), counts, unread)
