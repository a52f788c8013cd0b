"""Windows: rows of an epoch that are read together, before its batches need them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of an epoch. Positions may need rows of several windows, or of none."""

    needed: Callable[[int, int], Iterator[Window]]
    """Yields the windows that the positions [start, stop) need, by ascending ``begin``."""
    most: Callable[[int], int]
    """Returns the most windows that a number of consecutive positions of any epoch need."""
    window_rows: int
    """Most rows of a window of any epoch."""
    block_rows: int
    """Usual length of a run."""
    n_blocks: int = 0
    """Most blocks of a window.

    Blocks are runs of at most ``block_rows`` rows. The rows of an epoch, as a ring, are cut into
    blocks at any row. If windows have other runs, the number is 0.
    """
    n_ahead: int = 1
    """Number of windows to read ahead."""
    is_single: bool = False
    """Whether one window has all rows of every epoch."""

    def with_runs(self, change: Callable[[Sequence[Interval]], Sequence[Interval]]) -> Windows:
        """Return the windows with other runs; a window that has none is left out."""

        def needed(start: int, stop: int) -> Iterator[Window]:
            for begin, end, runs in self.needed(start, stop):
                if changed := change(runs):
                    yield Window(begin, end, changed)

        return replace(self, needed=needed, n_blocks=0)

    def widened(self, size: int, n_rows: int) -> Windows:
        """Return the windows of rows that change places, but only within intervals of one length.

        Args:
            size: Length of an interval.
            n_rows: Number of positions.
        """

        def floor(position: int) -> int:
            return position // size * size

        def ceiling(position: int) -> int:
            return min(-(-position // size) * size, n_rows)

        def needed(start: int, stop: int) -> Iterator[Window]:
            for begin, end, runs in self.needed(floor(start), ceiling(stop)):
                yield Window(floor(begin), ceiling(end), runs)

        return replace(self, needed=needed, most=lambda n: self.most(n + 2 * (size - 1)))


def usual_run(windows: Windows) -> int:
    """Return the mean length of a run of the first window, which stands for all."""
    # A mixture may need its first window at a later position than 0.
    first = itertools.islice(windows.needed(0, sys.maxsize), 1)
    runs = [run for window in first for run in window.runs]
    return sum(stop - start for start, stop in runs) // max(1, len(runs))


def rows_of(runs: Sequence[Interval]) -> npt.NDArray[np.int64]:
    """Return the rows of runs, shape (n,)."""
    return np.concatenate([np.arange(*run) for run in runs])
