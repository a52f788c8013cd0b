"""ElementBatches: batches of ragged rows with a bound on elements."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinfeed.rows.length_batches import LengthBatches, Mark, Note, checked_arguments
from pinfeed.rows.orders import Order, Rows
from pinfeed.rows.permutation import permutation
from pinfeed.rows.row_lengths import RowLengths, longest_first
from pinfeed.validation.arguments import check_flag, whole_number

# The order computes this many rows at once.
_RUN_ROWS = 1 << 14


def element_batches(
    lengths: npt.ArrayLike,
    max_elements: int,
    *,
    batch_size: int | None = None,
    order: Order | None = None,
    padded: bool = False,
    window: int | None = None,
    seed: int = 0,
    drop_last: bool = False,
) -> ElementBatches:
    """Return batches of ragged rows with at most ``max_elements`` elements each, for ``rows=``.

    A batch ends before the row that would make it too large. The batches depend only on the
    arguments and the epoch, so a feeder resumes them from its state. With ``ranks=`` of the feeder,
    ranks share the batches of an epoch: in each step, every rank has the next one, by ascending
    rank. Any number of ranks can load the state, and continues with the next batch.

    Args:
        lengths: Number of elements of each row, shape (n_rows,), integers of 0 or more, such as
            ``store.lengths``. An element is one item of a ``RaggedStore``, of any shape. For
            several ragged stores, give the sum of their lengths, or the maximum.
        max_elements: Most elements of a batch, at least the length of the longest row.
        batch_size: Most rows of a batch; None sets no bound.
        order: Order of the rows, from ``pinfeed.rows``; None is the order of the store.
        padded: Count the elements of a padded batch: its number of rows times its longest row.
        window: Number of consecutive rows of ``order`` that are sorted by length before they are
            cut into batches. The batches of each window are shuffled, and none crosses its end.
            With ``padded=True``, this leaves less padding. None cuts the rows in their order.
        seed: Seed of the shuffle of the batches of a window, a function of (seed, epoch).
        drop_last: Whether to leave out the last batch of an epoch if another row of one element
            would fit in it; with ``window``, the last one of each window.

    Returns:
        An iterable of arrays of row indices. Like a sampler, it has ``set_epoch(epoch)`` and
        ``epoch``, which a feeder sets. ``count(epoch)`` returns the number of batches of an epoch,
        of all ranks together.

    Raises:
        ArgumentError: If an argument is invalid, or a row has more than ``max_elements`` elements.

    Examples:
        >>> store = pinfeed.RaggedStore(np.arange(10), np.array([0, 3, 5, 10]))
        >>> batches = pinfeed.rows.element_batches(store.lengths, max_elements=5)
        >>> with pinfeed.Feeder(store, rows=batches) as feeder:
        ...     [values.tolist() for values, offsets in feeder]
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    """
    check_flag(padded, "padded")
    most_rows = None if batch_size is None else whole_number(batch_size, "batch_size")
    common = checked_arguments(lengths, max_elements, order, window, seed, drop_last)
    return ElementBatches(*common, 1, most_rows, bool(padded))


@dataclass(eq=False)
class ElementBatches(LengthBatches[Rows]):
    """Iterable over the batches of one epoch, as row indices; see ``element_batches``.

    A feeder sets its epoch, as it does for a sampler.

    Attributes:
        max_elements: Most elements of a batch.
        padded: Whether each row of a batch counts as many elements as the longest one.
        drop_last: Whether to leave out a last batch in which another row would fit.
    """

    most_rows: int | None
    """Most rows of a batch that the user allows; None for any number."""
    padded: bool

    name = "element_batches"
    units_name = "batches"
    unit_name = "batch"
    salt = "elements"
    row_nbytes = 72

    def __post_init__(self) -> None:
        self._require_fit("raise max_elements, or cut the row")
        fitting = RowLengths(self.lengths).most_rows(
            self.max_elements, padded=self.padded, repeats=self.order.most_copies != 1
        )
        most = self.order.length(len(self.lengths))
        self.batch_size = max(1, min(most, fitting, self.most_rows or most))

    @property
    def is_in_order(self) -> bool:
        return self.window is None

    def most_elements(self, *, padded: bool) -> int | None:
        return self.max_elements if self.padded or not padded else None

    def n_begun(self, unit: Rows) -> int:
        return len(unit)

    def rows_of(self, units: list[Rows]) -> Rows:
        return units[0] if len(units) == 1 else np.concatenate(units)

    def _units_in_order(self, epoch: int, mark: Mark, note: Note) -> Iterator[Rows]:
        unit = mark.unit
        position = due = mark.skip
        for batch in self._cut(self._rows(epoch, _RUN_ROWS, position)):
            if position >= due:
                note(Mark(0, position, unit))
                due = position + _RUN_ROWS
            yield batch
            position += len(batch)
            unit += 1

    def cut_window(self, rows: Rows, salt: str) -> Iterator[Rows]:
        batches = list(self._cut([longest_first(rows, self.lengths)]))
        shuffle = permutation(len(batches), salt)
        for i in shuffle(np.arange(len(batches))).tolist():
            yield batches[i]

    def _cut(self, runs: Iterable[Rows]) -> Iterator[Rows]:
        """Cut rows, given in runs, into batches in their order."""
        cut = _Cut(self.max_elements, self.most_rows or sys.maxsize, self.padded)
        pending: list[Rows] = []
        for rows in runs:
            begin = 0
            for end in cut.ends(self.lengths[rows]):
                yield np.concatenate([*pending, rows[begin:end]])
                pending = []
                begin = end
            pending.append(rows[begin:])
        last = np.concatenate(pending) if pending else np.empty(0, np.int64)
        if len(last) and not (self.drop_last and cut.has_room):
            yield last


@dataclass
class _Cut:
    """Cuts a sequence of rows into batches, one after the other.

    Args:
        max_elements: Most elements of a batch.
        batch_size: Most rows of a batch.
        padded: Whether each row of a batch counts as many elements as the longest one.
    """

    max_elements: int
    batch_size: int
    padded: bool
    # The rows of the open batch, their elements, and the elements of the longest one.
    n_rows: int = 0
    n_elements: int = 0
    longest: int = 0

    def ends(self, lengths: Rows) -> list[int]:
        """Return the positions in ``lengths``, the next rows, at which a batch begins."""
        return self._ends_padded(lengths.tolist()) if self.padded else self._ends(lengths)

    def _ends(self, lengths: Rows) -> list[int]:
        totals = np.cumsum(lengths)
        ends: list[int] = []
        # Elements of the open batch minus those in ``totals`` before it, and its first position.
        before = self.n_elements
        begin = -self.n_rows
        while True:
            end = int(totals.searchsorted(self.max_elements - before, side="right"))
            end = min(end, begin + self.batch_size)
            if end >= len(lengths):
                break
            ends.append(end)
            before = -totals.item(end - 1) if end else 0
            begin = end
        self.n_rows = len(lengths) - begin
        self.n_elements = before + totals.item(-1)
        return ends

    def _ends_padded(self, lengths: list[int]) -> list[int]:
        # This loop runs once for each row. Local names and no calls make it several times as fast.
        most = self.max_elements
        most_rows = self.batch_size
        n_rows = self.n_rows
        longest = self.longest
        ends: list[int] = []
        for i, length in enumerate(lengths):
            n_rows += 1
            if length > longest:
                longest = length
            if n_rows * longest > most or n_rows > most_rows:
                ends.append(i)
                n_rows = 1
                longest = length
        self.n_rows = n_rows
        self.longest = longest
        return ends

    @property
    def has_room(self) -> bool:
        """Whether a row of one element would fit in the last batch."""
        n_rows = self.n_rows + 1
        n_elements = n_rows * max(1, self.longest) if self.padded else self.n_elements + 1
        return n_rows <= self.batch_size and n_elements <= self.max_elements
