"""chunk_shuffled(): a random order of the chunks of a file, with rows mixed within windows."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Arrays, At, Order, Rows, grouped
from pinfeed.rows.permutation import permutation
from pinfeed.rows.windows import Window, Windows
from pinfeed.validation.arguments import check_seed, whole_number


def chunk_shuffled(store: Any, seed: int = 0, *, window_chunks: int = 16) -> Order:
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
    return ChunkShuffled(
        check_seed(seed), Bounds.of(bounds), whole_number(window_chunks, "window_chunks")
    )


@dataclass(frozen=True)
class Bounds:
    """Bounds of the chunks of a file. Saved states contain ``repr``, so it has their checksum."""

    n_chunks: int
    crc32: int
    rows: Rows = field(repr=False, compare=False)
    """First row of each chunk, followed by the number of rows."""

    @classmethod
    def of(cls, rows: Rows) -> Bounds:
        """Return the bounds, without chunks that have no rows."""
        distinct = np.unique(rows.astype(np.int64))
        return cls(len(distinct) - 1, zlib.crc32(distinct.tobytes()), distinct)


@dataclass(frozen=True)
class ChunkShuffled:
    """Chunks in random order, with rows mixed within a window of chunks; see ``chunk_shuffled``."""

    # The ``repr`` of this class is in saved states, so the names of its fields must not change.
    seed: int
    bounds: Bounds
    window_chunks: int

    most_copies = 1
    in_blocks = True

    def length(self, n_rows: int) -> int:
        of_chunks: int = self.bounds.rows.item(-1)
        if n_rows != of_chunks:
            raise ArgumentError(
                f"chunk_shuffled(store) has a store of {of_chunks:,} rows, but is used for "
                f"{n_rows:,} rows; expected the source of the feeder"
            )
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> At:
        self.length(n_rows)
        chunks = _Epoch(self, epoch)

        # Consecutive batches need the same window.
        @functools.lru_cache(maxsize=1)
        def window(number: int) -> At:
            begin, end = chunks.window(number)
            return permutation(end - begin, f"{self.seed}/{epoch}/chunks/{number}")

        def at(positions: Rows) -> Rows:
            numbers = chunks.window_of(positions)
            places = np.empty(len(positions), np.int64)
            for number, here in grouped(numbers):
                begin, _ = chunks.window(number)
                places[here] = window(number)(positions[here] - begin) + begin
            return chunks.rows(places)

        return at

    def windows(self, n_rows: int, epoch: int) -> Windows:
        self.length(n_rows)
        return ChunkWindows(_Epoch(self, epoch))

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the order keeps."""
        return (self.bounds.rows,)


class _Epoch:
    """The chunks of an epoch, in their order.

    Args:
        order: The order.
        epoch: Number of the epoch.
    """

    def __init__(self, order: ChunkShuffled, epoch: int) -> None:
        bounds = order.bounds.rows
        n = order.bounds.n_chunks
        self.n_in_window = order.window_chunks
        chunks = permutation(n, f"{order.seed}/{epoch}/chunks")(np.arange(n))
        self._starts = bounds[chunks]
        # The position after each chunk.
        self._ends = np.cumsum(bounds[chunks + 1] - self._starts)

    @property
    def n_windows(self) -> int:
        return -(-len(self._ends) // self.n_in_window)

    def sorted_sizes(self) -> Rows:
        """Return the numbers of rows of all chunks, in ascending order."""
        return np.sort(np.diff(self._ends, prepend=0))

    @property
    def mean_rows(self) -> int:
        """Mean number of rows of a chunk."""
        return max(1, int(self._ends[-1]) // len(self._ends))

    @functools.cached_property
    def window_ends(self) -> Rows:
        """Position after each window."""
        n = len(self._ends)
        last = np.minimum(np.arange(1, self.n_windows + 1) * self.n_in_window, n) - 1
        ends: Rows = self._ends[last]
        return ends

    def window_of(self, positions: Rows) -> Rows:
        """Return the window of each position."""
        return self.window_ends.searchsorted(positions, side="right")

    def window(self, number: int) -> tuple[int, int]:
        """Return the first position of a window, and the position after its last one."""
        begin = self.window_ends.item(number - 1) if number else 0
        return begin, self.window_ends.item(number)

    def rows(self, places: Rows) -> Rows:
        """Return the rows at places before they are mixed within their window."""
        chunks = self._ends.searchsorted(places, side="right")
        begins = np.where(chunks > 0, self._ends[chunks - 1], 0)
        rows: Rows = self._starts[chunks] + places - begins
        return rows

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Return the rows of a window as runs [start, stop), in ascending order."""
        part = slice(number * self.n_in_window, (number + 1) * self.n_in_window)
        starts = self._starts[part]
        sizes = np.diff(self._ends[part], prepend=self.window(number)[0])
        return sorted(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class ChunkWindows:
    """The windows of an epoch, of as many chunks each."""

    epoch: Any
    n_ahead = 1
    n_blocks = 0

    @functools.cached_property
    def window_rows(self) -> int:
        # Any chunks may be in one window of some epoch.
        return int(self.epoch.sorted_sizes()[-self.epoch.n_in_window :].sum())

    @property
    def block_rows(self) -> int:
        rows: int = self.epoch.mean_rows
        return rows

    def most(self, n: int) -> int:
        return int(self._least_rows.searchsorted(n - 2, side="right")) + 2

    @functools.cached_property
    def _least_rows(self) -> Rows:
        """Fewest rows of 1, 2, ... whole windows that follow each other, in any epochs.

        Positions that need them also need a row of the window before them, and one after them.
        """
        size = self.epoch.n_in_window
        # Rows of the smallest chunks of an epoch. The windows may be in two epochs.
        ends = np.append(0, self.epoch.sorted_sizes().cumsum()[size - 1 :: size])
        return np.sort(np.concatenate([ends[:-1] + ends[1:], 2 * ends[1:]]))

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        if start >= stop:
            return
        first, last = self.epoch.window_of(np.array([start, stop - 1])).tolist()
        for number in range(first, min(last + 1, self.epoch.n_windows)):
            begin, end = self.epoch.window(number)
            yield Window(begin, end, self.epoch.runs(number))
