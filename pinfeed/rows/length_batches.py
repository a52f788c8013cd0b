"""LengthBatches: base class of batches that the lengths of ragged rows determine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Arrays, Order, Rows, Sequential, check_order, kept_arrays
from pinfeed.rows.row_lengths import checked_lengths
from pinfeed.rows.windows import Windows
from pinfeed.validation.arguments import whole_number


class LengthBatches(ABC):
    """Iterable over the batches of one epoch, as row indices.

    Like a sampler, it has an epoch, which a feeder sets. It has no ``len``, because the number of
    batches differs between the epochs of a shuffled order.

    Args:
        lengths: Number of elements of each row, shape (n_rows,).
        order: Order of the rows; None is the order of the store.

    Attributes:
        batch_size: Most rows that a batch can have.
        epoch: Epoch whose batches the next iteration yields.
        lengths: Number of elements of each row, shape (n_rows,), int64, read-only.
        order: Order of the rows.
    """

    batch_size: int

    def __init__(self, lengths: Any, order: Order | None) -> None:
        self.lengths = checked_lengths(lengths)
        self.epoch = 0
        self.order: Order = Sequential() if order is None else check_order(order)

    def __iter__(self) -> Iterator[Rows]:
        return self._batches(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches the next iteration yields."""
        self.epoch = whole_number(epoch, "epoch", least=0)

    def count(self, epoch: int | None = None) -> int:
        """Return the number of batches of an epoch; None selects the current epoch.

        The call goes through all rows of the epoch, a few million per second. The class has no
        ``len``, because the number differs between the epochs of a shuffled order.
        """
        return sum(1 for _ in self._batches(self.epoch if epoch is None else epoch))

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the batches and their order keep."""
        return (self.lengths, *kept_arrays(self.order))

    def require_rows(self, n_rows: int) -> None:
        """Check that the source has ``n_rows`` rows.

        Raises:
            ArgumentError: If this is not the number of lengths.
        """
        if len(self.lengths) != n_rows:
            raise ArgumentError(
                f"rows={self!r}: {len(self.lengths):,} lengths for {n_rows:,} rows; expected a "
                "length for each row of the source"
            )

    @abstractmethod
    def most_elements(self, *, padded: bool) -> int | None:
        """Return the bound on the elements of a batch, padded or not; None if there is none."""

    def require_bound(self, lengths: npt.NDArray[Any], name: str) -> None:
        """Check that the batches of rows of these lengths keep the bound.

        Args:
            lengths: Number of elements of each row, shape (n_rows,).
            name: Name of the rows in errors.

        Raises:
            ArgumentError: If the number of rows differs, or a row is longer than its entry in
                ``self.lengths``.
        """
        advice = f"give {repr(self).partition('(')[0]} the lengths of this store (store.lengths)"
        if len(lengths) != len(self.lengths):
            raise ArgumentError(
                f"rows={self!r} has {len(self.lengths):,} lengths, but {name} has "
                f"{len(lengths):,} rows; expected a length for each row; {advice}"
            )
        if len(longer := np.flatnonzero(lengths > self.lengths)):
            row = longer.item(0)
            raise ArgumentError(
                f"rows={self!r} has length {self.lengths[row]:,} for row {row}, but the row has "
                f"{lengths[row]:,} elements in {name}; expected at least as many; {advice}"
            )

    @abstractmethod
    def windows(self, epoch: int, start: int) -> tuple[Windows | None, int, int]:
        """Return the windows of an epoch, or None, and the range of positions from ``start`` on."""

    @abstractmethod
    def _batches(self, epoch: int) -> Iterator[Rows]:
        """Yield the row indices of each batch of an epoch."""
