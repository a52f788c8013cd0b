"""ReadStrategy: a way to read the rows of one store; DirectReads, the simplest one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from pinfeed.memory.plan import Allocation
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.host_rows import (
    Gatherable,
    StoreRows,
    UnreadPart,
    memory_rows_of,
    unchecked_gather,
)


class UnreadRows(UnreadPart, Protocol):
    """Rows of a store that are still to be gathered."""

    def cut(self, begin: int, end: int) -> UnreadRows:
        """Return rows [begin, end) of these."""
        ...


OpenBatch = Callable[[int, int], Callable[[Rows], UnreadRows]]
"""Takes the position of a batch in the epoch and its number of rows, by ascending position.

It returns a function that takes the row indices of the batch, possibly later and in another thread.
"""


class AnyBatch:
    """``OpenBatch`` of a strategy that serves all batches in the same way, wherever they are.

    Args:
        make: Returns the rows of a batch, given their indices.
    """

    def __init__(self, make: Callable[[Rows], UnreadRows]) -> None:
        self.make = make

    def __call__(self, position: int, n: int) -> Callable[[Rows], UnreadRows]:
        return self.make


class FreeMemory(NamedTuple):
    """Host memory that may be used for rows of files, in bytes."""

    memory: int
    """Memory of the process."""
    page_cache: int
    """Page cache, which belongs to the kernel, and which all processes of a machine share."""
    origin: str = "the free memory"
    """Name of the page cache's bound, for the plan."""

    def without(self, items: Iterable[Allocation]) -> FreeMemory:
        """Return the memory that remains after allocations."""
        memory, page_cache, origin = self
        for item in items:
            memory -= item.total * (item.place in ("host", "pinned"))
            page_cache -= item.total * (item.place != "device")
        return FreeMemory(memory, page_cache, origin)


class ReadStrategy:
    """Method of reading the rows of one store.

    It belongs to one feeder. Threads that it starts live as long as an epoch.
    """

    items: tuple[Allocation, ...] = ()
    """Most memory that the strategy uses."""

    def open_epoch(
        self, windows: Windows | None, start: int, stop: int
    ) -> AbstractContextManager[OpenBatch]:
        """Serve the positions [start, stop) of an epoch; background work ends with the context.

        Args:
            windows: Windows of a block-shuffled epoch; None for any other order.
            start: First position.
            stop: Position after the last one.
        """
        raise NotImplementedError

    def memory_rows(self) -> MemoryRows | None:
        """Return where the rows are, if all are in memory and can be copied natively."""
        return None

    def for_others(self) -> ReadStrategy | None:
        """Return a strategy for other windows of the same rows, which this one loads for both.

        It is None if this strategy keeps no rows that others could use.
        """
        return None

    @property
    def may_be_in_memory(self) -> bool:
        """Whether ``memory_rows`` may find the rows, now or when a file has been loaded."""
        return self.memory_rows() is not None

    @property
    def may_open_ahead(self) -> bool:
        """Whether the next epoch may be opened before it is certain that the loop reads it."""
        return True

    def close(self) -> None:
        """Free the memory of the strategy."""


class DirectReads(ReadStrategy):
    """Strategy that gathers rows from the store itself.

    Args:
        store: The rows.
    """

    def __init__(self, store: Gatherable) -> None:
        self._store = store

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        store = self._store
        # Rows of batches are in range, and are gathered into arrays that fit.
        yield AnyBatch(functools.partial(StoreRows, store, gather=unchecked_gather(store)))

    def memory_rows(self) -> MemoryRows | None:
        return memory_rows_of(self._store)
