"""RankPartition: the positions of an epoch divided among ranks, and divided again later.

A job that resumes with another number of ranks divides the remaining positions. This module is
arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""Positions of an epoch, shape (n,)."""
Index = TypeVar("Index", int, Positions)

Uneven = Literal["pad", "drop", "join"]
"""The treatment of positions that do not divide evenly.

``pad`` repeats some, ``drop`` leaves some out, and ``join`` gives some ranks one more.
"""

Interval = tuple[int, int]
"""Positions [start, stop)."""
Progress = tuple[tuple[int, int], ...]
"""World sizes that worked on an epoch in turn, each with the rows that every rank has read."""


class StridedSlice(NamedTuple):
    """Positions of a rank: chunks of consecutive positions at regular distances.

    Attributes:
        begin: First position.
        n: Number of positions.
        chunk: Consecutive positions in a chunk.
        step: Distance between the beginnings of two chunks.
    """

    begin: int
    n: int
    chunk: int
    step: int

    def at(self, i: Index) -> Index:
        """Return the ``i``-th of the positions."""
        return self.begin + i + i // self.chunk * (self.step - self.chunk)

    def below(self, position: int) -> int:
        """Return how many of the positions are less than ``position``."""
        chunks, rest = divmod(max(0, position - self.begin), self.step)
        return min(self.n, chunks * self.chunk + min(rest, self.chunk))


@dataclass(frozen=True)
class RankPartition:
    """The rule by which positions are divided among ranks.

    Each round gives one chunk to every rank, by ascending rank. The positions after the last whole
    round are cut into one interval for every rank.

    Args:
        world_size: Number of ranks.
        uneven: Treatment of positions that do not divide evenly.
        chunk: Consecutive positions that a rank gets in a round; None gives every rank all of its
            positions at once.
    """

    world_size: int
    uneven: Uneven
    chunk: int | None

    def length(self, n: int, rank: int) -> int:
        """Return how many of ``n`` positions a rank has. No rank has more than rank 0."""
        begin, end = self._last(n, rank)
        return self._rounds(n) * (self.chunk or 0) + end - begin

    def pieces(self, left: Sequence[Interval], whole: int, rank: int) -> tuple[StridedSlice, ...]:
        """Return a rank's share of the remaining positions, in its order.

        Args:
            left: The positions to divide, one interval after the other; a single one if ``chunk``
                is given.
            whole: Number of positions of the epoch; padding repeats the first ones.
            rank: The rank.
        """
        n = _total(left)
        begin, end = self._last(n, rank)
        n_repeats = -(-max(0, end - n) // whole) if whole else 0
        last = [
            StridedSlice(start, stop - start, stop - start, stop - start)
            for start, stop in _cut([*left, *[(0, whole)] * n_repeats], begin, end)
        ]
        n_rounds = self._rounds(n)
        if self.chunk is None or not n_rounds:
            return tuple(last)
        first = left[0][0] + rank * self.chunk
        step = self.chunk * self.world_size
        return (StridedSlice(first, n_rounds * self.chunk, self.chunk, step), *last)

    def rest(self, left: Sequence[Interval], n_each: int) -> list[Interval]:
        """Return the positions that remain after every rank has read its first ``n_each``.

        Args:
            left: The positions that were divided.
            n_each: Positions that every rank has read; a multiple of ``chunk`` if that is given.
        """
        n = _total(left)
        if self.chunk is not None:
            return _cut(left, n_each * self.world_size, n)
        shares = [self._last(n, rank) for rank in range(self.world_size)]
        unread = [part for begin, end in shares for part in _cut(left, begin + n_each, end)]
        return unread + _cut(left, shares[-1][1], n)

    def _rounds(self, n: int) -> int:
        """Return the number of whole rounds in ``n`` positions."""
        return n // (self.chunk * self.world_size) if self.chunk else 0

    def _last(self, n: int, rank: int) -> Interval:
        """Return a rank's share after the last whole round; with pad, it may end after ``n``."""
        start = self._rounds(n) * self.world_size * (self.chunk or 0)
        size, more = divmod(n - start, self.world_size)
        if self.uneven == "join":
            begin = start + rank * size + min(rank, more)
            return begin, begin + size + (rank < more)
        size += self.uneven == "pad" and more > 0
        return start + rank * size, start + (rank + 1) * size


def positions_of(pieces: Sequence[StridedSlice], i: Positions) -> Positions:
    """Return the positions with the numbers ``i``, counted through all pieces."""
    first = 0
    found = np.empty_like(i)
    for piece in pieces:
        in_piece = (i >= first) & (i < first + piece.n)
        if in_piece.all():
            # Batches need consecutive positions, which are nearly always in one piece.
            return piece.at(i - first)
        found[in_piece] = piece.at(i[in_piece] - first)
        first += piece.n
    return found


def _total(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _cut(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Return the positions with numbers [begin, end), counted through all intervals."""
    parts = []
    first = 0
    for start, stop in intervals:
        low = max(begin, first)
        high = min(end, first + stop - start)
        if low < high:
            parts.append((start + low - first, start + high - first))
        first += stop - start
    return parts
