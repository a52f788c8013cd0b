"""Bucketed: an order whose batches have rows of similar lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
from pinfeed.rows.row_lengths import checked_lengths, longest_first
from pinfeed.rows.windows import Windows
from pinfeed.validation.arguments import check_seed, whole_number

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
