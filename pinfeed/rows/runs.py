"""Runs of consecutive rows in an array, and Places of rows in packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows


class Runs(NamedTuple):
    """Runs of consecutive rows, each with its target position in an array.

    All three arrays have shape (n,), int64. The positions ascend, and the copies do not overlap.
    """

    starts: Rows
    """First row of each run."""
    lengths: Rows
    """Number of rows of each run, which may be 0."""
    places: Rows
    """Position of the first row of each run in the array."""

    @classmethod
    def one(cls, start: int, length: int, place: int = 0) -> Runs:
        """Return a single run."""
        return cls(*np.array([[start], [length], [place]]))

    @classmethod
    def of_rows(cls, rows: Rows, positions: Rows | None = None) -> Runs:
        """Return a run for each row; rows without positions are put one after the other."""
        places = np.arange(len(rows)) if positions is None else positions
        return cls(rows, np.ones_like(rows), places)

    @property
    def n_rows(self) -> int:
        """Number of rows of all runs."""
        return int(self.lengths.sum())

    def merged(self) -> Runs:
        """Join runs that are contiguous in both store and array, and drop runs without rows."""
        runs = self
        if not runs.lengths.all():
            runs = runs.take(np.flatnonzero(runs.lengths))
        if len(runs.lengths) < 2:
            return runs
        starts, lengths, places = runs
        is_first = starts[1:] != starts[:-1] + lengths[:-1]
        is_first |= places[1:] != places[:-1] + lengths[:-1]
        if is_first.all():
            return runs
        first = np.flatnonzero(np.concatenate(([True], is_first)))
        return Runs(starts[first], np.add.reduceat(lengths, first), places[first])

    def take(self, positions: Rows) -> Runs:
        """Return the runs at some positions, in ascending order."""
        return Runs(*(array[positions] for array in self))

    def pieces(self, n_rows: int) -> Iterator[Runs]:
        """Yield groups of at most ``n_rows`` rows; a longer run is a group of its own."""
        if self.n_rows <= n_rows:
            yield self
            return
        ends = np.cumsum(self.lengths)
        begin = 0
        before = 0
        while begin < len(ends):
            stop = max(begin + 1, int(np.searchsorted(ends, before + n_rows, side="right")))
            yield Runs(*(array[begin:stop] for array in self))
            begin = stop
            before = ends.item(stop - 1)

    def rows(self) -> Rows:
        """Return the row indices of all runs, shape (n_rows,)."""
        return _expanded(self.starts, self.lengths)

    def positions(self) -> Rows:
        """Return the position of each row in the array, shape (n_rows,)."""
        return _expanded(self.places, self.lengths)

    @property
    def target(self) -> slice | None:
        """The part of the array that the runs fill; None if they leave gaps."""
        if not len(self.places):
            return slice(0, 0)
        begin = self.places.item(0)
        end = self.places.item(-1) + self.lengths.item(-1)
        return slice(begin, end) if end - begin == self.n_rows else None

    def by_part(self, ends: Rows) -> Iterator[tuple[int, Runs]]:
        """Cut runs at the ends of parts, such as files, and yield the runs of each part.

        The rows of a part are counted from its first one.

        Args:
            ends: Row after the last one of each part, shape (n_parts,).
        """
        if len(self.lengths) == 1:
            start, length, place = (numbers.item(0) for numbers in self)
            for number, first, n in cut_run(start, start + length, ends):
                yield number, Runs.one(first, n, place)
                place += n
            return
        cut, parts = self._cut(ends)
        # numpy sorts integers of 8 and 16 bits by their digits, in a quarter of the time.
        order = np.argsort(parts.astype(np.min_scalar_type(len(ends))), kind="stable")
        starts, lengths, places = cut.take(order)
        counts = np.bincount(parts)
        numbers = np.flatnonzero(counts)
        begin = 0
        for number, n in zip(numbers.tolist(), counts[numbers].tolist(), strict=True):
            group = slice(begin, begin + n)
            yield number, Runs(starts[group], lengths[group], places[group])
            begin += n

    def _cut(self, ends: Rows) -> tuple[Runs, Rows]:
        """Cut runs at the ends of parts, and return the part of each run, too."""
        starts, lengths, places = self
        if _are_ones(lengths):
            parts = ends.searchsorted(starts, side="right")
            return Runs(starts - _begins(ends)[parts], lengths, places), parts
        runs = self.take(np.flatnonzero(lengths))
        stops = runs.starts + runs.lengths
        first = ends.searchsorted(runs.starts, side="right")
        last = ends.searchsorted(stops, side="left")
        counts = last - first + 1
        parts = _expanded(first, counts)
        begins = _begins(ends)[parts]
        starts = np.maximum(np.repeat(runs.starts, counts), begins)
        lengths = np.minimum(np.repeat(stops, counts), ends[parts]) - starts
        places = np.repeat(runs.places - runs.starts, counts) + starts
        return Runs(starts - begins, lengths, places), parts


class Places(NamedTuple):
    """Places of the rows of a batch in sequences of one length."""

    begins: Rows
    """First element of each row that is in the batch, shape (n,)."""
    lengths: Rows
    """Number of elements of each row that are in the batch, shape (n,)."""
    places: Rows
    """Position of each row in the sequences, one sequence after the other, shape (n,)."""
    shape: tuple[int, int]
    """Number of sequences, and elements of each."""

    def documents(self) -> npt.NDArray[np.int32]:
        """Return the document and the position of each element, then the bounds of all documents.

        Returns:
            The number of the row of each element, which is -1 for padding; the position of each
            element in its row or padding; and the first position of each row and each padding,
            followed by the number of all elements. All are joined, int32.
        """
        n_sequences, length = self.shape
        n = n_sequences * length
        documents = np.full(n, -1, np.int32)
        positions = Runs(self.places, self.lengths, self.places).rows()
        documents[positions] = np.repeat(np.arange(len(self.lengths)), self.lengths)
        # A bound is where a row begins, and where the padding of a sequence begins.
        is_bound = np.zeros(n + 1, bool)
        is_bound[self.places] = True
        is_bound[self.places + self.lengths] = True
        is_bound[:: max(1, length)] = True
        bounds = np.flatnonzero(is_bound)
        within = np.arange(n) - np.repeat(bounds[:-1], np.diff(bounds))
        return np.concatenate((documents, within, bounds), dtype=np.int32, casting="same_kind")


def cut_run(start: int, stop: int, ends: Rows) -> Iterator[tuple[int, int, int]]:
    """Cut the rows [start, stop) at the ends of parts, such as files.

    This takes less time than ``Runs.by_part``, which cuts many runs.

    Args:
        start: First row.
        stop: Row after the last one.
        ends: Row after the last one of each part, shape (n_parts,).

    Yields:
        The number of the part, the first row counted from that of the part, and the number of rows.
    """
    number = int(ends.searchsorted(start, side="right"))
    while start < stop:
        n = min(stop, ends.item(number)) - start
        if n:
            yield number, start - (ends.item(number - 1) if number else 0), n
        start += n
        number += 1


def _are_ones(lengths: Rows) -> bool:
    """Return whether each run has one row; the extremes take less time than a comparison."""
    if not len(lengths):
        return False
    return bool(lengths.item(lengths.argmin()) == lengths.item(lengths.argmax()) == 1)


def _begins(ends: Rows) -> Rows:
    """Return the first row of each part."""
    return np.concatenate(([0], ends[:-1]))


def _expanded(starts: Rows, lengths: Rows) -> Rows:
    """Return the row indices or positions of all runs, concatenated."""
    if _are_ones(lengths):
        return starts
    numbers = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers
