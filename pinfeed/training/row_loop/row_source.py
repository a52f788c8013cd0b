"""TableRowSource: a loader's batches, each with the table rows that it looks up; LoaderReplay."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pinfeed.devices.device import Tensor
from pinfeed.pipeline.row_cache import CachedRows, RowCache
from pinfeed.pipeline.sources.loader_source import END, LoaderSource
from pinfeed.pipeline.sources.row_fetch import ids_array
from pinfeed.pipeline.sources.source import (
    ArrayPart,
    BatchThunk,
    HostBatch,
    HostLeaf,
    RowGroup,
    host_batch_of,
)
from pinfeed.rows.indices import check_rows, distinct_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.host_rows import StoreRows
from pinfeed.tensors import rng_state
from pinfeed.tensors.numpy_torch import to_torch, version_of
from pinfeed.training.distributed.rank_loop import RankLoop
from pinfeed.training.distributed.row_exchange import (
    ExchangePlan,
    OwnRows,
    RankLink,
    RowPositions,
    ShardedBatchRows,
)
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.row_loop.loop_table import LoopTable


class TableBatch(NamedTuple):
    """A batch on the device, with the table rows that it looks up."""

    data: Any
    """The batch in the structure that the loader returned."""
    rows: list[Any]
    """For each table, the BatchRows that the batch looks up."""
    stored: list[list[Tensor]]
    """For each table, its rows on the device that are written back, one tensor for each store."""


class HostLookup(NamedTuple):
    """The ids that a batch looks up in a table, on the host."""

    rows: Rows
    """The ids, ascending, each once."""
    positions: list[tuple[int, Rows]]
    """For ids that are a part of the batch: index of the part, and positions of ids in ``rows``.

    The positions have the shape of the ids.
    """


class _HostRows(NamedTuple):
    """The rows of one table that a batch looks up, on the host."""

    lookup: HostLookup
    group: RowGroup
    link: RankLink | None
    """Exchange of the rows between ranks; None if the table is not sharded."""


class TableRowSource(LoaderSource):
    """The batches of a loader, with the table rows that they look up.

    If tables are sharded, a batch has two kinds of rows. The first are rows of this rank that any
    rank looks up in its batch of the same number. The second are rows of other ranks that this rank
    looks up.

    Args:
        loader: A loader, as for ``wrap_loader``.
        tables: The tables.
        ranks: Ranks that exchange the rows of sharded tables; None for other tables.

    Raises:
        ArgumentError: If the loader cannot be iterated.
    """

    has_distinct_rows = True

    def __init__(
        self, loader: Any, tables: Sequence[LoopTable], ranks: RankLoop | None = None
    ) -> None:
        super().__init__(loader)
        self._tables = tables
        self._ranks = ranks
        self.caches: Sequence[RowCache | None] = [None] * len(tables)
        """For each table, the cache of its rows on the device; None for a table without one."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]  # a constant there
        ranks = {} if self._ranks is None else {"ranks": [self._ranks.rank, self._ranks.size]}
        tables = [[table.name, table.n_rows] for table in self._tables]
        return {"order": "a DataLoader's own", "tables": tables, **ranks}

    @property
    def trained_stores(self) -> Sequence[Store]:
        if self._ranks is not None or not any(table.writes for table in self._tables):
            return ()
        return [store for table in self._tables for store in table.stores]

    def begin(self) -> None:
        super().begin()
        # A resumed loop may repeat the end of an epoch, with the same numbers on all ranks.
        self._number = 0

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        for cache in filter(None, self.caches):
            cache.begin()
        return super().epoch(number, start, checksum, batches_per_slot)

    def draw(self, batch: Any) -> BatchThunk:
        # The user's functions run here, one batch at a time. Any idle reader thread computes the
        # rest from their ids.
        return functools.partial(self._load, batch, self._ids(batch))

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        if self._ranks is not None:
            yield from self._draw_exchanged(batches, self._ranks)
        elif any(self.caches):
            yield from self._draw_cached(batches)
        else:
            yield from super()._draws(batches)

    def _draw_cached(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        # A cache decides about batches in their order, so one thread looks up their rows here.
        while (batch := self.next_batch(batches)) is not END:
            load, lookups = self._looked_up(batch, self._ids(batch))
            cached = [
                None if cache is None else cache.decide(lookup.rows)
                for cache, lookup in zip(self.caches, lookups, strict=True)
            ]
            yield functools.partial(self._host_batch, load, lookups, cached)

    def _draw_exchanged(
        self, batches: Iterator[Any], ranks: RankLoop
    ) -> Generator[BatchThunk, None, None]:
        exchange = ranks.exchange(self.caches)
        while True:
            number = self._number
            with exchange.report_bad_batch(number):
                batch = self.next_batch(batches)
                if batch is not END:
                    load, lookups = self._looked_up(batch, self._ids(batch))
            if batch is END:
                ranks.end_batches(number)
                return
            wanted = [lookup.rows for lookup in lookups]
            # A variable for the plans would keep their rows in memory until the next batch.
            yield functools.partial(
                self._host_batch, load, lookups, exchange.exchange(number, wanted), number
            )

    def _ids(self, batch: Any) -> list[Any]:
        """Return the ids that a batch looks up in each table."""
        return [table.ids_of(batch) for table in self._tables]

    def _looked_up(self, batch: Any, ids: Sequence[Any]) -> tuple[HostBatch, list[HostLookup]]:
        """Return the batch itself, and its lookup in each table."""
        load = host_batch_of(batch)
        pairs = zip(self._tables, ids, strict=True)
        return load, [
            look_up(load, of_table, table.name, table.n_rows) for table, of_table in pairs
        ]

    def _load(self, batch: Any, ids: Sequence[Any]) -> HostBatch:
        load, lookups = self._looked_up(batch, ids)
        return self._host_batch(load, lookups, [None] * len(lookups))

    def _host_batch(
        self,
        load: HostBatch,
        lookups: Sequence[HostLookup],
        chosen: Sequence[CachedRows | ExchangePlan | None],
        number: int = 0,
    ) -> HostBatch:
        """Return a batch with the parts of ``load``, followed by the parts of each table.

        Args:
            load: The loader's batch.
            lookups: For each table, the ids that the batch looks up.
            chosen: For each table, the rows in its cache, or the rows that ranks have exchanged;
                None without a cache.
            number: Number of the batch, for exchanges.
        """
        parts = list(load.parts)
        every = []
        groups = []
        for i, (table, lookup, one) in enumerate(zip(self._tables, lookups, chosen, strict=True)):
            parts.append(ArrayPart(lookup.rows, is_own=True))
            link = None
            rows = lookup.rows
            if isinstance(one, ExchangePlan):
                assert self._ranks is not None
                link = self._ranks.link(number, i, one.counts)
                parts += map(HostLeaf, (to_torch(one.values), *one.positions))
                rows = one.own
                one = one.cached
            if one is not None:
                rows = one.moves.gathered
                one.part = len(parts)
                parts += [ArrayPart(one.moves.positions), ArrayPart(rows)]
            group = RowGroup(
                rows,
                len(parts),
                table.stores,
                cached=one,
                ids_part=len(parts) - 1 if link is None or one is not None else None,
                is_frozen=not table.trainable,
            )
            parts += [StoreRows(store, rows) for store in table.stores]
            parts += [ArrayPart(positions, is_own=True) for _, positions in lookup.positions]
            every.append(_HostRows(lookup, group, link))
            groups.append(group)
        made = _BatchOnDevice(load, every)
        return HostBatch(
            parts,
            made.rebuild,
            load.batches,
            groups,
            n_data=len(load.parts),
            complete=made.complete,
        )


class _BatchOnDevice:
    """Makes a batch on the device, which a transform may change before its rows are lent.

    Args:
        load: The loader's batch on the host.
        every: The rows that it looks up in each table.
    """

    def __init__(self, load: HostBatch, every: Sequence[_HostRows]) -> None:
        self._rebuild = load.rebuild
        self._n_parts = len(load.parts)
        self._every = every
        # For each part that contains ids: the version of its tensor before the transform ran.
        self._versions: dict[int, int] = {}

    def rebuild(self, tensors: Iterator[Tensor]) -> Any:
        """Return the batch in the structure that the loader returned."""
        parts = list(tensors)
        for host_rows in self._every:
            for i, _ in host_rows.lookup.positions:
                self._versions[i] = version_of(parts[i])
        return self._rebuild(iter(parts))

    def complete(self, data: Any, parts: list[Tensor]) -> TableBatch:
        """Add the rows of each table to the batch, from the parts of ``_host_batch``."""
        tensors = iter(parts[self._n_parts :])
        batch = TableBatch(data, [], [])
        for lookup, group, link in self._every:
            ids = next(tensors)
            if link is not None:
                values = next(tensors)
                row_positions = RowPositions(*itertools.islice(tensors, len(RowPositions._fields)))
            if group.cached is not None:
                # Only the cache needs the positions and the other row indices.
                next(tensors)
                next(tensors)
            stored = list(itertools.islice(tensors, len(group.stores)))
            positions = [(parts[i], self._versions[i], next(tensors)) for i, _ in lookup.positions]
            batch.stored.append(stored)
            if link is None:
                batch.rows.append(BatchRows(lookup.rows, ids, stored[0], positions))
            else:
                own = OwnRows(group.batch_rows, stored[0])
                batch.rows.append(
                    ShardedBatchRows(lookup.rows, ids, values, positions, own, row_positions, link)
                )
        return batch


def look_up(load: HostBatch, ids: Any, name: str, n_rows: int) -> HostLookup:
    """Return the distinct ids that a batch looks up in a table.

    Args:
        load: The batch.
        ids: The ids, in a tensor or array, or in a structure of several.
        name: Name of the table in errors.
        n_rows: Number of rows of the table.

    Raises:
        RowIndexError: If an id is out of range, or not an integer.
    """
    leaves = _leaves(ids)
    arrays = [ids_array(leaf, name).reshape(-1).astype(np.int64, copy=False) for leaf in leaves]
    # Most batches have one array of ids. It needs no copy.
    rows, positions = distinct_rows(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    # The rows are sorted, so the first and the last one are enough.
    if len(rows) and not 0 <= rows.item(0) <= rows.item(-1) < n_rows:
        check_rows(rows[:: max(1, len(rows) - 1)], n_rows, f"{name}: ids of the batch")
    known = []
    begin = 0
    for leaf, array in zip(leaves, arrays, strict=True):
        found = positions[begin : begin + array.size]
        begin += array.size
        part = _part_index(leaf, load)
        if part is not None:
            known.append((part, found.reshape(leaf.shape)))
    return HostLookup(rows, known)


def _part_index(leaf: Any, load: HostBatch) -> int | None:
    """Return the index of the batch part that is this tensor of ids; None if no part is."""
    if not isinstance(leaf, torch.Tensor):
        return None
    for i, part in enumerate(load.parts):
        if getattr(part, "host_value", None) is leaf:
            return i
    return None


def _leaves(ids: Any) -> list[Any]:
    """Return the arrays in a nested structure of ids. A list of numbers is one array."""
    if isinstance(ids, Mapping):
        ids = list(ids.values())
    if isinstance(ids, (list, tuple)) and any(map(_is_array_or_nested, ids)):
        return [found for leaf in ids for found in _leaves(leaf)]
    return [ids]


def _is_array_or_nested(value: Any) -> bool:
    return hasattr(value, "ndim") or isinstance(value, (list, tuple, Mapping))


class LoaderReplay:
    """State of the loader's random generators at the beginning of its epoch.

    A resumed loop begins the epoch of the loader again with this state, and drops the batches that
    were done.

    Args:
        source: Source that iterates the loader.

    Attributes:
        set_epoch_number: Epoch of the last call of ``set_epoch``; None if there was none.
    """

    def __init__(self, source: TableRowSource) -> None:
        self.set_epoch_number: int | None = None
        self._source = source
        self._generators: dict[str, Any] = {}
        # A loaded state from the end of an epoch, when all its batches had been lent. The end of
        # the epoch is also replayed, because the loader may draw random numbers there.
        self._finished: Mapping[str, Any] | None = None

    def note_epoch(self, number: int) -> None:
        """Note a call of ``set_epoch``."""
        self.set_epoch_number = number
        if self._finished is not None and number != self._finished["epoch"] + 1:
            self._finished = None

    def state(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a loop at ``position``."""
        if self._finished is not None:
            return dict(self._finished)
        return {**position, "told": self.set_epoch_number, "random": self._generators}

    def load(self, state: Mapping[str, Any], *, is_finished: bool) -> None:
        """Take the generators from a state.

        Args:
            state: State of a loop.
            is_finished: Whether all batches of its epoch had been lent.
        """
        self._generators = dict(state["random"])
        self._finished = dict(state) if is_finished else None

    def begin(self, start: int) -> None:
        """Begin an epoch of the loader at batch ``start``."""
        if self._finished is not None:
            self._replay(self._finished["batch"], finish=True)
            self._finished = None
        if start:
            self._replay(start, finish=False)
        else:
            self._generators = self._captured()
            self._source.begin()

    def _captured(self) -> dict[str, Any]:
        """Return the present state of all generators from which the loader may draw."""
        own = [rng_state.state_of(one) for one in rng_state.own_generators(self._source.loader)]
        return {**rng_state.capture(), "loader": own}

    def _replay(self, n_done: int, *, finish: bool) -> None:
        """Begin the epoch in the same way again, and drop the batches that were done.

        Args:
            n_done: Number of batches that were done.
            finish: Whether to exhaust the loader, because the whole epoch was done.
        """
        generators = rng_state.own_generators(self._source.loader)
        for generator, state in zip(generators, self._generators["loader"], strict=True):
            rng_state.set_state(generator, state)
        with rng_state.replayed(self._generators):
            self._source.begin()
            self._source.skip(n_done)
            if finish:
                self._source.finish()
