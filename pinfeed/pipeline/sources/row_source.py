"""RowSource: batches of rows of stores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.sources.source import (
    ArrayPart,
    BatchThunks,
    HostBatch,
    OrderedSource,
    RowGroup,
)
from pinfeed.readahead.read_plan import RaggedReads
from pinfeed.readahead.strategy import AnyBatch, ReadStrategy, UnreadRows
from pinfeed.rows.order_batches import RowBatches, RowIndices
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Places
from pinfeed.stores.file_store import FileStore, rows_version
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.ragged import RaggedParts
from pinfeed.stores.store import Store
from pinfeed.stores.window_store import WindowStore
from pinfeed.tensors.pytree import Rebuild

# The constructor of a NamedTuple is a Python function; this makes one without it.
GROUP_DEFAULTS = tuple(RowGroup._field_defaults.values())
new_row_group: Callable[[tuple[Any, ...]], RowGroup] = functools.partial(tuple.__new__, RowGroup)


@dataclass(frozen=True)
class RowSource(OrderedSource):
    """Batches of the same rows of several stores; the last parts are those of ragged rows.

    Args:
        stores: Stores with equally many rows.
        strategies: Strategy to read the rows of each store.
        rebuild: Makes a batch, in the user's structure, from one tensor per store, and those of
            each ragged store.
        batches: Row indices of the batches.
        ragged: Strategy to read the rows of each ragged store.
    """

    stores: Sequence[Store]
    strategies: Sequence[ReadStrategy]
    rebuild: Rebuild
    batches: RowBatches
    ragged: Sequence[RaggedReads] = ()

    def rows_version(self) -> object:
        return rows_version(self._files())

    def epoch(self, number: int, start: int, checksum: int, batches_per_slot: int) -> BatchThunks:
        """Yield the batches of an epoch; each thunk computes its row indices."""
        windows, position, stop = self.batches.windows(number, start)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(strategy.open_epoch(windows, position, stop))
                for strategy in self.strategies
            ]
            serving_ragged = [
                stack.enter_context(reads.open_epoch(windows, position, stop))
                for reads in self.ragged
            ]
            # Most strategies serve all batches in the same way.
            makes = [serve.make for serve in serving if isinstance(serve, AnyBatch)]
            is_fixed = len(makes) == len(serving) and not serving_ragged
            for indices in self.batches.epoch(number, start, checksum, batches_per_slot):
                if is_fixed:
                    yield functools.partial(self._host_batch, indices, makes)
                    continue
                n = indices.n_positions
                n = indices.n_rows if n is None else n
                # Only the thunk keeps the parts, because they may hold memory that is read ahead.
                yield functools.partial(
                    self._host_batch,
                    indices,
                    [serve(position, n) for serve in serving],
                    [serve(position, n) for serve in serving_ragged],
                )
                position += n

    @property
    def may_open_ahead(self) -> bool:
        return all(strategy.may_open_ahead for strategy in self.strategies) and all(
            reads.may_open_ahead for reads in self.ragged
        )

    @property
    def may_be_in_memory(self) -> bool:
        """Whether ``memory_rows`` may find the rows, now or when files have been loaded."""
        found = [strategy.memory_rows_when_loaded() for strategy in self.strategies]
        return not self.ragged and None not in found

    def memory_rows(self) -> list[MemoryRows] | None:
        """Return where the rows of each store are, if all can be copied natively from now on."""
        found = [strategy.memory_rows() for strategy in self.strategies]
        rows = [one for one in found if one is not None]
        return rows if len(rows) == len(found) and not self.ragged else None

    def _files(self) -> list[FileStore]:
        found = (*self.stores, *(part for reads in self.ragged for part in reads.store.parts))
        items = [store.items if isinstance(store, WindowStore) else store for store in found]
        return [store for store in items if isinstance(store, FileStore)]

    def _host_batch(
        self,
        indices: RowIndices,
        parts: Sequence[Callable[[Rows], UnreadRows]],
        ragged: Sequence[Callable[[Rows, Places | None], RaggedParts]] = (),
    ) -> HostBatch:
        rows = indices.rows()
        host_parts: list[UnreadPart] = []
        for make in parts:
            # A comprehension would be another call in Python, for each batch.
            host_parts.append(make(rows))  # noqa: PERF401
        for make_ragged in ragged:
            items, bounds = make_ragged(rows, indices.places)
            host_parts += [*items, ArrayPart(bounds)]
        groups = [new_row_group((rows, 0, self.stores, *GROUP_DEFAULTS))]
        return HostBatch(host_parts, self.rebuild, indices.batches, groups)
