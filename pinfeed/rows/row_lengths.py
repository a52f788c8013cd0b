"""Lengths of rows: bounds that follow from them, and bucketed(), batches of similar lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, described
from pinfeed.rows.orders import (
    At,
    DerivedOrder,
    KeptArray,
    KnownOrder,
    Order,
    Rows,
    Shuffled,
    by_window,
    check_n_rows,
    check_order,
)
from pinfeed.rows.permutation import permutation
from pinfeed.rows.windows import Windows
from pinfeed.validation.arguments import check_seed, whole_number

# Up to this length, lengths are counted in a table, which is faster than sorting them.
_MOST_COUNTED = 1 << 20
# Places at which blocks may begin, relative to the length of a block, for their bound.
_N_CUTS = 16


class RowLengths:
    """Numbers of rows of each length; bounds of a batch follow from them.

    Args:
        lengths: Length of each row, shape (n_rows,), integers of 0 or more, at least one row.

    Attributes:
        longest: Length of the longest row.
        n_rows: Number of rows.
        mean: Mean length of a row.
        nbytes: Bytes of the table.
    """

    def __init__(self, lengths: npt.NDArray[Any]) -> None:
        self.longest = int(lengths.max())
        if self.longest < _MOST_COUNTED:
            counts = np.bincount(lengths)
            kinds = np.flatnonzero(counts)
            counts = counts[kinds]
        else:
            kinds, counts = np.unique(lengths, return_counts=True)
        self._kinds = kinds.astype(np.int64)
        self._counts = counts
        self.n_rows = int(counts.sum())
        self.mean = float(counts @ self._kinds) / self.n_rows
        self.nbytes = 4 * self._kinds.nbytes
        # Rows and elements of the longest rows together, by how many lengths these have.
        self._most_rows = np.cumsum(counts[::-1])
        self._most_elements = np.cumsum((counts * self._kinds)[::-1])

    def most_elements(self, n_rows: int) -> int:
        """Return the elements of the ``n_rows`` longest rows together."""
        n_whole = int(np.searchsorted(self._most_rows, n_rows, side="right"))
        rows = self._most_rows.item(n_whole - 1) if n_whole else 0
        elements = self._most_elements.item(n_whole - 1) if n_whole else 0
        if n_whole == len(self._kinds):
            return elements
        return elements + (n_rows - rows) * self._kinds.item(-1 - n_whole)

    def usual_elements(self, n_rows: int, *, padded: bool) -> int:
        """Return a number of elements that few batches of ``n_rows`` random rows exceed.

        Args:
            n_rows: Number of rows of a batch.
            padded: Whether each row counts as many elements as the longest one of the batch.
        """
        if padded:
            # About one batch in 64 has a row that is longer.
            n_longer = self.n_rows - np.cumsum(self._counts)
            kind = int((n_longer * 64 * n_rows <= self.n_rows).argmax())
            return n_rows * self._kinds.item(kind)
        variance = float(self._counts @ (self._kinds - self.mean) ** 2) / self.n_rows
        return math.ceil(n_rows * self.mean + 6 * math.sqrt(n_rows * variance))

    def most_rows(self, max_elements: int, *, padded: bool, repeats: bool) -> int:
        """Return the most rows that a batch of at most ``max_elements`` elements may have.

        Args:
            max_elements: Most elements of a batch, at least the length of each row.
            padded: Whether each row counts as many elements as the longest one of the batch.
            repeats: Whether a batch may contain a row several times.

        Returns:
            The number of rows, or at least the rows of an epoch if rows without elements may
            repeat.
        """
        shortest = self._kinds.item(0)
        if repeats:
            return max_elements // shortest if shortest else self.n_rows + max_elements
        if padded:
            ends = np.cumsum(self._counts)
            # The rows of each length and all shorter rows, until the batch is full.
            fitting = np.where(self._kinds > 0, max_elements // np.maximum(self._kinds, 1), ends)
            return int(np.minimum(ends, fitting).max())
        elements = np.cumsum(self._counts * self._kinds)
        n_whole = int(np.searchsorted(elements, max_elements, side="right"))
        n_rows = int(self._counts[:n_whole].sum())
        if n_whole < len(self._kinds):
            before = elements.item(n_whole - 1) if n_whole else 0
            n_rows += (max_elements - before) // self._kinds.item(n_whole)
        return n_rows


def checked_lengths(lengths: Any) -> Rows:
    """Return a read-only copy of lengths, shape (n_rows,), int64.

    Raises:
        ArgumentError: If they are not integers of 0 or more, or if the array is empty.
    """
    expected = "expected integers of 0 or more, shape (n_rows,), such as store.lengths"
    try:
        given = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"lengths: {described(error)}; {expected}") from None
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise ArgumentError(f"lengths: got shape {given.shape} of {given.dtype}; {expected}")
    checked: Rows = given.astype(np.int64)
    if checked.min() < 0:
        row = int(checked.argmin())
        raise ArgumentError(f"lengths: row {row} has {given[row]} elements; {expected}")
    checked.flags.writeable = False
    return checked


def longest_first(rows: Rows, lengths: Rows) -> Rows:
    """Return row indices in descending length; rows of equal length keep their order.

    Args:
        rows: Row indices, shape (n,).
        lengths: Length of each row of the store, shape (n_rows,).
    """
    return rows[np.argsort(-lengths[rows], kind="stable")]


def most_in_blocks(offsets: Rows, n_blocks: int, block_rows: int) -> int:
    """Return a bound on the elements of some blocks of consecutive rows together.

    Args:
        offsets: First element of each row, followed by the number of elements.
        n_blocks: Number of blocks.
        block_rows: Most rows of a block. All rows, as a ring, are cut into blocks at any row.
    """
    n_rows = len(offsets) - 1
    block_rows = min(block_rows, n_rows)
    # Wherever the ring is cut, each block is within one of these longer blocks. After the last row,
    # blocks begin at other rows than before it, unless ``n_rows`` is divisible.
    step = max(1, block_rows // _N_CUTS)
    begins = block_rows * np.arange(-1, -(-n_rows // block_rows))
    most = 0
    for cut in range(0, block_rows, step):
        starts = np.concatenate([begins + cut, begins + (cut - n_rows) % block_rows])
        sums = _in_ring(offsets, starts + block_rows + step - 1) - _in_ring(offsets, starts)
        sums.sort()
        most = max(most, int(sums[-n_blocks:].sum()))
    return min(most, int(offsets[-1]))


def _in_ring(offsets: Rows, rows: Rows) -> Rows:
    """Return the first element of rows of a ring, which repeats all rows."""
    times, row = np.divmod(rows, len(offsets) - 1)
    first: Rows = offsets[row] + times * offsets[-1]
    return first


# Measured bytes of a row while a window is sorted, rounded up.
_ROW_NBYTES = 56


def bucketed(
    lengths: npt.ArrayLike,
    *,
    batch_size: int,
    window_batches: int = 50,
    order: Order | None = None,
    seed: int = 0,
) -> Bucketed:
    """Return an order whose batches have rows of similar lengths, so that they need less padding.

    Each window has the next ``batch_size * window_batches`` rows of ``order``. Its rows are sorted
    by length and cut into batches, and the batches are shuffled. The rows of a full batch are in
    descending length. A last batch that is not full has the last rows of ``order``, unsorted.

    Args:
        lengths: Number of elements of each row, shape (n_rows,), integers of 0 or more.
        batch_size: Rows of a batch. For several ranks, give the rows of one step of all ranks, so
            that ranks have batches of similar lengths.
        window_batches: Number of batches of a window. Larger windows need less padding, and mix
            rows of different lengths less.
        order: Order of the rows before they are sorted; None is ``shuffled(seed)``.
        seed: Seed of the shuffle of the batches; their order is a function of (seed, epoch).

    Raises:
        ArgumentError: If an argument is invalid.

    Examples:
        >>> lengths = np.array([7, 1, 8, 2, 9, 3])
        >>> order = pinfeed.rows.bucketed(lengths, batch_size=3, seed=1)
        >>> with pinfeed.Feeder(lengths, batch_size=3, rows=order) as feeder:
        ...     sorted(batch.tolist() for batch in feeder)
        [[3, 2, 1], [9, 8, 7]]
    """
    seed = check_seed(seed)
    return Bucketed(
        KeptArray.of(checked_lengths(lengths)),
        whole_number(batch_size, "batch_size"),
        whole_number(window_batches, "window_batches"),
        Shuffled(seed) if order is None else check_order(order),
        seed,
    )


class Padding(NamedTuple):
    """Share of padding among the elements of padded batches, from 0 to 1."""

    bucketed: float
    """Share with buckets."""
    unbucketed: float
    """Share with batches of the same rows without buckets."""


@dataclass(frozen=True)
class Bucketed(DerivedOrder):
    """Rows of another order, sorted by length within windows; see ``bucketed``.

    It keeps a copy of the lengths, 8 bytes per row, and computes one window at a time.
    """

    lengths: KeptArray
    batch_size: int
    window_batches: int
    order: KnownOrder
    seed: int

    @property
    def window_rows(self) -> int:
        """Number of rows of a window; the last one may have fewer."""
        return self.batch_size * self.window_batches

    def length(self, n_rows: int) -> int:
        text = "bucketed(...) has lengths of"
        check_n_rows(n_rows, self.lengths.n, text, "a length for each row of the source")
        return self.order.length(n_rows)

    def bind(self, n_rows: int, epoch: int) -> At:
        n = self.length(n_rows)
        base = self.order.bind(n_rows, epoch)
        size = self.window_rows

        def window(number: int) -> tuple[int, At]:
            begin = number * size
            rows = base(np.arange(begin, min(begin + size, n)))
            return begin, self._sorted(rows, f"{self.seed}/{epoch}/bucketed/{number}").__getitem__

        return by_window(lambda positions: positions // size, window)

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        found = self.order.windows(n_rows, epoch)
        n = self.length(n_rows)
        return None if found is None else found.widened(self.window_rows, n)

    @property
    def window_nbytes(self) -> int:
        n_rows = min(self.window_rows, self.lengths.n)
        return n_rows * _ROW_NBYTES + self.order.window_nbytes

    def padding(self, epoch: int = 0, *, most_rows: int = 1 << 20) -> Padding:
        """Return the share of padding of an epoch if each batch is padded to its longest row.

        Args:
            epoch: Number of the epoch.
            most_rows: Number of rows after which the count ends, rounded up to whole windows.

        Returns:
            The share of elements that are padding, with buckets and without.
        """
        n_rows = self.lengths.n
        window_rows = self.window_rows
        most_rows = whole_number(most_rows, "most_rows")
        stop = min(self.length(n_rows), -(-most_rows // window_rows) * window_rows)
        shares = []
        for order in (self, self.order):
            at = order.bind(n_rows, epoch)
            n_elements = n_padded = 0
            for begin in range(0, stop, window_rows):
                positions = np.arange(begin, min(begin + window_rows, stop))
                lengths = self.lengths.values[at(positions)]
                starts = np.arange(0, len(lengths), self.batch_size)
                longest = np.maximum.reduceat(lengths, starts)
                n_elements += int(lengths.sum())
                n_padded += int(longest @ np.diff(starts, append=len(lengths)))
            shares.append(1 - n_elements / n_padded if n_padded else 0.0)
        return Padding(*shares)

    def _sorted(self, rows: Rows, salt: str) -> Rows:
        """Sort the rows of a window by length, and shuffle its full batches."""
        n_batches = len(rows) // self.batch_size
        full = rows[: n_batches * self.batch_size]
        batches = longest_first(full, self.lengths.values).reshape(n_batches, self.batch_size)
        shuffled = batches[permutation(n_batches, salt)(np.arange(n_batches))]
        return np.concatenate((shuffled.ravel(), rows[len(full) :]))
