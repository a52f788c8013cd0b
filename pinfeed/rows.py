"""Which rows, in which order.

An order maps positions of an epoch to row numbers. It is a function of its arguments, the number of rows and the epoch, and
can be asked for any position, so a million-row shuffle costs no memory and a resumed epoch goes on where it stopped.
Orders know the number of rows only when they are bound: ``Feeder(x, rows=block_shuffled(seed=1, block_rows=4096), ...)``.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError

Rows = npt.NDArray[np.int64]
"""Row numbers, shape (n,)."""
At = Callable[[Rows], Rows]
"""Row numbers at the given positions of one epoch."""

_TABLE_ROWS = 1 << 16  # up to here a permutation is a table: every permutation is equally likely; 512 KiB at most


@runtime_checkable
class Order(Protocol):
    """Which rows an epoch has, in which order. Orders are frozen dataclasses: equal arguments, equal order, and ``repr`` tells both."""

    def length(self, n_rows: int) -> int:
        """Number of rows in one epoch over ``n_rows`` rows."""

    def bind(self, n_rows: int, epoch: int) -> At:
        """The order of one epoch."""


def sequential() -> Order:
    """Rows 0, 1, 2, … in every epoch."""
    return Sequential()


def shuffled(seed: int = 0) -> Order:
    """All rows in random order, another one in every epoch; the same for the same seed and epoch, on every machine and version."""
    return Shuffled(operator.index(seed))


def block_shuffled(seed: int = 0, *, block_rows: int, window_blocks: int = 16) -> Order:
    """Random order in which rows that are neighbours in the store come close together, so that a disk need not seek for each.

    Blocks of ``block_rows`` neighbouring rows come in random order; the rows of ``window_blocks`` consecutive blocks are mixed.
    Where blocks begin is drawn anew in every epoch. The rows of one block come less than one window apart.

    Raises:
        ArgumentError: ``block_rows`` or ``window_blocks`` below 1.
    """
    for name, value in (("block_rows", block_rows), ("window_blocks", window_blocks)):
        if value < 1:
            raise ArgumentError(f"{name}={value}: expected at least 1")
    return BlockShuffled(*map(operator.index, (seed, block_rows, window_blocks)))


def per_rank(order: Order, *, rank: int, world_size: int, drop_last: bool = False) -> Order:
    """The share of one rank, equally long on every rank, as ``torch.utils.data.DistributedSampler`` cuts it.

    Rank r takes positions r, r + world_size, … of ``order``; of a block-shuffled order it takes one contiguous stretch, so that a
    block is read by one rank. Where rows do not divide, the first rows of the order come again at its end, or with
    ``drop_last`` the rest is left out.

    Raises:
        ArgumentError: ``rank`` is not in [0, world_size).
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
    return PerRank(order, operator.index(rank), operator.index(world_size), drop_last)


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
        salt = f"{self.seed}/{epoch}/blocks"
        block = min(self.block_rows, max(1, n_rows))
        n_full = n_rows // block
        # Rows are a ring that is cut into blocks from a drawn row on: the short block at the end is another one in every epoch.
        first = int(_keys(salt + "/first", 1)[0] % np.uint64(n_rows)) if n_rows else 0
        block_at = permutation(n_full, salt)
        window_rows = min(block * self.window_blocks, max(1, n_rows))

        def window(number: int) -> At:
            return permutation(min(window_rows, n_rows - number * window_rows), f"{salt}/{number}")

        last: tuple[int, At] = (-1, block_at)  # consecutive batches ask for the same window

        def at(positions: Rows) -> Rows:
            nonlocal last
            number, offset = np.divmod(positions, window_rows)
            for n in np.unique(number).tolist():
                if n != last[0]:
                    last = (n, window(n))
                here = number == n
                offset[here] = last[1](offset[here])
            index, offset = np.divmod(number * window_rows + offset, block)
            full = index < n_full
            index[full] = block_at(index[full])
            return (index * block + offset + first) % n_rows

        return at


@dataclass(frozen=True)
class PerRank:
    """One rank's share of an order."""

    order: Order
    rank: int
    world_size: int
    drop_last: bool

    def length(self, n_rows: int) -> int:
        whole = self.order.length(n_rows)
        return whole // self.world_size if self.drop_last else -(-whole // self.world_size)

    def bind(self, n_rows: int, epoch: int) -> At:
        at, whole, share = self.order.bind(n_rows, epoch), self.order.length(n_rows), self.length(n_rows)
        if isinstance(self.order, BlockShuffled):
            return lambda positions: at((positions + self.rank * share) % whole)
        return lambda positions: at((positions * self.world_size + self.rank) % whole)


# -- permutations ----------------------------------------------------------------------------------------------------


def permutation(n: int, salt: str) -> At:
    """A permutation of [0, n) as a function, drawn by ``salt``.

    Small ones are tables. Large ones are a Feistel network over the next power of two, walked until it falls below n
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): no memory, any position at once.
    """
    if n <= _TABLE_ROWS:
        table = np.argsort(_mix(np.arange(n, dtype=np.uint64) ^ _keys(salt, 1)[0]), kind="stable")
        return lambda positions: table[positions]
    keys = _keys(salt, 6)
    bits = (n - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low, high = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> low_bits, x & low
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left ^= _mix(right ^ even) & high
            right ^= _mix(left ^ odd) & low
        return (left << low_bits) | right

    def at(positions: Rows) -> Rows:
        x = network(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(x >= n)):
            x[outside] = network(x[outside])
        return x.astype(np.int64)

    return at


def _keys(salt: str, n: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(salt.encode(), digest_size=8 * n).digest(), "<u8").astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit over all others: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
