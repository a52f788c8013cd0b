"""Tables that running loops lend, found by their rows: other tables may share these.

Two tables share rows if they are in the same memory or file, whatever their names are. A loop
prefetches rows, so it would not see what another loop writes to them.
"""

from __future__ import annotations

import itertools
import os
import threading
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


_lent: weakref.WeakSet[LentRows] = weakref.WeakSet()
_lock = threading.Lock()


def _forget_all() -> None:
    """Forget the loops of the parent process, which do not run in a forked one."""
    global _lent, _lock
    _lent = weakref.WeakSet()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


def note_lent(rows: LentRows) -> None:
    """Note that a loop lends rows, until ``forget_lent``."""
    with _lock:
        _lent.add(rows)


def forget_lent(rows: LentRows) -> None:
    """Note that a loop has ended. A second call does nothing."""
    with _lock:
        _lent.discard(rows)


def lent_with(table: HostEmbedding, stores: Sequence[Store], *, write: bool) -> list[HostEmbedding]:
    """Return the other tables that loops lend and whose rows are in ``stores``, too.

    Args:
        table: The table that is left out.
        stores: Its stores.
        write: Whether the caller writes to the stores. If not, tables that are only read are left
            out, too.
    """
    with _lock:
        others = [lent for lent in _lent if lent.table is not table]
    return [
        lent.table
        for lent in others
        if (write or lent.writes)
        and any(itertools.starmap(share_rows, itertools.product(stores, lent.stores)))
    ]
