"""Packed: batches of ragged rows that fill sequences of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.length_batches import LengthBatches, Mark, Note, checked_arguments
from pinfeed.rows.orders import Order, Rows
from pinfeed.rows.permutation import permutation
from pinfeed.rows.row_lengths import RowLengths
from pinfeed.rows.runs import Places
from pinfeed.validation.arguments import check_choice, whole_number

Split = Literal["never", "long", "always"]


def packed(
    lengths: npt.ArrayLike,
    max_elements: int,
    *,
    batch_size: int = 1,
    window: int = 1024,
    order: Order | None = None,
    split: Split = "never",
    seed: int = 0,
    drop_last: bool = False,
) -> Packed:
    """Return batches of sequences of ``max_elements`` elements, filled with rows, for ``rows=``.

    Each window has the next ``window`` rows of ``order``. Best fit decreasing packs them into
    sequences, which are shuffled within the window. With ``split="always"``, the rows follow each
    other without gaps instead, and sequences begin and end anywhere. Rows without elements are left
    out. With ``ranks=`` of the feeder, ranks share the sequences of an epoch. A state can be loaded
    on any number of ranks and with any ``batch_size``; it continues with the next sequence.

    Args:
        lengths: Number of elements of each row, shape (n_rows,), integers of 0 or more, such as
            ``store.lengths``. All ragged stores of the feeder must have these lengths.
        max_elements: Number of elements of a sequence.
        batch_size: Number of sequences of a batch.
        window: Number of rows that are packed together. Larger windows leave less padding.
        order: Order of the rows, from ``pinfeed.rows``; None is the order of the store.
        split: Rows that may be cut: ``"never"`` refuses rows of more than ``max_elements``
            elements, ``"long"`` cuts only these, into pieces of ``max_elements`` and a rest, and
            ``"always"`` cuts a row wherever a sequence ends.
        seed: Seed of the shuffle of the sequences of a window, which is a function of (seed,
            epoch). It has no effect with ``split="always"``.
        drop_last: Whether to leave out a last batch that has fewer sequences, or with
            ``split="always"`` a last sequence that is not full.

    Returns:
        An iterable of arrays of row indices, the rows of one batch each. Like a sampler, it has
        ``set_epoch(epoch)`` and ``epoch``, which a feeder sets. ``fill(epoch)`` returns the share
        of the elements of sequences that are not padding.

    Raises:
        ArgumentError: If an argument is invalid, or a row is too long for ``split="never"``.

    Examples:
        >>> store = pinfeed.RaggedStore(np.arange(10), np.array([0, 3, 5, 10]), layout="packed")
        >>> batches = pinfeed.rows.packed(store.lengths, max_elements=5, batch_size=2)
        >>> with pinfeed.Feeder(store, rows=batches) as feeder:
        ...     for batch in feeder:
        ...         print(sorted(batch.values.tolist()))
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    """
    check_choice(split, "split", get_args(Split))
    common = checked_arguments(lengths, max_elements, order, window, seed, drop_last)
    return Packed(*common, whole_number(batch_size, "batch_size"), split)


@dataclass(eq=False)
class Packed(LengthBatches["Pieces"]):
    """Iterable over the batches of one epoch, as row indices; see ``packed``.

    A feeder sets its epoch, as it does for a sampler. A window is planned when its first sequence
    is needed, in the thread that draws the batches, and only one window is in memory.

    Attributes:
        max_elements: Number of elements of a sequence.
        n_units: Number of sequences of a batch.
        drop_last: Whether to leave out a last batch or sequence that is not full.
    """

    split: Split

    name = "packed"
    units_name = "sequences"
    unit_name = "sequence"
    salt = "packed"
    is_exact = True
    row_nbytes = 184

    def __post_init__(self) -> None:
        if self.split == "never":
            self._require_fit("give split='long' to cut longer rows, or raise max_elements")
        if not self.lengths.any():
            raise ArgumentError("lengths: all rows have 0 elements; expected elements to pack")
        self.batch_size = self._most_pieces()

    @property
    def is_in_order(self) -> bool:
        return self.split == "always"

    def most_elements(self, *, padded: bool) -> int | None:
        return None if padded else self.n_units * self.max_elements

    def n_begun(self, unit: Pieces) -> int:
        return int(np.count_nonzero(unit.begins == 0))

    def fill(self, epoch: int = 0, *, most_rows: int = 1 << 20) -> float:
        """Return the share of the elements of sequences that are not padding.

        Args:
            epoch: Number of the epoch.
            most_rows: Number of rows after which the count ends, rounded up to whole windows.
        """
        assert self.window is not None
        most_windows = -(-whole_number(most_rows, "most_rows") // self.window)
        n = 0
        n_elements = 0
        marks: list[Mark] = []
        for pieces in self.units(epoch, note=marks.append):
            if len(marks) > most_windows:
                break
            n += 1
            n_elements += int(pieces.lengths.sum())
        return n_elements / (n * self.max_elements) if n else 0.0

    def rows_of(self, units: list[Pieces]) -> Rows:
        return Pieces.joined(units).rows

    def places_of(self, units: list[Pieces]) -> Places:
        _, begins, lengths = Pieces.joined(units)
        counts = [len(one.rows) for one in units]
        ends = np.cumsum(lengths)
        firsts = np.cumsum([0, *counts[:-1]])
        # Elements before each sequence, which has those of the batch except for the padding.
        before = np.repeat((ends - lengths)[firsts], counts)
        numbers = np.repeat(np.arange(len(units)), counts)
        places = ends - lengths - before + numbers * self.max_elements
        return Places(begins, lengths, places, (len(units), self.max_elements))

    def cut_window(self, rows: Rows, salt: str) -> Iterator[Pieces]:
        most = self.max_elements
        rows, lengths = self._with_elements(rows)
        if not len(rows):
            return
        # Every row begins a sequence here, so that only long rows are cut.
        room = -(-lengths // most) * most
        pieces, _ = cut_rows(rows, lengths, np.cumsum(room) - room, most)
        sequences = best_fit(pieces.lengths, most)
        sequences = permutation(int(sequences.max()) + 1, salt)(sequences)
        # The rows of a sequence keep their order.
        pieces = pieces.take(np.argsort(sequences, kind="stable"))
        ends = np.cumsum(np.bincount(sequences)).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            yield pieces.take(slice(begin, end))

    def _units_in_order(self, epoch: int, mark: Mark, note: Note) -> Iterator[Pieces]:
        most = self.max_elements
        n = mark.unit
        skip = mark.skip
        # The pieces of the open sequence, and their elements.
        pending: list[Pieces] = []
        filled = 0
        for number, rows in self._windows_from(epoch, mark.window):
            note(Mark(number, most - filled, n + 1) if filled else Mark(number, skip, n))
            rows, lengths = self._with_elements(rows)
            ends = np.cumsum(lengths)
            # Elements to skip have negative positions, so they are in sequences before number 0.
            pieces, numbers = cut_rows(rows, lengths, ends - lengths + filled - skip, most)
            kept = np.flatnonzero(numbers >= 0)
            pieces = pieces.take(kept)
            skip = max(0, skip - int(lengths.sum()))
            counts = np.bincount(numbers[kept])
            stops = np.cumsum(counts).tolist()
            for begin, end in zip([0, *stops], stops, strict=False):
                pending.append(pieces.take(slice(begin, end)))
                filled += int(pending[-1].lengths.sum())
                if filled == most:
                    yield Pieces.joined(pending)
                    n += 1
                    pending = []
                    filled = 0
        if pending and not self.drop_last:
            yield Pieces.joined(pending)

    def _with_elements(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the rows that have elements, and their lengths."""
        lengths = self.lengths[rows]
        has_some = lengths > 0
        return rows[has_some], lengths[has_some]

    def _most_pieces(self) -> int:
        """Return the most pieces that a batch can have."""
        most = self.max_elements
        kept = self.lengths[self.lengths > 0]
        if self.split == "long":
            rests = kept % most
            kept = np.append(rests[rests > 0], most)
        table = RowLengths(kept)
        fitting = table.most_rows(
            self.n_units * most, padded=False, repeats=self.order.most_copies != 1
        )
        # A batch of a run of elements has its first row, and one at the end of each sequence, in
        # addition to whole rows.
        cuts = self.n_units + 1 if self.is_in_order else self.n_units
        return fitting + cuts


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
