"""Positions of an epoch, dealt to the ranks that share it; and what is left of them, dealt again to other ranks. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""Shape (n,)."""
Index = TypeVar("Index", int, Positions)

Uneven = Literal["pad", "drop", "join"]
"""What becomes of positions that do not divide: some come again, they are left out, or some ranks have one more."""

Stretch = tuple[int, int]
"""Positions [start, stop)."""
Progress = tuple[tuple[int, int], ...]
"""World sizes with which an epoch was begun, each with the number of rows that every rank has had."""


class StridedSlice(NamedTuple):
    """``n`` positions of a rank: hands of ``hand`` consecutive ones, each ``step`` behind the one before."""

    begin: int
    n: int
    hand: int
    step: int

    def at(self, i: Index) -> Index:
        """The position number ``i`` of these."""
        return self.begin + i + i // self.hand * (self.step - self.hand)

    def below(self, position: int) -> int:
        """How many of them come before ``position``."""
        hands, rest = divmod(max(0, position - self.begin), self.step)
        return min(self.n, hands * self.hand + min(rest, self.hand))


@dataclass(frozen=True)
class RankPartition:
    """How positions go round among ranks.

    A round has a hand for every rank, in the order of ranks. Positions that are left behind the
    last whole round are cut into as many stretches as there are ranks.

    Args:
        world_size: Ranks.
        uneven: What becomes of positions that do not divide.
        hand: Consecutive positions that a rank gets at a time; None for all of its positions at
            once.
    """

    world_size: int
    uneven: Uneven
    hand: int | None

    def length(self, n: int, rank: int) -> int:
        """How many of ``n`` positions a rank has. Rank 0 has as many as any."""
        begin, end = self._last(n, rank)
        return self._rounds(n) * (self.hand or 0) + end - begin

    def pieces(self, left: Sequence[Stretch], whole: int, rank: int) -> tuple[StridedSlice, ...]:
        """What a rank has of the positions that are left, in its order.

        Args:
            left: Positions that are to be dealt, one after the other; in hands, a single stretch.
            whole: Positions of the epoch; those that have to come again are its first ones.
            rank: Whose.
        """
        n = _total(left)
        begin, end = self._last(n, rank)
        again = [(0, whole)] * (-(-max(0, end - n) // whole) if whole else 0)
        last = [
            StridedSlice(start, stop - start, stop - start, stop - start)
            for start, stop in _cut([*left, *again], begin, end)
        ]
        if self.hand is None or not self._rounds(n):
            return tuple(last)
        step = self.hand * self.world_size
        return (
            StridedSlice(
                left[0][0] + rank * self.hand, self._rounds(n) * self.hand, self.hand, step
            ),
            *last,
        )

    def rest(self, left: Sequence[Stretch], n_each: int) -> list[Stretch]:
        """What is left when every rank has had its first ``n_each`` positions; in hands, whole ones."""
        n = _total(left)
        if self.hand is not None:
            return _cut(left, n_each * self.world_size, n)
        shares = [self._last(n, rank) for rank in range(self.world_size)]
        kept = [stretch for begin, end in shares for stretch in _cut(left, begin + n_each, end)]
        return kept + _cut(left, shares[-1][1], n)

    def _rounds(self, n: int) -> int:
        return n // (self.hand * self.world_size) if self.hand else 0

    def _last(self, n: int, rank: int) -> Stretch:
        """What a rank has behind the last whole round; positions behind ``n`` come again."""
        start = self._rounds(n) * self.world_size * (self.hand or 0)
        size, more = divmod(n - start, self.world_size)
        if self.uneven == "join":
            begin = start + rank * size + min(rank, more)
            return begin, begin + size + (rank < more)
        size += self.uneven == "pad" and more > 0
        return start + rank * size, start + (rank + 1) * size


def positions_of(pieces: Sequence[StridedSlice], i: Positions) -> Positions:
    """The positions with numbers ``i`` of the pieces, one after the other."""
    first = 0
    found = np.empty_like(i)
    for piece in pieces:
        here = (i >= first) & (i < first + piece.n)
        if here.all():
            # Nearly always: batches ask for consecutive ones.
            return piece.at(i - first)
        found[here] = piece.at(i[here] - first)
        first += piece.n
    return found


def _total(stretches: Sequence[Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)


def _cut(stretches: Sequence[Stretch], begin: int, end: int) -> list[Stretch]:
    """Positions [begin, end) of the stretches, one after the other, as far as there are any."""
    cut, first = [], 0
    for start, stop in stretches:
        here = max(begin, first), min(end, first + stop - start)
        if here[0] < here[1]:
            cut.append((start + here[0] - first, start + here[1] - first))
        first += stop - start
    return cut
