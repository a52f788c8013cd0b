"""Which rows, in which order.

An order maps positions of an epoch to row numbers. It is a function of its arguments, the number of rows and the epoch, and
can be asked for any position, so a million-row shuffle costs no memory and a resumed epoch goes on where it stopped.
Orders know the number of rows only when they are bound: ``Feeder(x, rows=block_shuffled(seed=1, block_rows=4096), ...)``.
"""

from __future__ import annotations

import hashlib
import math
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

_TABLE_ROWS = 1 << 12  # up to here a permutation is a table: a network needs some hundred rows to share the cost of its steps


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
        cut = self._cut(n_rows, epoch)
        window_rows = self.window_rows(n_rows)

        def window(number: int) -> At:
            return permutation(min(window_rows, n_rows - number * window_rows), f"{cut.salt}/{number}")

        last: tuple[int, At] = (-1, cut.block_at)  # consecutive batches ask for the same window

        def at(positions: Rows) -> Rows:
            nonlocal last
            number = positions // window_rows
            offset = positions - number * window_rows
            one = len(number) and number[0] == number[-1] and bool((number == number[0]).all())
            for n in number[:1].tolist() if one else np.unique(number).tolist():
                found = last  # another thread may replace it meanwhile
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
        first = int(_keys(salt + "/first", 1)[0] % np.uint64(n_rows)) if n_rows else 0
        return _Cut(salt, n_rows, block, first, permutation(n_rows // block, salt))


@dataclass(frozen=True)
class _Cut:
    """How an epoch's rows are cut into blocks: a ring, cut from a drawn row on. The short block at the end is another one each time."""

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
    drop_last: bool

    def length(self, n_rows: int) -> int:
        whole = self.order.length(n_rows)
        return whole // self.world_size if self.drop_last else -(-whole // self.world_size)

    def bind(self, n_rows: int, epoch: int) -> At:
        at, whole, share = self.order.bind(n_rows, epoch), self.order.length(n_rows), self.length(n_rows)
        if isinstance(self.order, BlockShuffled):
            return lambda positions: at((positions + self.rank * share) % whole)
        return lambda positions: at((positions * self.world_size + self.rank) % whole)


@dataclass(frozen=True)
class Windows:
    """The windows that an epoch of a block-shuffled order, or one rank's share of it, goes through."""

    order: BlockShuffled
    n_rows: int
    epoch: int
    shift: int
    """Position of the order that is position 0 here; behind the end, the order begins again."""

    @property
    def window_rows(self) -> int:
        """Rows of a window at most."""
        return self.order.window_rows(self.n_rows)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Positions [start, stop) by window: (number of the window, positions in it), in their order."""
        spans = []
        while start < stop:
            position = (start + self.shift) % self.n_rows
            number = position // self.window_rows
            n = min(stop - start, (number + 1) * self.window_rows - position, self.n_rows - position)
            spans.append((number, n))
            start += n
        return spans

    def runs(self, number: int) -> list[tuple[int, int]]:
        """The rows of a window, as runs [start, stop) in ascending order."""
        return self.order.runs(self.n_rows, self.epoch, number)


def windows(order: Order, n_rows: int, epoch: int) -> Windows | None:
    """The windows of an epoch, if the order has any."""
    if isinstance(order, BlockShuffled):
        return Windows(order, n_rows, epoch, 0)
    if isinstance(order, PerRank) and isinstance(order.order, BlockShuffled):
        return Windows(order.order, n_rows, epoch, order.rank * order.length(n_rows))
    return None


# -- permutations ----------------------------------------------------------------------------------------------------


def permutation(n: int, salt: str) -> At:
    """A permutation of [0, n) as a function, drawn by ``salt``.

    Small ones are tables. Large ones are a Feistel network on a rectangle that hardly exceeds n, walked until it falls below n
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): no memory, any position at once.
    """
    if n <= _TABLE_ROWS:
        table = np.argsort(_mix(np.arange(n, dtype=np.uint64) ^ _keys(salt, 1)[0]), kind="stable")
        return lambda positions: table[positions]
    keys = _keys(salt, 6).astype(np.uint32)
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)

    def network(x: Rows) -> Rows:
        quotient = x // width
        left, right = quotient.astype(np.uint32), (x - quotient * width).astype(np.uint32)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            _add(left, _mix32(right, even), height)
            _add(right, _mix32(left, odd), width)
        return left.astype(np.int64) * width + right

    def at(positions: Rows) -> Rows:
        x = network(positions)
        while len(outside := np.flatnonzero(x >= n)):
            x[outside] = network(x[outside])
        return x

    return at


def _add(x: npt.NDArray[np.uint32], random: npt.NDArray[np.uint32], size: int) -> None:
    """Add a number below ``size``, which is at most 2^31, to ``x``, modulo ``size``; it comes from the high bits of ``random``."""
    if size <= 1 << 16:  # all in 32 bits, which is three times as fast
        random >>= np.uint32(16)
        random *= np.uint32(size)
        random >>= np.uint32(16)
        x += random
    else:
        x += ((random.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.uint32)
    np.minimum(x, x - np.uint32(size), out=x)  # where x is below size already, the difference wraps around and is large


def _keys(salt: str, n: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(salt.encode(), digest_size=8 * n).digest(), "<u8").astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every bit over all others: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: npt.NDArray[np.uint32], key: np.uint32) -> npt.NDArray[np.uint32]:
    """Numbers whose high bits depend on every bit of ``x`` and ``key``.

    Two rounds of multiply and xor-shift in 32 bits, which processors do eight at a time, with the multipliers of lowbias32 (Wellons,
    "Prospecting for Hash Functions", 2018).
    """
    x = x ^ key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x
