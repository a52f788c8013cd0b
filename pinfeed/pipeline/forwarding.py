"""Store-to-load forwarding: copies values of writes that the gather of a batch did not see.

With prefetch depth d, batches k+1 … k+d are gathered before batch k is written back. A batch has
seen the writes that were completed when its gather began. Before the batch is lent, the values of
later writes are copied over the rows that both contain, the newest value of each row last. Then the
batch is what a gather at that moment would have returned.

Reader threads find the rows that batches have in common (``recent_rows.py``), ahead of the loop.
The remaining work of the consumer thread does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pinfeed.devices.device import Event, Stream, Tensor
from pinfeed.rows.orders import Positions


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
        return {write.batch for write in self.since(self.completed)}

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
