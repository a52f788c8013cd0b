"""Store-to-load forwarding: copies values of writes that the gather of a batch did not see.

With prefetch depth d, batches k+1 … k+d are gathered before batch k is written back. A batch has
seen the writes that were completed when its gather began. Before the batch is lent, the values of
later writes are copied over the rows that both contain, the newest value of each row last. Then the
batch is what a gather at that moment would have returned.

Reader threads find the rows that batches have in common, ahead of the loop. Each batch is compared
with the earlier batches whose writes it may not see. The rows of every batch are kept in ascending
order, so two batches are compared in one pass over both; see overlap.c. The remaining work of the
consumer thread does not depend on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pinfeed.devices.device import Event, Stream, Tensor
from pinfeed.native.library import address_of, library, packing
from pinfeed.rows.indices import sort_rows
from pinfeed.rows.orders import Positions, Rows

SPARE_ROW_NBYTES = 8 + 1
"""Bytes of each row of a batch while it is compared: a pair of positions, and a flag."""


class PositionRange(NamedTuple):
    """Rows that two batches have in common: a part of ``SharedRows.positions``."""

    begin: int
    n_rows: int

    @property
    def later(self) -> tuple[int, int]:
        """Range [begin, end) of the positions in the later batch."""
        return self.begin, self.begin + self.n_rows

    @property
    def earlier(self) -> tuple[int, int]:
        """Range [begin, end) of the positions in the earlier batch, in the same order."""
        return self.begin + self.n_rows, self.begin + 2 * self.n_rows


class Overlap(NamedTuple):
    """Rows that a batch has in common with an earlier one."""

    latest: PositionRange
    """Rows that no batch between the two contains."""
    hidden: PositionRange
    """Rows that a batch between the two contains as well. If that batch writes them, its
    values are newer.
    """


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows that a batch has in common with the batches before it."""

    positions: Positions
    """Positions of the rows in the batches, and the unread rows, each with its position."""
    overlaps: Sequence[Mapping[int, Overlap]]
    """For each group of rows, the overlap with each earlier batch, by its number."""
    unread: Sequence[PositionRange | None]
    """For each group, the rows that no earlier batch has: pairs of numbers in ``positions``. None
    if these are all rows, or were not searched for.
    """


@dataclass
class HeldValues:
    """Values of a write-back, on the device.

    Each group of rows has one tensor per store, or None for an unchanged store.
    """

    tensors: list[list[Tensor | None]]
    compute: Stream
    """Stream of the consumer thread when the values were taken."""
    ready: Event
    """Event after the computation of the values."""


@dataclass(eq=False)
class Write:
    """Values of rows that are to be written to their stores."""

    number: int
    """Position of the write among all writes of the loop."""
    batch: int
    """Number of the batch that the values belong to; a batch may be written more than once."""
    is_whole: Sequence[bool | None]
    """For each group of stores, whether all of them are written; None if none of them is."""
    values: HeldValues


class WriteLog:
    """Writes that some gathered batch may not have seen, oldest first.

    The consumer thread appends, reads and forgets writes. The writer advances ``completed``, and
    the reader threads read it.
    """

    def __init__(self) -> None:
        self._writes: list[Write] = []
        self._next = 0
        self.completed = 0
        """Writes numbered below this are in their stores."""
        self.has_failed = False
        """Whether a write has failed. All later writes are refused."""

    def __len__(self) -> int:
        return len(self._writes)

    def append(self, batch: int, is_whole: Sequence[bool | None], values: HeldValues) -> Write:
        """Add a write and return it, with its number."""
        write = Write(self._next, batch, is_whole, values)
        self._next += 1
        self._writes.append(write)
        return write

    def since(self, number: int) -> list[Write]:
        """Return the writes numbered ``number`` or above."""
        return [write for write in self._writes if write.number >= number]

    def pending_batches(self) -> set[int]:
        """Return the numbers of batches with writes that are not completed."""
        return {write.batch for write in self._writes if write.number >= self.completed}

    def forget(self, before: int) -> None:
        """Drop the writes numbered below ``before``, which every batch not yet lent has seen."""
        if self._writes and self._writes[0].number < before:
            self._writes = self.since(before)


def forwards(
    writes: Sequence[Write], group: int, batch: int, overlaps: Mapping[int, Overlap]
) -> list[tuple[Write, PositionRange]]:
    """Return the copies that update the rows of a group, in order.

    Args:
        writes: Writes that the gather of the batch did not see, oldest first.
        group: Position of the group in the batch.
        batch: Number of the batch.
        overlaps: Rows that it has in common with each earlier batch.
    """
    found: list[tuple[Write, PositionRange]] = []
    # Whether all batches from ``oldest`` to the previous one have written all stores. If so, a row
    # that one of these batches contains is not needed from any older batch.
    is_complete = True
    oldest = batch
    for write in reversed(writes):
        is_complete &= write.batch >= oldest - 1
        oldest = write.batch
        is_whole = write.is_whole[group]
        if is_whole is not None and (overlap := overlaps.get(write.batch)) is not None:
            ranges = overlap[:1] if is_complete else overlap
            found += [(write, shared) for shared in ranges if shared.n_rows]
        is_complete &= bool(is_whole)
    return found[::-1]


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
        return address_of(self.rows), address_of(self.order), len(self.rows)


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
        every_overlap: list[dict[int, Overlap]] = []
        every_unread: list[PositionRange | None] = []
        repeated: list[int | None] = []
        end = 0
        groups = zip(self._groups, gathered, written, finds_unread, strict=True)
        for recent, rows, own, finds in groups:
            for earlier in list(recent):
                if earlier < number - self._n_ahead and earlier not in pending:
                    del recent[earlier]
            begin = end
            batch, found, (*counts, n_unread) = _compare(
                rows, list(reversed(recent.values())), finds_unread=finds
            )
            overlaps: dict[int, Overlap] = {}
            pairs = zip(reversed(recent), counts[::2], counts[1::2], strict=True)
            for earlier, n_latest, n_hidden in pairs:
                if n_latest or n_hidden:
                    hidden = PositionRange(end + 2 * n_latest, n_hidden)
                    overlaps[earlier] = Overlap(PositionRange(end, n_latest), hidden)
                    end += 2 * (n_latest + n_hidden)
            unread = PositionRange(end, n_unread) if finds and n_unread < len(rows) else None
            if unread is not None:
                end += 2 * n_unread
            # It has further room, or all rows as unread ones.
            pieces.append(found[: end - begin])
            every_overlap.append(overlaps)
            every_unread.append(unread)
            repeated.append(batch.repeated)
            kept = batch if own is rows else _compare(own, ()).batch
            if self._n_ahead and kept.repeated is None:
                recent[number] = kept
        positions = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return SharedRows(positions, every_overlap, every_unread), repeated


class _Comparison(NamedTuple):
    """The rows of a batch, and the rows that it shares with earlier batches."""

    batch: SortedRows
    found: Positions
    """Positions of the shared rows, and the unread rows, as overlap.c writes them; then any
    numbers.
    """
    counts: list[int]
    """For each earlier batch, the number of latest rows, then that of hidden ones. The number of
    unread rows is the last one.
    """


def _compare(
    rows: Rows, earlier: Sequence[SortedRows], *, finds_unread: bool = False
) -> _Comparison:
    """Sort the rows of a batch, and find them in earlier batches, newest first."""
    native = library()
    if native is None:
        return _compare_in_numpy(rows, earlier, finds_unread=finds_unread)
    n = n_compared = len(rows)
    rows = np.ascontiguousarray(rows, np.int64)
    batch = SortedRows(np.empty_like(rows), np.empty(n, np.int32))
    spare = np.empty(SPARE_ROW_NBYTES * n, np.uint8)
    found = np.empty(2 * n * (len(earlier) + finds_unread), np.int32)
    counts = np.empty(2 * len(earlier) + 1, np.int64)
    arguments = [address_of(array) for array in (rows, spare, found, counts)]
    arguments += [finds_unread, *batch.description, len(earlier)]
    for other in earlier:
        arguments += other.description
        n_compared += other.description[-1]
    # Comparing takes 2.4 ns a row on one processor, and finding distinct rows 7 ns.
    functions = native.of_rows(n_compared // 3)
    at = functions.overlaps(packing(len(arguments))(*arguments))
    if at < 0:
        return _compare_in_numpy(rows, earlier, finds_unread=finds_unread)
    if at < n:
        batch.repeated = batch.rows.item(at)
    return _Comparison(batch, found, counts.tolist())


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
    return _Comparison(batch, np.concatenate(pieces), [*counts, len(left)])
