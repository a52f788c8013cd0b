"""Packing: rows of different lengths as pieces of sequences of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs


class Pieces(NamedTuple):
    """Parts of rows. All arrays have shape (n,), int64."""

    rows: Rows
    """Row of each piece."""
    begins: Rows
    """First element of the piece in its row."""
    lengths: Rows
    """Number of elements, at least 1."""

    def take(self, which: Rows | slice) -> Pieces:
        """Return some of the pieces."""
        return Pieces(*(array[which] for array in self))

    @classmethod
    def joined(cls, parts: list[Pieces]) -> Pieces:
        """Return the pieces of all parts, one part after the other."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))


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


def cut_rows(rows: Rows, lengths: Rows, starts: Rows, most: int) -> tuple[Pieces, Rows]:
    """Cut rows that lie one after the other at the multiples of a length.

    Args:
        rows: Row indices, shape (n,).
        lengths: Number of elements of each row, at least 1, shape (n,).
        starts: Position of each row, ascending, shape (n,).
        most: Length of a sequence.

    Returns:
        The pieces, and the number of the sequence in which each of them is.
    """
    stops = starts + lengths
    first = starts // most
    counts = (stops - 1) // most - first + 1
    index = np.repeat(np.arange(len(rows)), counts)
    numbers = np.arange(len(index)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    begins = np.maximum(starts[index], numbers * most)
    ends = np.minimum(stops[index], (numbers + 1) * most)
    return Pieces(rows[index], begins - starts[index], ends - begins), numbers


def best_fit(lengths: Rows, most: int) -> Rows:
    """Assign pieces to as few sequences as best fit decreasing finds.

    The longest piece is first. Each piece is put in the sequence with the least room that is
    enough, or in a new one (Johnson, "Near-Optimal Bin Packing Algorithms", 1973).

    Args:
        lengths: Number of elements of each piece, at most ``most``, shape (n,).
        most: Length of a sequence.

    Returns:
        The sequence of each piece, numbered from 0 on, shape (n,).
    """
    order = np.argsort(-lengths, kind="stable")
    n_bits = len(lengths).bit_length()
    mask = (1 << n_bits) - 1
    # Open sequences in ascending order: the room is in the high bits, the number in the low ones.
    rooms: list[int] = []
    found: list[int] = []
    n = 0
    for length in lengths[order].tolist():
        i = bisect_left(rooms, length << n_bits)
        if i < len(rooms):
            room = rooms.pop(i) - (length << n_bits)
        else:
            room = (most - length) << n_bits | n
            n += 1
        found.append(room & mask)
        if room > mask:
            insort(rooms, room)
    sequences = np.empty(len(lengths), np.int64)
    sequences[order] = found
    return sequences
