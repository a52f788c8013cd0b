"""LengthBatches: batches that the lengths of ragged rows determine.

The rows of an order are cut into units: batches of limited elements (``ElementBatches``), or
sequences that are packed with rows (``Packed``). A batch has ``n_units`` of them. Units are cut
from windows of consecutive rows, and shuffled within their window, or from all rows in their order.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.orders import Arrays, KeptArray, KnownOrder, Order, Rows, Sequential, check_order
from pinfeed.rows.row_lengths import checked_lengths
from pinfeed.rows.runs import Places
from pinfeed.rows.windows import Windows
from pinfeed.validation.arguments import check_flag, check_seed, whole_number

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
Note = Callable[[Mark], object]
"""A function that is called with later marks, each before its unit is yielded."""


@dataclass(eq=False)
class LengthBatches(ABC, Generic[Unit]):
    """Iterable over the batches of one epoch, as row indices.

    Like a sampler, it has an epoch, which a feeder sets. It has no ``len``, because the number of
    batches differs between the epochs of a shuffled order. Ranks share the units of an epoch.

    Args:
        kept_lengths: Number of elements of each row.
        max_elements: Most elements of a unit.
        order: Order of the rows.
        window: Number of consecutive rows of ``order`` that may change places; None without this.
        seed: Seed of the shuffle of the units of a window.
        drop_last: Whether to leave out what is not full.
        n_units: Number of units of a batch. A state can be loaded with any number.

    Attributes:
        batch_size: Most rows that a batch can have.
        epoch: Epoch whose batches the next iteration yields.
        row_nbytes: Most bytes of a row of a window while its batches are planned, as measured.
        name: Name of the function of ``pinfeed.rows`` that returns the batches.
        units_name: The user's word for units. In a state, it is the key of their position.
        unit_name: The user's word for one unit.
        salt: Word that tells the shuffles of these units from other shuffles.
        is_exact: Whether the rows must have exactly these lengths, not at most.
    """

    kept_lengths: KeptArray
    max_elements: int
    order: KnownOrder
    window: int | None
    seed: int
    drop_last: bool
    n_units: int = field(repr=False)
    batch_size: int = field(init=False, repr=False)
    epoch: int = field(init=False, repr=False, default=0)

    row_nbytes: ClassVar[int]
    name: ClassVar[str]
    units_name: ClassVar[str]
    unit_name: ClassVar[str]
    salt: ClassVar[str]
    is_exact: ClassVar[bool] = False

    @property
    def lengths(self) -> Rows:
        """Number of elements of each row, shape (n_rows,), int64, read-only."""
        return self.kept_lengths.values

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

    def _batches(self, epoch: int) -> Iterator[Rows]:
        """Yield the row indices of each batch of an epoch."""
        units = self.units(epoch)
        while batch := list(itertools.islice(units, self.n_units)):
            # The last batch may have fewer units.
            if len(batch) == self.n_units or not self.drop_last:
                yield self.rows_of(batch)

    @property
    def window_nbytes(self) -> int:
        """Bytes that a window needs while its batches are planned."""
        return min(self.window or 0, len(self.lengths)) * self.row_nbytes

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the batches and their order keep."""
        return (self.lengths, *self.order.kept_arrays)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly if a unit has the same number and elements."""
        return {"order": repr(self), "n_rows": len(self.lengths)}

    def require_rows(self, n_rows: int, name: str = "the source") -> None:
        """Check that a source has as many rows as there are lengths.

        Args:
            n_rows: Number of rows of the source.
            name: Name of the source in errors.

        Raises:
            ArgumentError: If the numbers differ.
        """
        if len(self.lengths) != n_rows:
            raise ArgumentError(
                f"rows={self.name}(...) has {len(self.lengths):,} lengths, but {name} has "
                f"{n_rows:,} rows; expected a length for each row; {self._advice}"
            )

    def require_bound(self, lengths: npt.NDArray[Any], name: str) -> None:
        """Check that the batches of rows of these lengths are as planned.

        Args:
            lengths: Number of elements of each row, shape (n_rows,).
            name: Name of the rows in errors.

        Raises:
            ArgumentError: If the number of rows differs, or a row is longer than its entry in
                ``self.lengths``; if ``is_exact``, also if it is shorter.
        """
        self.require_rows(len(lengths), name)
        is_wrong = lengths != self.lengths if self.is_exact else lengths > self.lengths
        if is_wrong.any():
            row = int(is_wrong.argmax())
            expected = "equally many" if self.is_exact else "at least as many"
            raise ArgumentError(
                f"rows={self.name}(...) has length {self.lengths[row]:,} for row {row}, but the "
                f"row has {lengths[row]:,} elements in {name}; expected {expected}; {self._advice}"
            )

    @property
    def _advice(self) -> str:
        return f"give {self.name} the lengths of this store (store.lengths)"

    def _require_fit(self, advice: str) -> None:
        """Raise ArgumentError if the longest row has more elements than a unit."""
        row = int(self.lengths.argmax())
        if self.lengths[row] > self.max_elements:
            raise ArgumentError(
                f"row {row} has {self.lengths[row]:,} elements, but "
                f"max_elements={self.max_elements:,}; expected rows that fit in a "
                f"{self.unit_name}; {advice}"
            )

    @abstractmethod
    def most_elements(self, *, padded: bool) -> int | None:
        """Return the bound on the elements of a batch, padded or not; None if there is none."""

    def units(
        self, epoch: int, mark: Mark = START, note: Note = lambda mark: None
    ) -> Iterator[Unit]:
        """Yield the units of an epoch.

        Args:
            epoch: Number of the epoch.
            mark: A mark of this epoch, with whose unit to begin.
            note: Called with later marks.
        """
        cut = self._units_in_order if self.is_in_order else self._units_of_windows
        return cut(epoch, mark, note)

    @property
    @abstractmethod
    def is_in_order(self) -> bool:
        """Whether units follow the order of the rows, so that no window is cut on its own."""

    @abstractmethod
    def _units_in_order(self, epoch: int, mark: Mark, note: Note) -> Iterator[Unit]:
        """Yield the units of an epoch, like ``units``, in the order of the rows."""

    @abstractmethod
    def cut_window(self, rows: Rows, salt: str) -> Iterator[Unit]:
        """Cut the rows of a window into units, and yield them in a random order.

        Args:
            rows: Row indices of the window.
            salt: Text that the shuffle is a function of.
        """

    def _units_of_windows(self, epoch: int, mark: Mark, note: Note) -> Iterator[Unit]:
        """Yield the units of an epoch, like ``units``, if each window is cut on its own."""
        unit = mark.unit
        for number, rows in self._windows_from(epoch, mark.window):
            note(Mark(number, 0, unit))
            for one in self.cut_window(rows, f"{self.seed}/{epoch}/{self.salt}/{number}"):
                yield one
                unit += 1

    def _windows_from(self, epoch: int, first: int) -> Iterator[tuple[int, Rows]]:
        """Yield the number of each window, and its row indices."""
        assert self.window is not None
        return enumerate(self._rows(epoch, self.window, first * self.window), first)

    def _rows(self, epoch: int, n: int, first: int) -> Iterator[Rows]:
        """Yield the row indices of an epoch from position ``first`` on, in runs of ``n``."""
        n_rows = len(self.lengths)
        at = self.order.bind(n_rows, epoch)
        stop = self.order.length(n_rows)
        for begin in range(first, stop, n):
            yield at(np.arange(begin, min(begin + n, stop)))

    @abstractmethod
    def rows_of(self, units: list[Unit]) -> Rows:
        """Return the row indices of units, one unit after the other."""

    def places_of(self, units: list[Unit]) -> Places | None:
        """Return the places of the rows of units in their sequences; None for whole rows."""
        return None

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
        if self.window is not None:
            # Rows leave their places, but not their window.
            found = found.widened(self.window, stop)
        position = self.position_of(mark)
        for _, end in itertools.islice(self.placed_units(epoch, mark), start - mark.unit):
            position = end
        return found, position, stop

    def placed_units(
        self, epoch: int, mark: Mark, note: Note = lambda mark: None
    ) -> Iterator[tuple[Unit, int]]:
        """Yield the units of an epoch, like ``units``, each with the position after its rows."""
        position = self.position_of(mark)

        def noted(mark: Mark) -> None:
            nonlocal position
            # Rows of the last window may be in no unit.
            if self.window is not None and not mark.skip:
                position = self.position_of(mark)
            note(mark)

        for unit in self.units(epoch, mark, noted):
            position += self.n_begun(unit)
            yield unit, position

    def position_of(self, mark: Mark) -> int:
        """Return the position of the order with which the window or the unit of a mark begins."""
        return mark.skip if self.window is None else mark.window * self.window


def checked_arguments(
    lengths: npt.ArrayLike,
    max_elements: int,
    order: Order | None,
    window: int | None,
    seed: int,
    drop_last: bool,
) -> tuple[KeptArray, int, KnownOrder, int | None, int, bool]:
    """Check the arguments that both kinds of batches have, and return their first fields.

    Raises:
        ArgumentError: If an argument is invalid.
    """
    check_flag(drop_last, "drop_last")
    return (
        KeptArray.of(checked_lengths(lengths)),
        whole_number(max_elements, "max_elements"),
        Sequential() if order is None else check_order(order),
        None if window is None else whole_number(window, "window"),
        check_seed(seed),
        bool(drop_last),
    )
