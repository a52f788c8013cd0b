"""The tables of running loops, and the search for loops over rows that a caller wants to use.

Two tables share rows if their rows are in the same memory or file, whatever their names are. A loop
prefetches rows, so it would not see what another loop writes to them.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pinfeed.stores import Store
from pinfeed.stores.overlap import share_rows

if TYPE_CHECKING:
    from pinfeed.training.embeddings.table import HostEmbedding
    from pinfeed.training.row_loop.loop_table import LoopTable

# There is no lock, because the garbage collector may end a loop and call unregister while this
# thread is inside any function of this module. Each change and each copy is atomic, in C.
_registered: set[weakref.ref[LoopTable]] = set()

# The loops of the parent process do not run in a forked process.
os.register_at_fork(after_in_child=_registered.clear)


def register(used: LoopTable) -> None:
    """Register a table that a running loop uses, until ``unregister``."""
    _registered.add(weakref.ref(used, _registered.discard))


def unregister(used: LoopTable) -> None:
    """Note that the loop has ended. A second call does nothing."""
    _registered.discard(weakref.ref(used))


def loops_over(
    table: HostEmbedding, stores: Sequence[Store], *, reads: bool = False, writes: bool = False
) -> list[LoopTable]:
    """Return the tables of running loops that exclude a use of ``table``.

    A loop over the same table excludes the use, unless both only read. A loop over another table
    excludes it if both have rows in common, and one of the two writes them.

    Args:
        table: The table.
        stores: Stores of the table to compare with those of other tables.
        reads: Whether the caller reads the rows without training them.
        writes: Whether the caller writes to the stores.
    """
    # Read once, because the loop of another thread may end now.
    training = table._training
    found = [] if training is None else [training]
    if not reads:
        found += table._readers
    every = [reference() for reference in _registered.copy()] if _registered else []
    for used in every:
        if used is None or used.table is table or not (writes or used.writes):
            continue
        if any(itertools.starmap(share_rows, itertools.product(stores, used.stores))):
            found.append(used)
    return found
