"""RowSource: batches of rows of stores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, RowGroup
from pinfeed.readahead import HostRows, ReadStrategy
from pinfeed.rows.batches import RowBatches, RowIndices
from pinfeed.rows.epoch_hooks import EpochHooks
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Store, row_nbytes
from pinfeed.tensors.pytree import Rebuild


@dataclass(frozen=True)
class RowSource:
    """Batches of the same rows of several stores.

    Args:
        stores: Stores with equally many rows.
        strategies: For each store, how its rows are read.
        rebuild: Makes a batch, in the structure that the user knows, from one tensor per store.
        batches: Row indices of the batches.
    """

    stores: Sequence[Store]
    strategies: Sequence[ReadStrategy]
    rebuild: Rebuild
    batches: RowBatches

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.batches.fingerprint

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches of an epoch; the row indices are computed when a thunk is called."""
        windows, position, stop = self.batches.windows(number, start)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(strategy.open_epoch(windows, position, stop))
                for strategy in self.strategies
            ]
            for indices in self.batches.epoch(number, start, checksum, batches_per_slot):
                # Only the thunk keeps the parts: they may hold memory that is read ahead.
                yield functools.partial(
                    self._host_batch,
                    indices,
                    [serve(position, indices.n_rows) for serve in serving],
                )
                position += indices.n_rows

    def hint(self, source_share: float) -> str:
        largest = max(range(len(self.stores)), key=lambda i: row_nbytes(self.stores[i]))
        return self.strategies[largest].hint

    def transfer_hint(self) -> str:
        """Return nothing, because every byte of the batches has to be moved."""
        return ""

    def _host_batch(
        self, indices: RowIndices, parts: Sequence[Callable[[Rows], HostRows]]
    ) -> HostBatch:
        rows = indices.rows()
        return HostBatch(
            [part(rows) for part in parts],
            self.rebuild,
            indices.batches,
            [RowGroup(rows, 0, self.stores)],
        )
