"""Windows: rows of an epoch that are read together, before its batches need them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Interval = tuple[int, int]
"""Positions or rows [start, stop)."""


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

    @property
    def is_single(self) -> bool:
        """Whether one window has all rows of every epoch."""

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

    @property
    def is_single(self) -> bool:
        return self.window_rows >= self.n_rows

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

    @property
    def is_single(self) -> bool:
        return self.windows.is_single

    def most(self, n: int) -> int:
        return self.windows.most(n)

    def needed(self, start: int, stop: int) -> Iterator[Window]:
        return self.windows.needed(start, stop)


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


def usual_run(windows: Windows) -> int:
    """Return the mean length of a run of the first window, which stands for all."""
    # A mixture may need its first window at a later position than 0.
    first = itertools.islice(windows.needed(0, sys.maxsize), 1)
    runs = [run for window in first for run in window.runs]
    return sum(stop - start for start, stop in runs) // max(1, len(runs))
