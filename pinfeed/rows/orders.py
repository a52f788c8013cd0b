"""Row orders: the rows of an epoch and their sequence, computed at any position.

An order maps positions of an epoch to row indices. It depends only on its arguments, the number of
rows and the epoch. Because an order can compute any position, a large shuffle needs no memory, and
a resumed epoch continues where it stopped. An order gets the number of rows when a feeder binds it:
``Feeder(x, rows=block_shuffled(seed=1, block_rows=4096), ...)``.

Orders compose: ``Subset``, ``Bucketed``, ``Mixed`` and ``PerRank`` take other orders. Each class
says what a feeder must know besides the rows: the windows to read ahead, how often a row may occur,
and the memory that it keeps. ``known`` adds this to an order of the user, and checks its rows.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.permutation import draws, permutation
from pinfeed.rows.windows import Windows
from pinfeed.validation.arguments import check_seed, whole_number

Rows = npt.NDArray[np.int64]
"""Row indices, shape (n,)."""
Positions = npt.NDArray[np.int32]
"""Positions of rows in a batch."""
At = Callable[[Rows], Rows]
"""A function that returns the row indices at positions of one epoch."""
Arrays = tuple[npt.NDArray[Any], ...]


@runtime_checkable
class Order(Protocol):
    """The rows of an epoch and their sequence.

    Orders are frozen dataclasses: orders with equal arguments are equal, and ``repr`` shows them.
    An order that keeps arrays may have a property ``kept_arrays``, a tuple of them and of those of
    the orders in it. A feeder then counts them in its plan.

    Examples:
        >>> order = pinfeed.rows.shuffled(seed=1)
        >>> with pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order) as feeder:
        ...     n_batches = len(feeder)
        >>> order.bind(n_rows=1000, epoch=0)(np.arange(3))  # the first three row indices
        array([...])
    """

    def length(self, n_rows: int) -> int:
        """Return the number of rows in one epoch over ``n_rows`` rows."""

    def bind(self, n_rows: int, epoch: int) -> At:
        """Return the order of one epoch over ``n_rows`` rows."""


def sequential() -> Order:
    """Return the order 0, 1, 2, … of the rows, the same in every epoch.

    Examples:
        >>> pinfeed.rows.sequential().bind(n_rows=4, epoch=0)(np.arange(4))
        array([0, 1, 2, 3])
    """
    return Sequential()


def shuffled(seed: int = 0) -> Order:
    """Return a random order of all rows, a different one in every epoch.

    The order is the same for the same seed and epoch, on every machine and in every version.

    Args:
        seed: Seed of the shuffle; the order is a function of (seed, epoch). With the default, every
            run of a program repeats the same orders.

    Raises:
        ArgumentError: If ``seed`` is not a whole number.

    Examples:
        >>> order = pinfeed.rows.shuffled(seed=1)
        >>> feeder = pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order)
    """
    return Shuffled(check_seed(seed))


def drawn(n: int, seed: int = 0) -> Order:
    """Return an order of random rows with replacement; every position is drawn independently.

    An epoch has ``n`` rows, independent of the number of rows in the store. Rows may repeat. The
    order is the same for the same seed and epoch, on every machine and in every version.

    Args:
        n: Number of rows of an epoch.
        seed: Seed of the draws; a row is a function of (seed, epoch, position).

    Raises:
        ArgumentError: If ``n`` is not a whole number above 0, or ``seed`` is not a whole number.

    Examples:
        >>> order = pinfeed.rows.drawn(n=5000, seed=1)
        >>> feeder = pinfeed.Feeder(np.arange(1000), batch_size=100, rows=order)
        >>> len(feeder)
        50
    """
    return Drawn(whole_number(n, "n"), check_seed(seed))


class KnownOrder(ABC):
    """Base class of all orders of pinfeed: what a feeder knows of an order besides its rows.

    Its rows are in range, in new arrays of int64. By default, the properties follow from ``parts``.
    """

    def length(self, n_rows: int) -> int:
        """Return the number of rows in one epoch over ``n_rows`` rows; by default, all of them."""
        return n_rows

    @abstractmethod
    def bind(self, n_rows: int, epoch: int) -> At:
        """Return the order of one epoch over ``n_rows`` rows."""

    def windows(self, n_rows: int, epoch: int) -> Windows | None:
        """Return the windows of an epoch that are read ahead; None if an order has none."""
        return None

    @property
    def in_blocks(self) -> bool:
        """Whether an order visits contiguous blocks of rows, which only one rank should read."""
        return False

    @property
    def is_repeatable(self) -> bool:
        """Whether the order is a function of seed and epoch alone."""
        return False

    @property
    def parts(self) -> tuple[KnownOrder, ...]:
        """The orders of which this one is made; by default, those among its fields."""
        return tuple(value for value in vars(self).values() if isinstance(value, KnownOrder))

    @property
    def arrays(self) -> Arrays:
        """Arrays that this order keeps besides those of its parts; by default, its fields."""
        fields = vars(self).values()
        return tuple(value.values for value in fields if isinstance(value, KeptArray))

    @property
    def most_copies(self) -> int | None:
        """Most occurrences of a row in an epoch; None if unknown."""
        return 1

    @property
    def kept_arrays(self) -> Arrays:
        """Arrays that the order and its parts keep; an array may occur twice."""
        return (*self.arrays, *itertools.chain.from_iterable(p.kept_arrays for p in self.parts))

    @property
    def window_nbytes(self) -> int:
        """Bytes that the order and its parts need while they sort the rows of a window."""
        return sum(part.window_nbytes for part in self.parts)


class DerivedOrder(KnownOrder):
    """Base class of an order of the rows of one other order."""

    order: KnownOrder

    def length(self, n_rows: int) -> int:
        return self.order.length(n_rows)

    @property
    def most_copies(self) -> int | None:
        return self.order.most_copies


@dataclass(frozen=True)
class Sequential(KnownOrder):
    """Rows in the order of the store."""

    is_repeatable = True

    def bind(self, n_rows: int, epoch: int) -> At:
        return lambda positions: positions


@dataclass(frozen=True)
class Shuffled(KnownOrder):
    """A random permutation of all rows."""

    seed: int

    is_repeatable = True

    def bind(self, n_rows: int, epoch: int) -> At:
        return permutation(n_rows, f"{self.seed}/{epoch}")


@dataclass(frozen=True)
class Drawn(KnownOrder):
    """Independent random rows, with replacement."""

    n: int
    seed: int

    is_repeatable = True
    most_copies = None

    def length(self, n_rows: int) -> int:
        return self.n if n_rows else 0

    def bind(self, n_rows: int, epoch: int) -> At:
        return draws(n_rows, f"{self.seed}/{epoch}/drawn")


@dataclass(frozen=True)
class UserOrder(KnownOrder):
    """An order of the user, or any other object that decides the rows; its rows are checked."""

    order: Any
    name: str = field(compare=False)
    """Name of the argument, for error messages."""

    most_copies = None

    def __repr__(self) -> str:
        return repr(self.order)

    def length(self, n_rows: int) -> int:
        n: int = self.order.length(n_rows)
        return n

    def bind(self, n_rows: int, epoch: int) -> At:
        at = self.order.bind(n_rows, epoch)
        name = f"{self.name}={self.order!r}"
        # A copy is checked, because the owner of the order may change its array.
        return lambda positions: check_rows(at(positions), n_rows, name, copy=True)

    @property
    def in_blocks(self) -> bool:
        return getattr(self.order, "in_blocks", False)

    @property
    def arrays(self) -> Arrays:
        return getattr(self.order, "kept_arrays", ())

    @property
    def window_nbytes(self) -> int:
        return getattr(self.order, "window_nbytes", 0)


def known(rows: Any, name: str = "rows") -> KnownOrder:
    """Return rows with what a feeder knows of them.

    Args:
        rows: An order, or any other iterable of row indices or batches, of which nothing is known.
        name: Name of the argument, for error messages.
    """
    # A subclass of the user may have other rows.
    is_own = isinstance(rows, KnownOrder) and type(rows).__module__.startswith("pinfeed.rows.")
    return rows if is_own else UserOrder(rows, name)


def check_order(order: Any, name: str = "order") -> KnownOrder:
    """Return an order that a user gives, with what is known of it.

    Raises:
        ArgumentError: If it is not an order.
    """
    # A class has the methods of its instances.
    if not isinstance(order, Order) or isinstance(order, type):
        raise ArgumentError(
            f"{name}={order!r}: expected an order of pinfeed.rows, such as shuffled(seed=1)"
        )
    return known(order, name)


@dataclass(frozen=True)
class KeptArray:
    """An array that an order keeps. Saved states contain ``repr``, so it has a checksum."""

    n: int
    """Number of elements of its first axis."""
    digest: str
    values: npt.NDArray[Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> KeptArray:
        """Return a contiguous array with its checksum."""
        return cls(len(values), hashlib.blake2b(values.data, digest_size=16).hexdigest(), values)


def check_n_rows(n_rows: int, expected: int, text: str, advice: str) -> None:
    """Raise ArgumentError if an order is used for another number of rows than it is made for.

    Args:
        n_rows: Number of rows for which it is used.
        expected: Number of rows for which it is made.
        text: The order, and what in it has the expected number of rows.
        advice: Text that says which rows the order expects.
    """
    if n_rows != expected:
        raise ArgumentError(
            f"{text} {expected:,} rows, but is used for {n_rows:,} rows; expected {advice}"
        )


def by_window(window_of: At, bind_window: Callable[[int], tuple[int, At]], n_kept: int = 1) -> At:
    """Return a function of positions that computes one window of positions after the other.

    Args:
        window_of: Returns the number of the window of each position.
        bind_window: Returns the first position of a window, and the function from positions in the
            window to results.
        n_kept: Number of windows that are kept for later calls; consecutive batches need the same.
    """
    bind_window = functools.lru_cache(maxsize=n_kept)(bind_window)

    def at(positions: Rows) -> Rows:
        found = np.empty(len(positions), np.int64)
        for number, here in grouped(window_of(positions)):
            begin, in_window = bind_window(number)
            found[here] = in_window(positions[here] - begin)
        return found

    return at


def grouped(numbers: Rows) -> Iterator[tuple[int, Rows | slice]]:
    """Yield each distinct number once, with the places at which it is."""
    # Most batches need a single window.
    if len(numbers) and numbers.item(numbers.argmin()) == numbers.item(numbers.argmax()):
        yield numbers.item(0), slice(None)
        return
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)
