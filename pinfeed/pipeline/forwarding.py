"""Store-to-load forwarding: finds the rows of a batch that were written after it was gathered.

With prefetch depth d, batches k+1 … k+d are gathered before batch k is written back. A batch has
seen the writes that were completed when its gather began. Before it is lent, later writes are
copied over the rows that both hold, the newest value of each row last. Then the batch is what a
gather at that moment would have given. This file needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import WriteBackError
from pinfeed.rows.orders import Rows

T = TypeVar("T")

Positions = npt.NDArray[np.intp]


class WrittenRows:
    """Rows that are written.

    Args:
        rows: Row indices, shape (n,), each once.
        whole: Whether every store of the group is written; otherwise some stay unchanged.

    Raises:
        WriteBackError: If a row occurs twice, because chance would decide which value wins.
    """

    __slots__ = ("_order", "_sorted", "rows", "whole")

    def __init__(self, rows: Rows, whole: bool = True) -> None:
        self.rows = rows
        self.whole = whole
        self._sorted = rows
        # Positions of the sorted rows; None if the rows are sorted already.
        self._order: Positions | None = None
        if bool((rows[1:] > rows[:-1]).all()):
            return
        self._order = np.argsort(rows, kind="stable")
        self._sorted = rows[self._order]
        twice = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if len(twice):
            raise WriteBackError(
                f"write_back of {len(rows)} rows in which row {self._sorted[twice[0]]} occurs "
                "more than once; expected every row once: give unique rows to the feeder, or sum "
                "the changes of a row first"
            )

    def overlap(self, rows: Rows) -> tuple[Positions, Positions]:
        """Return the positions, in ``rows`` and in this write, of the rows that both hold.

        Args:
            rows: Row indices, shape (n,); they may repeat.
        """
        if not len(self._sorted):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        at = np.minimum(np.searchsorted(self._sorted, rows), len(self._sorted) - 1)
        hit = np.flatnonzero(self._sorted[at] == rows)
        return hit, at[hit] if self._order is None else self._order[at[hit]]


@dataclass(frozen=True, eq=False)
class Write(Generic[T]):
    """Values of rows that are to be written to their stores."""

    number: int
    """Position of the write among all writes of the loop."""
    groups: Sequence[WrittenRows | None]
    """For each group of stores the rows that are written; None for a group that stays unchanged."""
    values: T
    """The values, in the form that their owner keeps them in."""


class WriteLog(Generic[T]):
    """Writes that some gathered batch may not have seen, oldest first.

    The training thread appends, reads and forgets writes. The writer thread advances ``completed``,
    and the reader threads read it.
    """

    def __init__(self) -> None:
        self._writes: list[Write[T]] = []
        self._next = 0
        self.completed = 0
        """Writes numbered below this are in their stores."""

    def __len__(self) -> int:
        return len(self._writes)

    def append(self, groups: Sequence[WrittenRows | None], values: T) -> Write[T]:
        """Add a write and return it, with its number."""
        write = Write(self._next, groups, values)
        self._next += 1
        self._writes.append(write)
        return write

    def since(self, number: int) -> list[Write[T]]:
        """Return the writes numbered ``number`` or above."""
        return [write for write in self._writes if write.number >= number]

    def forget(self, before: int) -> None:
        """Drop the writes numbered below ``before``, which every batch not yet lent has seen."""
        if self._writes and self._writes[0].number < before:
            self._writes = self.since(before)


def newest(
    writes: Sequence[Write[T]], group: int, rows: Rows
) -> list[tuple[Write[T], Positions, Positions]]:
    """Find the writes that update rows of a group.

    Args:
        writes: Writes, oldest first.
        group: Position of the group in the writes.
        rows: Row indices, shape (n,); they may repeat.

    Returns:
        Writes, oldest first, each with positions in ``rows`` and in the write. A row that a write
        holds as a whole is left out of the writes before it.
    """
    found = []
    left = np.arange(len(rows))
    for write in reversed(writes):
        written = write.groups[group]
        if written is None or not len(left):
            continue
        at, src_pos = written.overlap(rows[left])
        if len(at):
            found.append((write, left[at], src_pos))
            if written.whole:
                left = np.delete(left, at)
    return found[::-1]
