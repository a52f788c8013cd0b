"""Row orders: the rows of an epoch and their sequence, computed at any position.

An order maps positions of an epoch to row indices. It depends only on its arguments, the number of
rows and the epoch. Because an order can compute any position, a large shuffle needs no memory, and
a resumed epoch continues where it stopped. An order gets the number of rows when a feeder binds it:
``Feeder(x, rows=block_shuffled(seed=1, block_rows=4096), ...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.permutation import draws, keys_of, permutation
from pinfeed.rows.ranks import Interval, Progress, RankPartition, StridedSlice, Uneven, positions_of
from pinfeed.rows.windows import EvenWindows, SharedWindows, Windows
from pinfeed.validation.arguments import (
    check_flag,
    check_rank,
    check_seed,
    whole_number,
)

Rows = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""
At = Callable[[Rows], Rows]
"""A function that returns the row indices at positions of one epoch."""
Arrays = tuple[npt.NDArray[Any], ...]


@runtime_checkable
class Order(Protocol):
    """The rows of an epoch and their sequence.

    Orders are frozen dataclasses: orders with equal arguments are equal, and ``repr`` shows them.
    An order that keeps arrays may have a property ``kept_arrays``, a tuple of them and of those of
    the orders in it. A feeder then counts them in its plan.

    Examples:
        >>> order = pinfeed.rows.shuffled(seed=1)
        >>> with pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order) as feeder:
        ...     n_batches = len(feeder)
        >>> order.bind(n_rows=1000, epoch=0)(np.arange(3))  # the first three row indices
        array([...])
    """

    def length(self, n_rows: int) -> int:
        """Return the number of rows in one epoch over ``n_rows`` rows."""

    def bind(self, n_rows: int, epoch: int) -> At:
        """Return the order of one epoch over ``n_rows`` rows."""


def sequential() -> Order:
    """Return the order 0, 1, 2, … of the rows, the same in every epoch.

    Examples:
        >>> pinfeed.rows.sequential().bind(n_rows=4, epoch=0)(np.arange(4))
        array([0, 1, 2, 3])
    """
    return Sequential()


def shuffled(seed: int = 0) -> Order:
    """Return a random order of all rows, a different one in every epoch.

    The order is the same for the same seed and epoch, on every machine and in every version.

    Args:
        seed: Seed of the shuffle; the order is a function of (seed, epoch). With the default, every
            run of a program repeats the same orders.

    Raises:
        ArgumentError: If ``seed`` is not a whole number.

    Examples:
        >>> order = pinfeed.rows.shuffled(seed=1)
        >>> feeder = pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order)
    """
    return Shuffled(check_seed(seed))


def drawn(n: int, seed: int = 0) -> Order:
    """Return an order of random rows with replacement; every position is drawn independently.

    An epoch has ``n`` rows, independent of the number of rows in the store. Rows may repeat. The
    order is the same for the same seed and epoch, on every machine and in every version.

    Args:
        n: Number of rows of an epoch.
        seed: Seed of the draws; a row is a function of (seed, epoch, position).

    Raises:
        ArgumentError: If ``n`` is not a whole number above 0, or ``seed`` is not a whole number.

    Examples:
        >>> order = pinfeed.rows.drawn(n=5000, seed=1)
        >>> feeder = pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order)
        >>> len(feeder)
        50
    """
    return Drawn(whole_number(n, "n"), check_seed(seed))


def block_shuffled(seed: int = 0, *, block_rows: int, window_blocks: int = 16) -> Order:
    """Return a random order of contiguous blocks, which disks read with few seeks.

    The order visits the blocks in random order, and mixes the rows within each window of
    ``window_blocks`` blocks. The blocks begin at different rows in every epoch. In the order, the
    rows of one block are less than one window apart.

    Args:
        seed: Seed of the shuffle; the order is a function of (seed, epoch).
        block_rows: Number of consecutive rows of a block. A block should have at least 256 KiB, so
            that disks read it as fast as a sequence; for rows of 4 KiB, give 64 or more.
        window_blocks: Number of blocks of a window. Larger windows mix more rows, and need more
            memory to read ahead.

    Raises:
        ArgumentError: If ``seed`` is not a whole number, or ``block_rows`` or ``window_blocks`` is
            not a whole number above 0.

    Examples:
        >>> order = pinfeed.rows.block_shuffled(seed=1, block_rows=256)
        >>> feeder = pinfeed.Feeder(np.arange(100_000), batch_size=100, rows=order)
    """
    return BlockShuffled(
        check_seed(seed),
        whole_number(block_rows, "block_rows"),
        whole_number(window_blocks, "window_blocks"),
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
    order = check_order(order)
    check_flag(drop_last, "drop_last")
    rank, world_size = check_rank(rank, world_size, f"rank={rank!r}, world_size={world_size!r}")
    chunk = None if in_blocks(order) else 1
    return PerRank(order, rank, world_size, "drop" if drop_last else "pad", hand=chunk)


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
class Drawn:
    """Independent random rows, with replacement."""

    n: int
    seed: int

    def length(self, n_rows: int) -> int:
        return self.n if n_rows else 0

    def bind(self, n_rows: int, epoch: int) -> At:
        return draws(n_rows, f"{self.seed}/{epoch}/drawn")


@dataclass(frozen=True)
class BlockShuffled:
    """Blocks in random order, with rows mixed within a window of blocks."""

    seed: int
    block_rows: int
    window_blocks: int

    in_blocks = True

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        cut = self._cut(n_rows, epoch)
        window_rows = self._window_rows(n_rows)

        # Consecutive batches need the same window.
        @functools.lru_cache(maxsize=1)
        def window(number: int) -> At:
            size = min(window_rows, n_rows - number * window_rows)
            return permutation(size, f"{cut.salt}/{number}")

        def at(positions: Rows) -> Rows:
            numbers = positions // window_rows
            offset = positions - numbers * window_rows
            for number, here in grouped(numbers):
                offset[here] = window(number)(offset[here])
            return cut.rows(numbers * window_rows + offset)

        return at

    def windows(self, n_rows: int, epoch: int) -> Windows:
        cut = self._cut(n_rows, epoch)
        size = self._window_rows(n_rows)

        def runs(window: int) -> list[Interval]:
            end = min((window + 1) * size, n_rows)
            begins = np.arange(window * size, end, cut.block)
            found = []
            for begin, start in zip(begins.tolist(), cut.rows(begins).tolist(), strict=True):
                stop = start + min(cut.block, end - begin)
                found.append((start, min(stop, n_rows)))
                if stop > n_rows:
                    found.append((0, stop - n_rows))
            return sorted(found)

        return EvenWindows(n_rows, size, cut.block, runs, self.window_blocks)

    def _window_rows(self, n_rows: int) -> int:
        """Return the rows of a window; the last window of an epoch may have fewer."""
        return min(min(self.block_rows, max(1, n_rows)) * self.window_blocks, max(1, n_rows))

    def _cut(self, n_rows: int, epoch: int) -> _Cut:
        salt = f"{self.seed}/{epoch}/blocks"
        block = min(self.block_rows, max(1, n_rows))
        first = int(keys_of(salt + "/first", 1)[0] % np.uint64(n_rows)) if n_rows else 0
        return _Cut(salt, n_rows, block, first, permutation(n_rows // block, salt))


@dataclass(frozen=True)
class _Cut:
    """The blocks of an epoch: a ring of all rows, cut into blocks from a random row on.

    The shorter last block has different rows in each epoch.
    """

    salt: str
    n_rows: int
    block: int
    first: int
    block_at: At

    def rows(self, positions: Rows) -> Rows:
        """Return the rows at positions before they are mixed within their window."""
        index = positions // self.block
        offset = positions - index * self.block
        full = index < self.n_rows // self.block
        index[full] = self.block_at(index[full])
        return (index * self.block + offset + self.first) % self.n_rows


@dataclass(frozen=True)
class PerRank:
    """One rank's share of an order."""

    # The ``repr`` of this class is in saved states, so the names of its fields must not change.
    order: Order
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
        found = windows(self.order, n_rows, epoch)
        return None if found is None else SharedWindows(found, self.pieces(n_rows))

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the order keeps."""
        return kept_arrays(self.order)

    def pieces(self, n_rows: int) -> tuple[StridedSlice, ...]:
        """Return the positions of the order that the rank reads."""
        whole = self.order.length(n_rows)
        left = [(0, whole)]
        for world_size, n in self.done:
            left = RankPartition(world_size, self.uneven, self.hand).rest(left, n)
        return RankPartition(self.world_size, self.uneven, self.hand).pieces(left, whole, self.rank)


def grouped(numbers: Rows) -> Iterator[tuple[int, Rows | slice]]:
    """Yield each distinct number once, with the places at which it is."""
    # Most batches need a single window.
    if len(numbers) and numbers.item(numbers.argmin()) == numbers.item(numbers.argmax()):
        yield numbers.item(0), slice(None)
        return
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


def check_order(order: Any, name: str = "order") -> Order:
    """Return an order that a user gives.

    Raises:
        ArgumentError: If it is not an order.
    """
    # A class has the methods of its instances.
    if not isinstance(order, Order) or isinstance(order, type):
        raise ArgumentError(
            f"{name}={order!r}: expected an order of pinfeed.rows, such as shuffled(seed=1)"
        )
    return order


def windows(order: object, n_rows: int, epoch: int) -> Windows | None:
    """Return the windows of an epoch; None if an order has none.

    An order with windows has a method ``windows(n_rows, epoch)``.
    """
    # A subclass may have other rows.
    made: Windows | None = None
    if "windows" in vars(type(order)):
        made = order.windows(n_rows, epoch)  # type: ignore[attr-defined]
    return made


def is_own(order: object) -> bool:
    """Return whether the class of an order is one of pinfeed."""
    return isinstance(order, Order) and type(order).__module__.startswith("pinfeed.rows.")


def in_blocks(order: object) -> bool:
    """Return whether an order visits contiguous blocks of rows, which only one rank should read."""
    return getattr(order, "in_blocks", False)


def is_repeatable(order: object) -> bool:
    """Return whether the order is one of pinfeed, a function of seed and epoch alone."""
    if isinstance(order, PerRank):
        order = order.order
    # A subclass, or an order of the user, may depend on something else.
    return type(order) in (Sequential, Shuffled, Drawn, BlockShuffled)


def is_distinct(order: object) -> bool:
    """Return whether the order is known to have each row at most once per epoch."""
    # A subclass may repeat rows.
    return type(order) in (Sequential, Shuffled, BlockShuffled) or _copies(order) == 1


def most_copies(order: object) -> int | None:
    """Return the most occurrences of a row in an epoch of an order; None if unknown."""
    if is_distinct(order):
        return 1
    if isinstance(order, PerRank) and (copies := most_copies(order.order)) is not None:
        # Padding repeats fewer positions than there are ranks, at the end of the epoch.
        return copies + (order.uneven == "pad")
    return _copies(order)


def kept_arrays(order: object) -> Arrays:
    """Return the arrays that an order and the orders in it keep; an array may occur twice."""
    arrays: Arrays = getattr(order, "kept_arrays", ())
    return arrays


def _copies(order: object) -> int | None:
    """Return ``most_copies`` of an order that is made of other orders; None if unknown."""
    # A subclass may repeat rows, unless it says how often itself.
    copies: int | None = getattr(order, "most_copies", None)
    return copies if "most_copies" in vars(type(order)) else None
