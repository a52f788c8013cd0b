"""ChunkReads: rows of a file in chunks are gathered chunk by chunk, each once for a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.memory.plan import Allocation
from pinfeed.readahead.base import OpenBatch
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows
from pinfeed.stores.chunked import ChunkedStore

# Rows are gathered in steps, because a loop that ends waits for the current step.
_STEP_BYTES = 16 << 20


class ChunkReads:
    """Strategy that gathers the rows of a batch from the store itself, sorted by chunk.

    Args:
        store: The rows.
        hint: Advice for a loop that waits for them.
    """

    items: tuple[Allocation, ...] = ()

    def __init__(self, store: ChunkedStore, hint: str) -> None:
        self._store = store
        self.hint = hint

    @contextlib.contextmanager
    def open_epoch(self, windows: Windows | None, start: int, stop: int) -> Iterator[OpenBatch]:
        def rows_of_batch(rows: Rows) -> _ChunkRows:
            return _ChunkRows(self._store, rows)

        def open_batch(position: int, n: int) -> Callable[[Rows], _ChunkRows]:
            return rows_of_batch

        yield open_batch

    def close(self) -> None:
        """Do nothing: the strategy has no memory of its own."""


class _ChunkRows:
    """Rows of a store in chunks that a batch needs."""

    def __init__(self, store: ChunkedStore, rows: Rows) -> None:
        self._store = store
        self._rows = rows
        self.shape = (len(rows), *store.row_shape)
        self.dtype = store.dtype

    def cut(self, begin: int, end: int) -> _ChunkRows:
        """Return rows [begin, end) of these."""
        return _ChunkRows(self._store, self._rows[begin:end])

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """Gather the rows into ``out``; no chunk is divided between steps."""
        order = np.argsort(self._rows, kind="stable")
        rows = self._rows[order]
        for begin, end in self._steps(rows):
            self._store.gather_at(rows[begin:end], out, order[begin:end])
            yield

    def _steps(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """Divide ascending rows into steps, whose chunks have a limited size."""
        bounds = self._store.bounds
        n_chunks = max(1, _STEP_BYTES // max(1, self._store.chunk_nbytes))
        begin = 0
        while begin < len(rows):
            chunk = int(np.searchsorted(bounds, rows[begin], side="right")) - 1
            last = bounds[min(chunk + n_chunks, len(bounds) - 1)]
            end = int(np.searchsorted(rows, last))
            yield begin, end
            begin = end
