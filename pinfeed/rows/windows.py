"""Windows: rows of an epoch that are read together, before its batches need them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from pinfeed.rows.ranks import Interval, Positions, StridedSlice


class Window(NamedTuple):
    """Rows that are read together. All positions that need one are in [begin, end)."""

    begin: int
    """First position of the epoch that may need a row of the window."""
    end: int
    """Position after the last one."""
    runs: Sequence[Interval]
    """Row indices as runs [start, stop), in ascending order."""


class Windows(Protocol):
    """The windows of an epoch. Positions may need rows of several windows, or of none."""

    @property
    def window_rows(self) -> int:
        """Most rows of a window of any epoch."""

    @property
    def block_rows(self) -> int:
        """Usual length of a run."""

    @property
    def n_blocks(self) -> int:
        """Most blocks of a window.

        Blocks are runs of at most ``block_rows`` rows. The rows of an epoch, as a ring, are cut
        into blocks at any row. If windows have other runs, the number is 0.
        """

    @property
    def n_ahead(self) -> int:
        """Number of windows to read ahead."""

    def most(self, n: int) -> int:
        """Return the most windows that ``n`` consecutive positions of any epoch need."""

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the windows that the positions [start, stop) need, by ascending ``begin``."""


@dataclass(frozen=True)
class EvenWindows:
    """Windows of consecutive positions, one after the other."""

    n_ahead = 1

    n_rows: int
    """Number of positions."""
    window_rows: int
    block_rows: int
    runs: Callable[[int], Sequence[Interval]]
    """Returns the rows of a window, given its number."""
    n_blocks: int = 0

    def most(self, n: int) -> int:
        return -(-n // self.window_rows) + 1

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        size = self.window_rows
        for number in range(start // size, -(-min(stop, self.n_rows) // size)):
            end = min((number + 1) * size, self.n_rows)
            yield Window(number * size, end, self.runs(number))


@dataclass(frozen=True)
class WrappedWindows:
    """Windows that are made of other ones; this base class changes nothing."""

    windows: Windows

    @property
    def window_rows(self) -> int:
        return self.windows.window_rows

    @property
    def block_rows(self) -> int:
        return self.windows.block_rows

    @property
    def n_blocks(self) -> int:
        return self.windows.n_blocks

    @property
    def n_ahead(self) -> int:
        return self.windows.n_ahead

    def most(self, n: int) -> int:
        return self.windows.most(n)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        return self.windows.needed(start, stop)


@dataclass(frozen=True)
class SharedWindows(WrappedWindows):
    """The windows of one rank's share of an order."""

    pieces: tuple[StridedSlice, ...]
    """The rank's positions of the order."""

    def most(self, n: int) -> int:
        spans = [
            n if piece.n <= piece.chunk else (n // piece.chunk + 1) * piece.step + piece.chunk
            for piece in self.pieces
        ]
        return self.windows.most(max(spans, default=n))

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        for first, pieces in self._ascending():
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
                for window in self.windows.needed(piece.at(i), stop_of_piece):
                    low = first + sum(one.below(window.begin) for one in pieces)
                    low = max(least, low)
                    high = first + sum(one.below(window.end) for one in pieces)
                    key = window._replace(runs=tuple(window.runs))
                    # Other ranks may have all positions of a window.
                    if low < high and key not in seen:
                        if window.end > stop_of_piece:
                            seen.add(key)
                        yield Window(low, high, window.runs)

    def _ascending(self) -> list[tuple[int, list[StridedSlice]]]:
        """Return groups of ascending pieces, each with its first position in the share.

        Padding begins again with the first positions of the order.
        """
        groups: list[tuple[int, list[StridedSlice]]] = []
        first = 0
        last = -1
        for piece in self.pieces:
            if not piece.n:
                continue
            if piece.begin <= last or not groups:
                groups.append((first, []))
            groups[-1][1].append(piece)
            last = piece.at(piece.n - 1)
            first += piece.n
        return groups


@dataclass(frozen=True)
class WidenedWindows(WrappedWindows):
    """Windows of an order whose rows change places, but only within intervals of one length."""

    size: int
    """Length of an interval."""
    n_rows: int
    """Number of positions."""

    def most(self, n: int) -> int:
        return self.windows.most(n + 2 * (self.size - 1))

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        for begin, end, runs in self.windows.needed(self._floor(start), self._ceiling(stop)):
            yield Window(self._floor(begin), self._ceiling(end), runs)

    def _floor(self, position: int) -> int:
        return position // self.size * self.size

    def _ceiling(self, position: int) -> int:
        return min(-(-position // self.size) * self.size, self.n_rows)


@dataclass(frozen=True)
class SelectedWindows(WrappedWindows):
    """Windows of a part of the rows, made of windows of the numbers of its rows."""

    n_blocks = 0

    select: Callable[[Positions], Positions]
    """Returns the row indices of rows of the part."""

    @functools.cached_property
    def block_rows(self) -> int:
        return usual_run(self)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        for begin, end, runs in self.windows.needed(start, stop):
            numbers = np.concatenate([np.arange(*run) for run in runs])
            yield Window(begin, end, _runs_of(np.sort(self.select(numbers))))


def usual_run(windows: Windows) -> int:
    """Return the mean length of a run of the first window, which stands for all."""
    runs = [run for window in itertools.islice(windows.needed(0, 1), 1) for run in window.runs]
    return sum(stop - start for start, stop in runs) // max(1, len(runs))


def _runs_of(rows: Positions) -> list[Interval]:
    """Return ascending rows as runs [start, stop)."""
    ends = np.flatnonzero(rows[1:] != rows[:-1] + 1)
    starts = rows[np.concatenate(([0], ends + 1))]
    stops = rows[np.concatenate((ends, [len(rows) - 1]))] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
