"""Which rows, in which order.

An order maps positions of an epoch to row numbers. It is a function of its arguments, the number of
rows and the epoch, and can be asked for any position, so a million-row shuffle costs no memory and
a resumed epoch goes on where it stopped. Orders know the number of rows only when they are bound:
``Feeder(x, rows=block_shuffled(seed=1, block_rows=4096), ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.permutation import keys_of, permutation
from pinfeed.rows.rank_partition import Progress, RankPartition, StridedSlice, Uneven, positions_of
from pinfeed.validation.arguments import (
    check_flag,
    check_rank,
    check_seed,
    explain_arguments,
    whole_number,
)

Rows = npt.NDArray[np.int64]
"""Row numbers, shape (n,)."""
At = Callable[[Rows], Rows]
"""Row numbers at the given positions of one epoch."""


@runtime_checkable
class Order(Protocol):
    """Which rows an epoch has, in which order.

    Orders are frozen dataclasses: equal arguments, equal order, and ``repr`` tells both.
    """

    def length(self, n_rows: int) -> int:
        """Number of rows in one epoch over ``n_rows`` rows."""

    def bind(self, n_rows: int, epoch: int) -> At:
        """The order of one epoch."""


def sequential() -> Order:
    """Rows 0, 1, 2, … in every epoch."""
    return Sequential()


def shuffled(seed: int = 0) -> Order:
    """All rows in random order, another one in every epoch; the same for the same seed and epoch, on every machine and version.

    Raises:
        ArgumentError: If ``seed`` is no whole number.
    """
    return Shuffled(check_seed(seed))


@explain_arguments(
    {
        "block_size": "the rows of a block are block_rows=",
        "buffer_size": "give block_rows= and window_blocks=",
    }
)
def block_shuffled(seed: int = 0, *, block_rows: int, window_blocks: int = 16) -> Order:
    """Random order in which rows that are neighbours in the store come close together, so that a disk need not seek for each.

    Blocks of ``block_rows`` neighbouring rows come in random order; the rows of ``window_blocks``
    consecutive blocks are mixed. Where blocks begin is drawn anew in every epoch. The rows of one
    block come less than one window apart.

    Raises:
        ArgumentError: If ``seed`` is no whole number, or ``block_rows`` or ``window_blocks`` is not
            a whole number above 0.
    """
    return BlockShuffled(
        check_seed(seed),
        whole_number(block_rows, "block_rows"),
        whole_number(window_blocks, "window_blocks"),
    )


def per_rank(order: Order, *, rank: int, world_size: int, drop_last: bool = False) -> Order:
    """The share of one rank, equally long on every rank, as ``torch.utils.data.DistributedSampler`` cuts it. ``Ranks`` can more.

    Rank r takes positions r, r + world_size, … of ``order``; of a block-shuffled order it takes one
    contiguous stretch, so that a block is read by one rank. Where rows do not divide, the first
    rows of the order come again at its end, or with ``drop_last`` the rest is left out.

    Raises:
        ArgumentError: ``rank`` is not a whole number in [0, world_size), or ``order`` is not an
            order.
    """
    if not isinstance(order, Order):
        raise ArgumentError(
            f"order={order!r}: expected an order of pinfeed.rows, as shuffled(seed=1)"
        )
    check_flag(drop_last, "drop_last")
    rank, world_size = check_rank(rank, world_size, f"rank={rank!r}, world_size={world_size!r}")
    hand = None if isinstance(order, BlockShuffled) else 1
    return PerRank(order, rank, world_size, "drop" if drop_last else "pad", hand)


@dataclass(frozen=True)
class Sequential:
    """Rows in the order of the store."""

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        return lambda positions: positions


@dataclass(frozen=True)
class Shuffled:
    """A random permutation of all rows."""

    seed: int

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        return permutation(n_rows, f"{self.seed}/{epoch}")


@dataclass(frozen=True)
class BlockShuffled:
    """Blocks in random order, their rows mixed within a window of blocks."""

    seed: int
    block_rows: int
    window_blocks: int

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        cut = self._cut(n_rows, epoch)
        window_rows = self.window_rows(n_rows)

        def window(number: int) -> At:
            return permutation(
                min(window_rows, n_rows - number * window_rows), f"{cut.salt}/{number}"
            )

        # Consecutive batches ask for the same window.
        last: tuple[int, At] = (-1, cut.block_at)

        def at(positions: Rows) -> Rows:
            nonlocal last
            number = positions // window_rows
            offset = positions - number * window_rows
            one = len(number) and number[0] == number[-1] and bool((number == number[0]).all())
            for n in number[:1].tolist() if one else np.unique(number).tolist():
                # Another thread may replace it meanwhile.
                found = last
                if n != found[0]:
                    last = found = (n, window(n))
                here = slice(None) if one else number == n
                offset[here] = found[1](offset[here])
            return cut.rows(number * window_rows + offset)

        return at

    def window_rows(self, n_rows: int) -> int:
        """Positions [k * window_rows, (k + 1) * window_rows) of an epoch have the rows of window k; the last one may be shorter."""
        return min(min(self.block_rows, max(1, n_rows)) * self.window_blocks, max(1, n_rows))

    def runs(self, n_rows: int, epoch: int, window: int) -> list[tuple[int, int]]:
        """The rows of a window, as runs [start, stop) in ascending order."""
        cut, size = self._cut(n_rows, epoch), self.window_rows(n_rows)
        end = min((window + 1) * size, n_rows)
        begins = np.arange(window * size, end, cut.block)
        runs = []
        for begin, start in zip(begins.tolist(), cut.rows(begins).tolist(), strict=True):
            stop = start + min(cut.block, end - begin)
            runs += [(start, min(stop, n_rows))] + [(0, stop - n_rows)] * (stop > n_rows)
        return sorted(runs)

    def _cut(self, n_rows: int, epoch: int) -> _Cut:
        salt = f"{self.seed}/{epoch}/blocks"
        block = min(self.block_rows, max(1, n_rows))
        first = int(keys_of(salt + "/first", 1)[0] % np.uint64(n_rows)) if n_rows else 0
        return _Cut(salt, n_rows, block, first, permutation(n_rows // block, salt))


@dataclass(frozen=True)
class _Cut:
    """How an epoch's rows are cut into blocks: a ring, cut from a drawn row on.

    The short block at the end is another one each time.
    """

    salt: str
    n_rows: int
    block: int
    first: int
    block_at: At

    def rows(self, positions: Rows) -> Rows:
        """The rows at positions, before they are mixed within their window."""
        index = positions // self.block
        offset = positions - index * self.block
        full = index < self.n_rows // self.block
        index[full] = self.block_at(index[full])
        return (index * self.block + offset + self.first) % self.n_rows


@dataclass(frozen=True)
class PerRank:
    """One rank's share of an order."""

    order: Order
    rank: int
    world_size: int
    uneven: Uneven
    hand: int | None
    """Consecutive positions that a rank gets at a time; None for one stretch."""
    done: Progress = ()
    """What has been done of the epoch; the share is one of the rest."""

    def length(self, n_rows: int) -> int:
        return sum(piece.n for piece in self.pieces(n_rows))

    def bind(self, n_rows: int, epoch: int) -> At:
        at, pieces = self.order.bind(n_rows, epoch), self.pieces(n_rows)
        return lambda positions: at(positions_of(pieces, positions))

    def pieces(self, n_rows: int) -> tuple[StridedSlice, ...]:
        """Its positions of the order."""
        whole = self.order.length(n_rows)
        left = [(0, whole)]
        for world_size, n in self.done:
            left = RankPartition(world_size, self.uneven, self.hand).rest(left, n)
        return RankPartition(self.world_size, self.uneven, self.hand).pieces(left, whole, self.rank)


@dataclass(frozen=True)
class Windows:
    """The windows that an epoch of a block-shuffled order, or one rank's share of it, goes through."""

    order: BlockShuffled
    n_rows: int
    epoch: int
    pieces: tuple[StridedSlice, ...]
    """Positions of the order that it has."""

    @property
    def window_rows(self) -> int:
        """Rows of a window at most."""
        return self.order.window_rows(self.n_rows)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Positions [start, stop) by window: (number of the window, positions in it), in their order."""
        spans: list[tuple[int, int]] = []
        for piece in self.pieces:
            i, end = max(0, start), min(piece.n, stop)
            while i < end:
                number = piece.at(i) // self.window_rows
                n = min(end, piece.below((number + 1) * self.window_rows)) - i
                i += n
                if spans and spans[-1][0] == number:
                    # The piece before ended in it.
                    n += spans.pop()[1]
                spans.append((number, n))
            start, stop = start - piece.n, stop - piece.n
        return spans

    def runs(self, number: int) -> list[tuple[int, int]]:
        """The rows of a window, as runs [start, stop) in ascending order."""
        return self.order.runs(self.n_rows, self.epoch, number)


def windows(order: Order, n_rows: int, epoch: int) -> Windows | None:
    """The windows of an epoch, if the order has any."""
    if isinstance(order, BlockShuffled):
        return Windows(
            order, n_rows, epoch, RankPartition(1, "join", None).pieces([(0, n_rows)], n_rows, 0)
        )
    if isinstance(order, PerRank) and isinstance(order.order, BlockShuffled):
        return Windows(order.order, n_rows, epoch, order.pieces(n_rows))
    return None
