"""ReadStrategy: a way to read the rows of one store; those that keep no rows in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ClosedError
from pinfeed.memory.plan import Allocation
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.host_rows import (
    CheckStop,
    Gatherable,
    StoreRows,
    UnreadPart,
    memory_rows_of,
    never,
    unchecked_gather,
)
from pinfeed.threads.pool import ThreadPool


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

    def memory_rows_when_loaded(self) -> MemoryRows | None:
        """Return where the rows are, now or when files have been loaded, as ``memory_rows``."""
        return self.memory_rows()

    def for_others(self) -> ReadStrategy | None:
        """Return a strategy for other windows of the same rows, which this one loads for both.

        It is None if this strategy keeps no rows that others could use.
        """
        return None

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


# Rows are gathered in steps, because a loop that ends waits for the current step.
_STEP_BYTES = 16 << 20


class ChunkReads(ReadStrategy):
    """Strategy that gathers the rows of a batch from the store itself, sorted by chunk.

    Args:
        store: The rows.
        in_sequence: Whether consecutive batches have consecutive rows. If so, the next chunk is
            decoded while the last rows of a chunk are gathered.
    """

    def __init__(self, store: ChunkedStore, *, in_sequence: bool = False) -> None:
        self._store = store
        self._decodes_ahead = in_sequence and store.n_kept > 1

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        if not self._decodes_ahead:
            yield self._opener(lambda rows: None)
            return
        with ThreadPool(1, "pinfeed-decode") as thread:
            # The first row that no batch has requested yet, and the next chunk to decode ahead. Two
            # readers may decode the same chunk ahead, which does no harm.
            reached = 0
            following = 0

            def decode_ahead(rows: Rows) -> None:
                nonlocal following, reached
                reached = max(reached, int(rows[-1]) + 1)
                number = self._next_chunk(rows)
                if number is not None and number >= following:
                    following = number + 1
                    # The last batches may be read after the epoch has ended.
                    with contextlib.suppress(ClosedError):
                        thread.submit(decode, number)

            def decode(number: int) -> None:
                # Faster batches have already decoded the chunk.
                if reached <= self._store.bounds[number]:
                    self._decode_ahead(number)

            try:
                yield self._opener(decode_ahead)
            finally:
                thread.shutdown(cancel_futures=True)

    def _opener(self, decode_ahead: Callable[[Rows], None]) -> OpenBatch:
        return AnyBatch(functools.partial(_ChunkRows, self._store, decode_ahead=decode_ahead))

    def _next_chunk(self, rows: Rows) -> int | None:
        """Return the chunk to decode ahead; None if the rows are far from it.

        Args:
            rows: Row indices of a batch, ascending.
        """
        bounds = self._store.bounds
        number = int(np.searchsorted(bounds, rows[-1], side="right"))
        is_last = number == len(bounds) - 1
        # Readers that are one batch behind still need the previous chunk.
        if is_last or rows[-1] < (bounds[number - 1] + bounds[number]) // 2:
            return None
        # Batches that are larger than a chunk decode it straight into the batch.
        return number if len(rows) < bounds[number + 1] - bounds[number] else None

    def _decode_ahead(self, number: int) -> None:
        # The batch that needs the chunk tries again, and raises the error in its turn.
        with contextlib.suppress(Exception):
            self._store.decode_ahead(number)


class _ChunkRows:
    """Rows of a store in chunks that a batch needs."""

    def __init__(
        self, store: ChunkedStore, rows: Rows, decode_ahead: Callable[[Rows], None]
    ) -> None:
        self._store = store
        self._rows = rows
        self._decode_ahead = decode_ahead
        self.shape = (len(rows), *store.row_shape)
        self.dtype = store.dtype

    def cut(self, begin: int, end: int) -> _ChunkRows:
        """Return rows [begin, end) of these."""
        return _ChunkRows(self._store, self._rows[begin:end], self._decode_ahead)

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Gather the rows into ``out``; no chunk is divided between steps."""
        order = np.argsort(self._rows, kind="stable")
        rows = self._rows[order]
        if len(rows):
            self._decode_ahead(rows)
        for begin, end in self._steps(rows):
            check_stop()
            self._store.gather_at(rows[begin:end], out, order[begin:end])

    def _steps(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """Divide ascending rows into steps with a limited size of their chunks."""
        bounds = self._store.bounds
        n_chunks = max(1, _STEP_BYTES // max(1, self._store.chunk_nbytes))
        begin = 0
        while begin < len(rows):
            chunk = int(np.searchsorted(bounds, rows[begin], side="right")) - 1
            last = bounds[min(chunk + n_chunks, len(bounds) - 1)]
            end = int(np.searchsorted(rows, last))
            yield begin, end
            begin = end
