"""Store-to-load forwarding: which rows of a batch were written after it was gathered. Numpy only.

With prefetch depth d, batches k+1 … k+d are gathered before batch k is written back. A batch has
seen the writes that had completed in the store when its gather began. Before it is lent, later writes
are copied over the rows that both hold, of each row the newest; then it is what a gather at that
moment would have given.
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


class WrittenRows:
    """Rows that are written.

    Args:
        rows: Shape (n,), no row twice.
        whole: Whether every store of the group is written; else some stay as they are.

    Raises:
        WriteBackError: A row is there twice: which value wins would be left to chance.
    """

    __slots__ = ("_order", "_sorted", "rows", "whole")

    def __init__(self, rows: Rows, whole: bool = True) -> None:
        self.rows = self._sorted = rows
        self.whole = whole
        # As they are
        self._order: npt.NDArray[np.intp] | None = None
        if bool((rows[1:] > rows[:-1]).all()):
            return
        self._order = np.argsort(rows, kind="stable")
        self._sorted = rows[self._order]
        twice = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if len(twice):
            raise WriteBackError(
                f"write_back of {len(rows)} rows in which row {self._sorted[twice[0]]} stands more than once; "
                "expected every row once: give unique rows to the feeder, or sum the changes of a row first"
            )

    def overlap(self, rows: Rows) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Positions (in ``rows``, in this write) of the rows that both hold; ``rows`` may repeat."""
        if not len(self._sorted):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        at = np.minimum(np.searchsorted(self._sorted, rows), len(self._sorted) - 1)
        hit = np.flatnonzero(self._sorted[at] == rows)
        return hit, at[hit] if self._order is None else self._order[at[hit]]


@dataclass(frozen=True, eq=False)
class Write(Generic[T]):
    """Values of some rows on their way to their stores."""

    number: int
    """Writes are numbered in the order in which the loop made them."""
    groups: Sequence[WrittenRows | None]
    """The rows, by group of stores; None for a group that stays as it is."""
    values: T
    """What is on its way, as whoever moves it keeps it."""


class WriteLog(Generic[T]):
    """Writes that some gathered batch may not have seen, oldest first.

    The consumer's thread appends, reads and forgets; the writer's thread moves ``completed``; the
    readers' threads read it.
    """

    def __init__(self) -> None:
        self._writes: list[Write[T]] = []
        self._next = 0
        self.completed = 0
        """Writes numbered below this are in the store."""

    def __len__(self) -> int:
        return len(self._writes)

    def append(self, groups: Sequence[WrittenRows | None], values: T) -> Write[T]:
        write = Write(self._next, groups, values)
        self._next += 1
        self._writes.append(write)
        return write

    def since(self, number: int) -> list[Write[T]]:
        """Writes numbered ``number`` or above."""
        return [w for w in self._writes if w.number >= number]

    def forget(self, before: int) -> None:
        """Drop the writes below ``before``: every batch that is still to be lent has seen them."""
        if self._writes and self._writes[0].number < before:
            self._writes = self.since(before)


def newest(
    writes: Sequence[Write[T]], group: int, rows: Rows
) -> list[tuple[Write[T], npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """What brings rows of a group up to date: writes, oldest first, with positions in ``rows`` and in the write as ``overlap`` gives them.

    A row that a write has as a whole is left out of those before it.
    """
    found, left = [], np.arange(len(rows))
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
