"""Ranks: how the processes of a job share an epoch; PerRank: the order of one rank's share.

A job that resumes with another number of ranks divides the remaining positions again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import At, DerivedOrder, KnownOrder, Order, Rows, check_order
from pinfeed.rows.windows import Interval, Window, Windows
from pinfeed.validation.arguments import check_flag, check_rank

Index = TypeVar("Index", int, Rows)

Uneven = Literal["pad", "drop", "join"]
"""The treatment of positions that do not divide evenly.

``pad`` repeats some, ``drop`` leaves some out, and ``join`` gives some ranks one more.
"""

Progress = tuple[tuple[int, int], ...]
"""World sizes that worked on an epoch in turn, each with the rows that every rank has read."""


@dataclass(frozen=True)
class Ranks:
    """Rule by which the processes of a job share an epoch.

    ``Feeder(..., ranks="pad")`` is short for ``ranks=Ranks("pad")``.

    pinfeed cuts the order of an epoch into global batches, and each global batch into one batch per
    rank, by ascending rank. Together, these are the batches that a single process would get. A
    block-shuffled order is cut into one interval per rank instead, unless ``split_batches`` is
    True; then only one rank reads a block.

    A job with another number of ranks can load a saved state. With ``split_batches``, it continues
    with the next global batch. Without, its ranks share the remaining rows.

    Args:
        uneven: Treatment of rows that do not divide evenly. ``"pad"`` repeats the first rows of the
            order, so that all ranks have equal numbers of rows and batches. ``"drop"`` leaves out
            up to ``world_size - 1`` rows for the same reason. ``"join"`` uses every row exactly
            once, so some ranks, including rank 0, have one row and perhaps one batch more than
            others (see ``torch.distributed.algorithms.Join``).
        split_batches: Whether ``batch_size`` (or ``preferred_batch_size``) is the size of a global
            batch, which has the same rows for any number of ranks that divides it. By default, it
            is the size of each rank's batch.
        rank: Rank of this process. Give it together with ``world_size`` for a group that is not the
            whole job (``group.rank()``, ``group.size()``) or for another launcher. By default, both
            are those of torch.distributed if it is initialized; otherwise those of torchrun's
            environment variables; without these, there is one process.
        world_size: Number of processes that share an epoch.

    Raises:
        ArgumentError: If a value is invalid, or only one of ``rank`` and ``world_size`` is given.

    Examples:
        >>> images = np.zeros((10, 3), "float32")
        >>> ranks = pinfeed.Ranks("pad", rank=0, world_size=4)
        >>> with pinfeed.Feeder(images, batch_size=2, ranks=ranks) as feeder:
        ...     n_rows = sum(len(batch) for batch in feeder)
        >>> n_rows
        3
    """

    uneven: Uneven = "pad"
    split_batches: bool = False
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise ArgumentError(
                f"Ranks({self.uneven!r}): expected 'pad', 'drop' or 'join'; for all rows on every "
                "rank, give ranks='all' to the Feeder"
            )
        check_flag(self.split_batches, "split_batches")
        if (self.rank is None) != (self.world_size is None):
            raise ArgumentError(
                f"Ranks(rank={self.rank}, world_size={self.world_size}): "
                "give both, or neither for those of the job"
            )
        if self.rank is not None and self.world_size is not None:
            check_rank(
                self.rank,
                self.world_size,
                f"Ranks(rank={self.rank!r}, world_size={self.world_size!r})",
            )


def per_rank(order: Order, *, rank: int, world_size: int, drop_last: bool = False) -> Order:
    """Return one rank's share of an order, as ``torch.utils.data.DistributedSampler`` does.

    All shares have the same length. Rank r takes positions r, r + world_size, … of ``order``. If
    the order is block-shuffled, rank r takes one contiguous interval instead, so that only one rank
    reads a block. Use ``Ranks`` for more options.

    Args:
        order: The order to share.
        rank: The rank of this process.
        world_size: Number of ranks.
        drop_last: Whether to leave out the rows that do not divide evenly; by default, the first
            rows of the order repeat at its end instead.

    Raises:
        ArgumentError: If ``rank`` is not a whole number in [0, world_size), or ``order`` is not an
            order.

    Examples:
        >>> order = pinfeed.rows.per_rank(pinfeed.rows.sequential(), rank=1, world_size=4)
        >>> order.bind(n_rows=8, epoch=0)(np.arange(2))
        array([1, 5])
    """
    shared = check_order(order)
    check_flag(drop_last, "drop_last")
    rank, world_size = check_rank(rank, world_size, f"rank={rank!r}, world_size={world_size!r}")
    chunk = None if shared.in_blocks else 1
    return PerRank(shared, rank, world_size, "drop" if drop_last else "pad", hand=chunk)


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    The source is torch.distributed, or else torchrun's environment; without either, it is (0, 1).

    Raises:
        ArgumentError: If the environment has only one of the two, or values that are not whole
            numbers.
    """
    # A program that has not imported torch.distributed has not initialized it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)}
    if not given:
        return 0, 1
    text = "the environment has " + ", ".join(f"{name}={value}" for name, value in given.items())
    if len(given) == 1:
        raise ArgumentError(
            f"{text}; expected both RANK and WORLD_SIZE; start with torchrun, or give "
            "Ranks(rank=, world_size=)"
        )
    try:
        rank = int(given["RANK"])
        world_size = int(given["WORLD_SIZE"])
    except ValueError:
        raise ArgumentError(f"{text}; expected whole numbers, as torchrun sets them") from None
    return check_rank(rank, world_size, text)


@dataclass(frozen=True)
class PerRank(DerivedOrder):
    """One rank's share of an order."""

    order: KnownOrder
    rank: int
    world_size: int
    uneven: Uneven
    hand: int | None
    """Consecutive positions that a rank gets in a round; None for one interval."""
    done: Progress = ()
    """The part of the epoch that is already read; the ranks share only the rest."""

    def length(self, n_rows: int) -> int:
        return sum(piece.n for piece in self.pieces(n_rows))

    def bind(self, n_rows: int, epoch: int) -> At:
        at = self.order.bind(n_rows, epoch)
        pieces = self.pieces(n_rows)
        return lambda positions: at(positions_of(pieces, positions))

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        found = self.order.windows(n_rows, epoch)
        return None if found is None else shared_windows(found, self.pieces(n_rows))

    @property
    def is_repeatable(self) -> bool:
        return self.order.is_repeatable

    @property
    def most_copies(self) -> int | None:
        copies = self.order.most_copies
        # Padding repeats fewer positions than there are ranks, at the end of the epoch.
        return None if copies is None else copies + (self.uneven == "pad")

    def pieces(self, n_rows: int) -> tuple[StridedSlice, ...]:
        """Return the positions of the order that the rank reads."""
        whole = self.order.length(n_rows)
        left = [(0, whole)]
        for world_size, n in self.done:
            left = RankPartition(world_size, self.uneven, self.hand).rest(left, n)
        return RankPartition(self.world_size, self.uneven, self.hand).pieces(left, whole, self.rank)


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


def positions_of(pieces: Sequence[StridedSlice], i: Rows) -> Rows:
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


def shared_windows(windows: Windows, shares: tuple[StridedSlice, ...]) -> Windows:
    """Return the windows of one rank's share of an order, given the rank's positions of it."""

    def most(n: int) -> int:
        spans = [
            n if one.n <= one.chunk else (n // one.chunk + 1) * one.step + one.chunk
            for one in shares
        ]
        return windows.most(max(spans, default=n))

    def needed(start: int, stop: int) -> Iterator[Window]:
        for first, pieces in _ascending(shares):
            begin = first
            # Windows that later pieces may need, too. An epoch may have many others, which are not
            # kept.
            seen = set()
            for piece in pieces:
                i = max(0, start - begin)
                end = min(piece.n, stop - begin)
                least = begin
                begin += piece.n
                if i >= end:
                    continue
                stop_of_piece = piece.at(end - 1) + 1
                for window in windows.needed(piece.at(i), stop_of_piece):
                    low = first + sum(one.below(window.begin) for one in pieces)
                    low = max(least, low)
                    high = first + sum(one.below(window.end) for one in pieces)
                    key = window._replace(runs=tuple(window.runs))
                    # Other ranks may have all positions of a window.
                    if low < high and key not in seen:
                        if window.end > stop_of_piece:
                            seen.add(key)
                        yield Window(low, high, window.runs)

    return replace(windows, needed=needed, most=most)


def _ascending(shares: Sequence[StridedSlice]) -> list[tuple[int, list[StridedSlice]]]:
    """Return groups of ascending pieces, each with its first position in the share.

    Padding begins again with the first positions of the order.
    """
    groups: list[tuple[int, list[StridedSlice]]] = []
    first = 0
    last = -1
    for piece in shares:
        if not piece.n:
            continue
        if piece.begin <= last or not groups:
            groups.append((first, []))
        groups[-1][1].append(piece)
        last = piece.at(piece.n - 1)
        first += piece.n
    return groups


def check_inner(order: Any, name: str = "order") -> KnownOrder:
    """Return an order that may be a part of another one.

    Raises:
        ArgumentError: If it is not an order, or is the share of one rank.
    """
    inner = check_order(order, name)
    if isinstance(inner, PerRank):
        raise ArgumentError(
            f"{name}=per_rank(...) is the share of one rank; share the whole order: give ranks= to "
            "the feeder, or per_rank(mixed(...), ...)"
        )
    return inner


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
