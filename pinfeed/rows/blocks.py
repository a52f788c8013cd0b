"""Shuffled blocks of rows: block_shuffled() of any rows, chunk_shuffled() of the chunks of a file.

Both visit the blocks in random order, and mix the rows within windows of several blocks. They
differ in the blocks, which ``EpochBlocks`` describes for one epoch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import At, KeptArray, KnownOrder, Order, Rows, by_window, check_n_rows
from pinfeed.rows.permutation import keys_of, permutation
from pinfeed.rows.windows import Interval, Window, Windows
from pinfeed.validation.arguments import check_seed, whole_number


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


def chunk_shuffled(store: object, seed: int = 0, *, window_chunks: int = 16) -> Order:
    """Return a random order of the chunks of a store, which decodes each chunk about once.

    The order visits the chunks in random order, and mixes the rows within each window of
    ``window_chunks`` chunks. It is like ``block_shuffled``, but its blocks are the chunks, whatever
    their numbers of rows. A row of ``HDF5Store.windows`` belongs to the chunk in which it begins.

    An epoch keeps 24 bytes for each chunk.

    Args:
        store: A store of rows in chunks, such as an ``HDF5Store`` or a ``ZarrStore``, windows of
            one, or ``concat`` of several.
        seed: Seed of the shuffle; the order is a function of (seed, epoch).
        window_chunks: Number of chunks of a window. Larger windows mix more rows, and need more
            memory to read ahead.

    Raises:
        ArgumentError: If ``store`` has no chunks, ``seed`` is not a whole number, or
            ``window_chunks`` is not a whole number above 0.

    Examples:
        >>> import h5py
        >>> with h5py.File("images.h5", "w") as file:
        ...     data = np.arange(1000)
        ...     _ = file.create_dataset("x", data=data, chunks=(100,), compression="gzip")
        >>> with pinfeed.HDF5Store("images.h5", "x") as store:
        ...     order = pinfeed.rows.chunk_shuffled(store, seed=1, window_chunks=2)
        ...     with pinfeed.Feeder(store, batch_size=50, rows=order) as feeder:
        ...         n_batches = len(list(feeder))
    """
    bounds = getattr(store, "bounds", None)
    if bounds is None:
        raise ArgumentError(
            f"chunk_shuffled(): got {type(store).__name__}; expected a store of rows in chunks, "
            "such as an HDF5Store of a dataset with chunks; for other sources, give "
            "block_shuffled(seed, block_rows=...)"
        )
    # Chunks without rows are left out.
    distinct = KeptArray.of(np.unique(bounds.astype(np.int64)))
    return ChunkShuffled(check_seed(seed), distinct, whole_number(window_chunks, "window_chunks"))


class EpochBlocks(ABC):
    """The blocks of an epoch, in their order, and the windows of several blocks that are mixed.

    A place is a position before rows are mixed.

    Attributes:
        salt: Text that the shuffles of the epoch are a function of.
        n_windows: Number of windows.
        window_rows: Most rows of a window of any epoch.
        block_rows: Usual number of rows of a block.
        n_blocks: Most blocks of a window if all have ``block_rows`` rows, or else 0.
    """

    salt: str
    n_windows: int
    window_rows: int
    block_rows: int
    n_blocks = 0

    @abstractmethod
    def most(self, n: int) -> int:
        """Return the most windows that ``n`` consecutive positions of any epoch need."""

    @abstractmethod
    def window_of(self, positions: Rows) -> Rows:
        """Return the number of the window of each position."""

    @abstractmethod
    def interval(self, window: int) -> Interval:
        """Return the positions of a window."""

    @abstractmethod
    def rows(self, places: Rows) -> Rows:
        """Return the rows at places."""

    @abstractmethod
    def runs(self, window: int) -> list[Interval]:
        """Return the rows of a window as runs [start, stop), in ascending order."""

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the windows that the positions [start, stop) need."""
        if start >= stop:
            return
        first, last = self.window_of(np.array([start, stop - 1])).tolist()
        for number in range(first, min(last + 1, self.n_windows)):
            yield Window(*self.interval(number), self.runs(number))


class BlockOrder(KnownOrder):
    """Base class of orders of blocks, whose rows are mixed within windows."""

    in_blocks = True

    @abstractmethod
    def blocks(self, n_rows: int, epoch: int) -> EpochBlocks:
        """Return the blocks of an epoch."""

    def windows(self, n_rows: int, epoch: int) -> Windows:
        made = self.blocks(n_rows, epoch)
        sizes = made.window_rows, made.block_rows, made.n_blocks
        return Windows(made.needed, made.most, *sizes, is_single=made.n_windows == 1)

    def bind(self, n_rows: int, epoch: int) -> At:
        blocks = self.blocks(n_rows, epoch)

        def window(number: int) -> tuple[int, At]:
            begin, end = blocks.interval(number)
            mixed = permutation(end - begin, f"{blocks.salt}/{number}")
            return begin, lambda offsets: mixed(offsets) + begin

        places_at = by_window(blocks.window_of, window)
        return lambda positions: blocks.rows(places_at(positions))


@dataclass(frozen=True)
class BlockShuffled(BlockOrder):
    """Blocks of equally many rows, from a random row on; see ``block_shuffled``."""

    seed: int
    block_rows: int
    window_blocks: int

    is_repeatable = True

    def blocks(self, n_rows: int, epoch: int) -> EpochBlocks:
        return _EvenBlocks(self, n_rows, f"{self.seed}/{epoch}/blocks")


class _EvenBlocks(EpochBlocks):
    """A ring of all rows, cut into blocks from a random row on.

    The shorter last block has different rows in each epoch.
    """

    def __init__(self, order: BlockShuffled, n_rows: int, salt: str) -> None:
        most = max(1, n_rows)
        self.salt = salt
        self.n_blocks = order.window_blocks
        self.block_rows = min(order.block_rows, most)
        # The last window of an epoch may have fewer rows.
        self.window_rows = min(self.block_rows * order.window_blocks, most)
        self.n_windows = -(-n_rows // self.window_rows)
        self._n_rows = n_rows
        self._n_full = n_rows // self.block_rows
        self._block_at = permutation(self._n_full, salt)
        self._first = int(keys_of(salt + "/first", 1)[0] % np.uint64(most))

    def most(self, n: int) -> int:
        return -(-n // self.window_rows) + 1

    def window_of(self, positions: Rows) -> Rows:
        return positions // self.window_rows

    def interval(self, window: int) -> Interval:
        begin = window * self.window_rows
        return begin, min(begin + self.window_rows, self._n_rows)

    def rows(self, places: Rows) -> Rows:
        index = places // self.block_rows
        offset = places - index * self.block_rows
        full = index < self._n_full
        index[full] = self._block_at(index[full])
        return (index * self.block_rows + offset + self._first) % self._n_rows

    def runs(self, window: int) -> list[Interval]:
        begin, end = self.interval(window)
        begins = np.arange(begin, end, self.block_rows)
        found = []
        for place, start in zip(begins.tolist(), self.rows(begins).tolist(), strict=True):
            stop = start + min(self.block_rows, end - place)
            found.append((start, min(stop, self._n_rows)))
            if stop > self._n_rows:
                found.append((0, stop - self._n_rows))
        return sorted(found)


@dataclass(frozen=True)
class ChunkShuffled(BlockOrder):
    """The chunks of a file; see ``chunk_shuffled``."""

    seed: int
    bounds: KeptArray
    """First row of each chunk, followed by the number of rows."""
    window_chunks: int

    def length(self, n_rows: int) -> int:
        text = "chunk_shuffled(store) has a store of"
        check_n_rows(n_rows, self.bounds.values.item(-1), text, "the source of the feeder")
        return n_rows

    def blocks(self, n_rows: int, epoch: int) -> EpochBlocks:
        self.length(n_rows)
        return _Chunks(self.bounds.values, self.window_chunks, f"{self.seed}/{epoch}/chunks")


class _Chunks(EpochBlocks):
    """The chunks of a file, whatever their numbers of rows."""

    def __init__(self, bounds: Rows, n_in_window: int, salt: str) -> None:
        n = len(bounds) - 1
        self.salt = salt
        self.n_windows = -(-n // n_in_window)
        self._n_in_window = n_in_window
        chunks = permutation(n, salt)(np.arange(n))
        self._starts = bounds[chunks]
        # First position of each chunk and of each window, followed by the number of rows.
        self._begins: Rows = np.append(0, np.cumsum(bounds[chunks + 1] - self._starts))
        first = np.minimum(np.arange(self.n_windows + 1) * n_in_window, n)
        self._window_begins: Rows = self._begins[first]
        self.block_rows = max(1, self._begins.item(-1) // n)
        # Any chunks may be in one window of some epoch.
        self._sizes = np.sort(np.diff(bounds))
        self.window_rows = int(self._sizes[-n_in_window:].sum())

    def most(self, n: int) -> int:
        return int(self._least_rows.searchsorted(n - 2, side="right")) + 2

    def window_of(self, positions: Rows) -> Rows:
        return self._window_begins.searchsorted(positions, side="right") - 1

    def interval(self, window: int) -> Interval:
        return self._window_begins.item(window), self._window_begins.item(window + 1)

    def rows(self, places: Rows) -> Rows:
        chunks = self._begins.searchsorted(places, side="right") - 1
        rows: Rows = self._starts[chunks] + places - self._begins[chunks]
        return rows

    def runs(self, window: int) -> list[Interval]:
        first = window * self._n_in_window
        starts = self._starts[first : first + self._n_in_window]
        sizes = np.diff(self._begins[first : first + len(starts) + 1])
        return sorted(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))

    @functools.cached_property
    def _least_rows(self) -> Rows:
        """Fewest rows of 1, 2, ... whole windows that follow each other, in any epochs.

        Positions that need them also need a row of the window before them, and one after them.
        """
        # Rows of the smallest chunks of an epoch. The windows may be in two epochs.
        size = self._n_in_window
        ends = np.append(0, self._sizes.cumsum()[size - 1 :: size])
        return np.sort(np.concatenate([ends[:-1] + ends[1:], 2 * ends[1:]]))
