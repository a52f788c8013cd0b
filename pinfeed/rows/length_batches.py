"""LengthBatches: base class of batches that the lengths of ragged rows determine; RowLengths."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, described
from pinfeed.rows.orders import Arrays, KnownOrder, Order, Rows, Sequential
from pinfeed.rows.packing import Places
from pinfeed.rows.user_order import check_order
from pinfeed.rows.windows import WidenedWindows, Windows
from pinfeed.validation.arguments import whole_number

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


Unit = TypeVar("Unit")


class Mark(NamedTuple):
    """A window, and the first unit that begins in it. An epoch without windows is one window."""

    window: int
    """Number of the window."""
    skip: int
    """Part of the window that earlier units have: its elements if units cut rows, else its rows.

    If it is more than the window has, later windows have the rest.
    """
    unit: int
    """Number of the unit in its epoch."""


START = Mark(0, 0, 0)


class LengthBatches(ABC, Generic[Unit]):
    """Iterable over the batches of one epoch, as row indices.

    Like a sampler, it has an epoch, which a feeder sets. It has no ``len``, because the number of
    batches differs between the epochs of a shuffled order. A batch consists of units, which ranks
    share.

    Args:
        lengths: Number of elements of each row, shape (n_rows,).
        order: Order of the rows; None is the order of the store.

    Attributes:
        batch_size: Most rows that a batch can have.
        epoch: Epoch whose batches the next iteration yields.
        lengths: Number of elements of each row, shape (n_rows,), int64, read-only.
        order: Order of the rows.
        window: Number of consecutive rows of ``order`` that may change places; None without this.
        row_nbytes: Most bytes of a row of a window while its batches are planned, as measured.
        drop_last: Whether to leave out what is not full.
        name: Name of the function of ``pinfeed.rows`` that returns the batches.
        units_name: The user's word for units. In a state, it is the key of their position.
        n_units: Number of units of a batch.
        is_exact: Whether the rows must have exactly these lengths, not at most.
    """

    batch_size: int
    window: int | None
    row_nbytes: int
    drop_last: bool
    name: str
    units_name: str
    n_units: int = 1
    is_exact = False

    def __init__(self, lengths: Any, order: Order | None) -> None:
        self.lengths = checked_lengths(lengths)
        self.epoch = 0
        self.order: KnownOrder = Sequential() if order is None else check_order(order)

    def __repr__(self) -> str:
        return self._described(f"<{len(self.lengths)} lengths>")

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
    def window_nbytes(self) -> int:
        """Bytes that a window needs while its batches are planned."""
        return min(self.window or 0, len(self.lengths)) * self.row_nbytes

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the batches and their order keep."""
        return (self.lengths, *self.order.kept_arrays)

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
        """Check that the batches of rows of these lengths are as planned.

        Args:
            lengths: Number of elements of each row, shape (n_rows,).
            name: Name of the rows in errors.

        Raises:
            ArgumentError: If the number of rows differs, or a row is longer than its entry in
                ``self.lengths``; if ``is_exact``, also if it is shorter.
        """
        advice = f"give {self.name} the lengths of this store (store.lengths)"
        if len(lengths) != len(self.lengths):
            raise ArgumentError(
                f"rows={self!r} has {len(self.lengths):,} lengths, but {name} has "
                f"{len(lengths):,} rows; expected a length for each row; {advice}"
            )
        is_wrong = lengths != self.lengths if self.is_exact else lengths > self.lengths
        if is_wrong.any():
            row = int(is_wrong.argmax())
            expected = "equally many" if self.is_exact else "at least as many"
            raise ArgumentError(
                f"rows={self!r} has length {self.lengths[row]:,} for row {row}, but the row has "
                f"{lengths[row]:,} elements in {name}; expected {expected}; {advice}"
            )

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly if a unit has the same number and elements."""
        checksum = zlib.crc32(self.lengths.tobytes())
        return {"order": self._described(f"<crc32 {checksum}>"), "n_rows": len(self.lengths)}

    @abstractmethod
    def _described(self, lengths: str) -> str:
        """Return the call that makes the units, with ``lengths`` for the lengths."""

    def _rows(self, epoch: int, n: int, first: int) -> Iterator[Rows]:
        """Yield the row indices of an epoch from position ``first`` on, in runs of ``n``."""
        n_rows = len(self.lengths)
        at = self.order.bind(n_rows, epoch)
        stop = self.order.length(n_rows)
        for begin in range(first, stop, n):
            yield at(np.arange(begin, min(begin + n, stop)))

    @abstractmethod
    def units(self, epoch: int, mark: Mark, note: Callable[[Mark], None]) -> Iterator[Unit]:
        """Yield the units of an epoch from a mark on.

        Args:
            epoch: Number of the epoch.
            mark: A mark of this epoch.
            note: Called with later marks, each before its unit is yielded.
        """

    @abstractmethod
    def joined(self, units: list[Unit]) -> tuple[Rows, Places | None]:
        """Return the row indices of a batch of units, and their places if they are packed."""

    @abstractmethod
    def n_begun(self, unit: Unit) -> int:
        """Return the number of rows that begin in a unit."""

    def windows(
        self, epoch: int, start: int, mark: Mark = START
    ) -> tuple[Windows | None, int, int]:
        """Return the windows of an epoch, or None, and the positions from unit ``start`` on.

        Args:
            epoch: Number of the epoch.
            start: Number of the unit.
            mark: A mark of this epoch that is not later.
        """
        n_rows = len(self.lengths)
        found = self.order.windows(n_rows, epoch)
        if found is None:
            return None, 0, 0
        stop = self.order.length(n_rows)
        position = mark.skip
        if self.window is not None:
            # Rows leave their places, but not their window.
            found = WidenedWindows(found, self.window, stop)
            position = mark.window * self.window
        units = itertools.islice(self.units(epoch, mark, lambda mark: None), start - mark.unit)
        return found, position + sum(map(self.n_begun, units)), stop

    @abstractmethod
    def _batches(self, epoch: int) -> Iterator[Rows]:
        """Yield the row indices of each batch of an epoch."""
