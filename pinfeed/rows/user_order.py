"""UserOrder: an order of the user, whose rows are checked; known: any order of a feeder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Arrays, At, KnownOrder, Order


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
    def kept_arrays(self) -> Arrays:
        arrays: Arrays = getattr(self.order, "kept_arrays", ())
        return arrays

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
