"""Tables that running loops lend, and the search for tables that share rows.

Two tables share rows if their rows are in the same memory or file, whatever their names are. A loop
prefetches rows, so it would not see what another loop writes to them.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pinfeed.stores import Store
from pinfeed.stores.overlap import share_rows

if TYPE_CHECKING:
    from pinfeed.training.embeddings.table import HostEmbedding


class LentRows(Protocol):
    """Rows of a table, with its optimizer's state, that a loop lends."""

    table: HostEmbedding
    stores: list[Store]

    @property
    def writes(self) -> bool:
        """Whether the loop writes the rows."""
        ...


# There is no lock, because the garbage collector may end a loop and call forget_lent while this
# thread is inside any function of this module. Each change and each copy is atomic, in C.
_lent: set[weakref.ref[LentRows]] = set()

# The loops of the parent process do not run in a forked process.
os.register_at_fork(after_in_child=_lent.clear)


def note_lent(rows: LentRows) -> None:
    """Note that a loop lends rows, until ``forget_lent``."""
    _lent.add(weakref.ref(rows, _lent.discard))


def forget_lent(rows: LentRows) -> None:
    """Note that a loop has ended. A second call does nothing."""
    _lent.discard(weakref.ref(rows))


def lent_with(table: HostEmbedding, stores: Sequence[Store], *, write: bool) -> list[HostEmbedding]:
    """Return the other tables that loops lend and that have rows in ``stores``.

    Args:
        table: The caller's table, which is not in the result.
        stores: Stores of the caller's table.
        write: Whether the caller writes to the stores. If not, tables that loops only read are not
            in the result.
    """
    if not _lent:
        return []
    every = [reference() for reference in _lent.copy()]
    others = [lent for lent in every if lent is not None and lent.table is not table]
    return [
        lent.table
        for lent in others
        if (write or lent.writes)
        and any(itertools.starmap(share_rows, itertools.product(stores, lent.stores)))
    ]
