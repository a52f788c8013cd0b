"""ReadStrategy: a way to read the rows of one store; those that keep no rows in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pinfeed.errors import ClosedError
from pinfeed.memory.plan import Allocation
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.readahead.source_reads import Reads
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.rows.windows import Windows
from pinfeed.stores.chunked import ChunkedStore
from pinfeed.stores.host_rows import (
    CheckStop,
    Gatherable,
    RunGather,
    StoreRows,
    UnreadPart,
    memory_rows_of,
    never,
    run_gather,
    runs_of,
    unchecked_gather,
)
from pinfeed.stores.matrix import MatrixStore
from pinfeed.stores.store import Array
from pinfeed.stores.window_store import WindowStore
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


class ReadStrategy:
    """Method of reading the rows of one store.

    It belongs to one feeder. Threads that it starts live as long as an epoch.

    Args:
        store: The rows.
    """

    items: tuple[Allocation, ...] = ()
    """Most memory that the strategy uses."""

    def __init__(self, store: Gatherable) -> None:
        self._store = store

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        """Return the strategy for a file, with the reason; None if it cannot, or is not worth it.

        The strategies before this one in ``STRATEGIES`` were not chosen.
        """
        raise NotImplementedError

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

    def run_gather(self) -> RunGather:
        """Return a function that gathers runs of rows during an epoch.

        Batches whose rows are in buffers have such a function of their own.
        """
        return run_gather(self._store)

    @property
    def may_open_ahead(self) -> bool:
        """Whether the next epoch may be opened before it is certain that the loop reads it."""
        return True

    def close(self) -> None:
        """Free the memory of the strategy."""


Choice = tuple[ReadStrategy, str]
"""A strategy, and the reason for it as the plan shows it."""


class DirectReads(ReadStrategy):
    """Strategy that gathers rows from the store itself.

    Args:
        store: The rows.
    """

    @classmethod
    def plan(cls, reads: Reads) -> Choice:
        strategy = cls(reads.file)
        if isinstance(reads.file, MatrixStore):
            advice = "; more memory allows a copy of the matrix" * (not reads.in_sequence)
            return strategy, f"gathered column by column{advice}"
        if reads.in_sequence:
            return strategy, f"read in sequence{reads.page_cache_problem}"
        advice = reads.buffer_advice or "a block_shuffled order allows long contiguous reads"
        reason = f"read row by row, with many reads at a time{reads.page_cache_problem}"
        return strategy, f"{reason}; {advice}"

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        store = self._store
        # Rows of batches are in range, and are gathered into arrays that fit.
        yield AnyBatch(functools.partial(StoreRows, store, gather=unchecked_gather(store)))

    def memory_rows(self) -> MemoryRows | None:
        return memory_rows_of(self._store)


# Rows are gathered in steps, because a loop that ends waits for the current step.
_STEP_BYTES = 16 << 20
# Chunks per block in the recommended block-shuffled order. A block may begin within a chunk, so it
# decodes up to one more chunk. A window of 16 blocks should not be too large.
_BLOCK_CHUNKS = 4


class ChunkReads(ReadStrategy):
    """Strategy that gathers the rows of a batch from the store itself, chunk by chunk.

    Args:
        store: The rows.
        in_sequence: Whether consecutive batches have consecutive rows. If so, the next chunk is
            decoded while the last rows of a chunk are gathered.
    """

    _store: ChunkedStore

    def __init__(self, store: ChunkedStore, *, in_sequence: bool = False) -> None:
        super().__init__(store)
        self._decodes_ahead = in_sequence and store.n_kept > 1

    @classmethod
    def plan(cls, reads: Reads) -> Choice | None:
        store = reads.file
        if not isinstance(store, ChunkedStore):
            return None
        strategy = cls(store, in_sequence=reads.in_sequence)
        if reads.in_sequence:
            return strategy, "decoded in sequence, each chunk once"
        n_rows = reads.views[0].n_rows if reads.views else store.n_rows
        block_rows = max(1, _BLOCK_CHUNKS * store.chunk_rows * n_rows // store.n_rows)
        fewer = (
            "rows=pinfeed.rows.chunk_shuffled(store), or a block_shuffled order with "
            f"block_rows={block_rows}, decodes fewer"
        )
        reason = f"each batch decodes the whole chunks of its rows, up to {store.piece_rows:,} each"
        return strategy, f"{reason}; {reads.buffer_advice or fewer}"

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        if not self._decodes_ahead:
            yield AnyBatch(functools.partial(ChunkRows, self._store))
            return
        with ThreadPool(1, "pinfeed-decode") as thread:
            # The first row that no batch has requested yet, and the next chunk to decode ahead. Two
            # readers may decode the same chunk ahead, which does no harm.
            reached = 0
            following = 0

            def decode_ahead(runs: Runs) -> None:
                nonlocal following, reached
                end = int((runs.starts + runs.lengths).max())
                reached = max(reached, end)
                number = self._next_chunk(end - 1, runs.n_rows)
                if number is not None and number >= following:
                    following = number + 1
                    # The last batches may be read after the epoch has ended.
                    with contextlib.suppress(ClosedError):
                        thread.submit(decode, number)

            def decode(number: int) -> None:
                # Faster batches have already decoded the chunk. If decoding fails, the batch that
                # needs the chunk tries again, and raises the error in its turn.
                if reached <= self._store.bounds[number]:
                    with contextlib.suppress(Exception):
                        self._store.decode_ahead(number)

            try:
                yield AnyBatch(functools.partial(ChunkRows, self._store, decode_ahead=decode_ahead))
            finally:
                thread.shutdown(cancel_futures=True)

    def _next_chunk(self, last: int, n_rows: int) -> int | None:
        """Return the chunk to decode ahead; None if the rows are far from it.

        Args:
            last: Last row of a batch.
            n_rows: Number of rows of the batch.
        """
        bounds = self._store.bounds
        number = int(np.searchsorted(bounds, last, side="right"))
        is_last = number == len(bounds) - 1
        # Readers that are one batch behind still need the previous chunk.
        if is_last or last < (bounds[number - 1] + bounds[number]) // 2:
            return None
        # Batches that are larger than a chunk decode it straight into the batch.
        return number if n_rows < bounds[number + 1] - bounds[number] else None


@dataclass(eq=False)
class ChunkRows:
    """Rows of a store in chunks that a batch needs, or windows of these rows.

    Args:
        store: The chunks.
        rows: Row indices, or windows, shape (n,); they may repeat.
        decode_ahead: Function that is called with the runs of rows before they are gathered.
        view: The windows; None if the rows are those of the store.
    """

    store: ChunkedStore
    rows: Rows
    decode_ahead: Callable[[Runs], object] | None = None
    view: WindowStore | None = None

    def __post_init__(self) -> None:
        self.shape = (len(self.rows), *(self.view or self.store).row_shape)
        self.dtype = self.store.dtype

    def cut(self, begin: int, end: int) -> ChunkRows:
        """Return rows [begin, end) of these."""
        return replace(self, rows=self.rows[begin:end])

    def windows(self, view: WindowStore) -> Callable[[Rows], ChunkRows]:
        """Return a function that makes the windows of a batch, given their indices."""
        return lambda rows: replace(self, rows=rows, view=view)

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the rows into ``out``; no chunk is divided between steps."""
        if self.view is None:
            runs = runs_of(self.rows)
        else:
            runs = self.view.item_runs(self.rows)
            out = self.view.as_items(out)
        if len(self.rows) and self.decode_ahead is not None:
            self.decode_ahead(runs)
        for step in self._steps(runs):
            check_stop()
            self.store.gather_runs(step, out)

    def _steps(self, runs: Runs) -> Iterator[Runs]:
        """Divide runs into steps with a limited size of their chunks."""
        store = self.store
        begins = store.bounds[: -1 : max(1, _STEP_BYTES // max(1, store.chunk_nbytes))]
        if len(begins) == 1:
            yield runs
            return
        for number, part in runs.by_part(np.append(begins[1:], store.n_rows)):
            yield part._replace(starts=part.starts + begins[number])
