"""TableRowSource: a loader's batches, each with the table rows that it looks up."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from pinfeed.devices.base import Tensor
from pinfeed.pipeline.cache_decisions import CachedRows
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, RowGroup
from pinfeed.pipeline.sources.dataloader import (
    END,
    HostLeaf,
    LoaderSource,
    load_of,
)
from pinfeed.pipeline.sources.ids import IdsOf
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.base import HostArray, StoreRows
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.cache_hint import CacheHint, gains_from_cache
from pinfeed.training.embeddings.lookup import (
    DataOnDevice,
    HostLookup,
    look_up,
    position_parts,
)

T = TypeVar("T")


@dataclass(frozen=True)
class TableSpec:
    """A table in a loop: its stores, and the function that finds the ids of a batch."""

    name: str
    ids_of: IdsOf
    """Function that takes a batch on the host and returns the ids that the training step looks up.

    The ids are a tensor or array of any shape, or several in a list, tuple or dict.
    """
    stores: Sequence[Store]
    """Store of the weights, then those of row-wise optimizer state."""
    n_rows: int
    """Number of rows of the whole table."""


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """The rows of a table that a batch looks up, on the device."""

    rows: Rows
    """Indices of the rows, distinct and ascending."""
    ids: Tensor
    """The ids that the batch looks up, on the device, distinct and ascending."""
    tensors: list[Tensor]
    """The rows of each store, on the device."""
    positions: list[tuple[Tensor, Tensor]]
    """Id tensors of the loader's batch, each with the positions of its ids among the rows."""

    def batch_rows(self, trainable: bool) -> BatchRows:
        """Return the rows in the form that the table looks up."""
        weight = nn.Parameter(self.tensors[0], requires_grad=trainable)
        return BatchRows(self.rows, self.ids, weight, self.positions)


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch on the device, with the table rows that it looks up."""

    data: Any
    """The batch in the structure that the loader returned."""
    tables: Sequence[DeviceRows]

    def batch_rows(self, trainable: Sequence[bool]) -> list[BatchRows]:
        """Return the rows of each table in the form that the table looks up."""
        pairs = zip(self.tables, trainable, strict=True)
        return [rows.batch_rows(trains) for rows, trains in pairs]

    def check(self, number: int) -> None:
        """Compare rows that other ranks sent with those in their stores.

        Args:
            number: Number of the batch, for the error.

        Raises:
            VerificationError: If they differ.
        """


class Exchanged(NamedTuple):
    """Bytes that this rank has sent to other ranks; all 0 for tables that are not sharded."""

    ids: int = 0
    """Ids that the batches look up: 8 bytes for each row that another rank owns."""
    rows: int = 0
    """Rows that were sent in the background."""
    late_rows: int = 0
    """Rows that were sent at the start of their step, because an earlier step could change them."""
    gradients: int = 0
    """Gradients of rows that other ranks own."""
    words: int = 0
    """Messages in which ranks agree on each exchange."""


class TableRowSource(LoaderSource):
    """The batches of a loader, with the table rows that they look up.

    Args:
        loader: A loader, as for ``wrap_loader``.
        tables: The tables.
        look_ahead: Number of later batches that caches know when they decide which rows of a batch
            to keep.

    Raises:
        ArgumentError: If the loader cannot be iterated.
    """

    writes_always = False
    """Whether a batch that changed nothing counts as a write."""

    def __init__(self, loader: Any, tables: Sequence[TableSpec], look_ahead: int = 0) -> None:
        super().__init__(loader)
        self._tables = tables
        self.caches: Sequence[RowCache | None] = [None] * len(tables)
        """For each table, the cache of its rows on the device; None for a table without one."""
        self._look_ahead = look_ahead
        self._cache_hint = CacheHint()

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]  # a constant there
        return {
            "order": "a DataLoader's own",
            "tables": [[table.name, table.n_rows] for table in self._tables],
        }

    @property
    def exchanged(self) -> Exchanged:
        """Bytes sent to other ranks since this source was made."""
        return Exchanged()

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks before a loop begins.

        The consumer thread calls this.
        """
        return contextlib.nullcontext()

    def claim_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reserves the ranks for a loop while its reader threads exist.

        The consumer thread calls this.
        """
        return contextlib.nullcontext()

    def in_lockstep(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all ranks run a loop. Its reader threads exist throughout.

        The consumer thread calls this.
        """
        return contextlib.nullcontext()

    def watch_reuse(self, *, is_unified: bool) -> None:
        """Start to record how often rows are looked up repeatedly, for ``transfer_hint``.

        Only tables without a cache are recorded.

        Args:
            is_unified: Whether the device of the loop is the CPU.
        """
        self._cache_hint = CacheHint(
            (table.name, table.stores)
            if cache is None and gains_from_cache(table.stores, is_unified=is_unified)
            else None
            for table, cache in zip(self._tables, self.caches, strict=True)
        )

    def begin(self) -> None:
        super().begin()
        self._cache_hint.begin_epoch()

    def hint(self, source_share: float) -> str:
        if source_share >= 0.5:
            return super().hint(source_share)
        names = ", ".join(table.name for table in self._tables)
        if cache := self.transfer_hint():
            return f"Gathering rows of {names} takes most of the time. {cache}"
        return (
            f"Gathering rows of {names} takes most of the time. A table in memory (store=None) is "
            "faster than a table in a file. A smaller dtype or fewer distinct ids per batch reduce "
            "the bytes to gather."
        )

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        for cache in filter(None, self.caches):
            cache.begin()
        return super().epoch(number, start, checksum, batches_per_slot)

    def transfer_hint(self) -> str:
        return self._cache_hint.text()

    def draw(self, batch: Any) -> BatchThunk:
        # The user's functions run here, one batch at a time. Any idle reader thread computes the
        # rest from their ids.
        ids = [table.ids_of(batch) for table in self._tables]
        return functools.partial(self._load, batch, ids)

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        if not any(self.caches):
            yield from super()._draws(batches)
            return
        # A cache decides about batches in their order, so one thread looks up their rows here.
        for load, lookups in _ahead(self._lookups(batches), self._look_ahead):
            cached = [
                None if cache is None else cache.decide(lookup.rows)
                for cache, lookup in zip(self.caches, lookups, strict=True)
            ]
            yield functools.partial(self._host_batch, load, lookups, cached)

    def _lookups(
        self, batches: Iterator[Any]
    ) -> Generator[tuple[HostBatch, list[HostLookup]], None, None]:
        """Announce the lookups of each batch to the caches, and yield the batch with them."""
        while (batch := self.next_batch(batches)) is not END:
            load, lookups = self._looked_up(batch, [table.ids_of(batch) for table in self._tables])
            for cache, lookup in zip(self.caches, lookups, strict=True):
                if cache is not None:
                    cache.decisions.announce(lookup.rows)
            yield load, lookups

    def _load(self, batch: Any, ids: Sequence[Any]) -> HostBatch:
        load, lookups = self._looked_up(batch, ids)
        return self._host_batch(load, lookups, [None] * len(lookups))

    def _host_batch(
        self,
        load: HostBatch,
        lookups: Sequence[HostLookup],
        every_cached: Sequence[CachedRows | None],
    ) -> HostBatch:
        """Return a batch with the parts of ``load``, followed by the parts of each table."""
        parts = list(load.parts)
        groups = []
        for table, lookup, cached in zip(self._tables, lookups, every_cached, strict=True):
            parts.append(HostLeaf(torch.from_numpy(lookup.rows)))
            groups.append(add_rows(parts, lookup.rows, table.stores, cached))
            parts += position_parts(lookup)
        self._cache_hint.add(groups)
        data = DataOnDevice(load, lookups)
        complete = functools.partial(self._device_batch, data, groups, lookups)
        return HostBatch(
            parts, data.rebuild, load.batches, groups, n_data=data.n_parts, complete=complete
        )

    def _looked_up(self, batch: Any, ids: Sequence[Any]) -> tuple[HostBatch, list[HostLookup]]:
        """Return the batch itself, and its lookup in each table."""
        load = load_of(batch)
        pairs = zip(self._tables, ids, strict=True)
        return load, [
            look_up(load, of_table, table.name, table.n_rows) for table, of_table in pairs
        ]

    @staticmethod
    def _device_batch(
        on_device: DataOnDevice,
        groups: Sequence[RowGroup],
        lookups: Sequence[HostLookup],
        data: Any,
        parts: list[Tensor],
    ) -> DeviceBatch:
        """Add the rows of each table to the batch, from the parts of ``_host_batch``."""
        tensors = iter(parts[on_device.n_parts :])
        tables = []
        for group, lookup in zip(groups, lookups, strict=True):
            ids = next(tensors)
            rows = take_rows(group, tensors)
            positions = on_device.positions(lookup, parts, tensors)
            tables.append(DeviceRows(lookup.rows, ids, rows, positions))
        return DeviceBatch(data, tables)


def _ahead(items: Iterator[T], n: int) -> Generator[T, None, None]:
    """Yield each item when the next ``n`` items are known.

    At the beginning, fewer items are known, to avoid a delay of the first item. The function draws
    two items for each item that it yields. An error is raised after the items before it.
    """
    waiting: deque[T] = deque()
    failure: Exception | None = None
    is_over = False
    while waiting or not is_over:
        for _ in range(min(2, n + 1 - len(waiting))):
            if is_over:
                break
            try:
                waiting.append(next(items))
            except StopIteration:
                is_over = True
            except Exception as error:
                failure = error
                is_over = True
        if waiting:
            yield waiting.popleft()
    if failure is not None:
        try:
            raise failure
        finally:
            # The error's traceback keeps this frame, which must not keep the error.
            del failure


def add_rows(
    parts: list[HostArray], rows: Rows, stores: Sequence[Store], cached: CachedRows | None
) -> RowGroup:
    """Add rows of a table to the parts of a batch, and return their group.

    Args:
        parts: The parts, to which this function appends.
        rows: Indices of the rows.
        stores: Stores of the rows.
        cached: The same rows in the cache of the table; None without a cache.
    """
    if cached is not None:
        rows = cached.gathered
        cached.part = len(parts)
        parts.append(HostLeaf(torch.from_numpy(cached.packed_positions)))
    group = RowGroup(rows, len(parts), stores, cached=cached)
    parts += [StoreRows(store, rows) for store in stores]
    return group


def take_rows(group: RowGroup, tensors: Iterator[Tensor]) -> list[Tensor]:
    """Take the tensors of the parts that ``add_rows`` added, and return the row tensors."""
    if group.cached is not None:
        # Only the cache needs the positions.
        next(tensors)
    return [next(tensors) for _ in group.stores]
