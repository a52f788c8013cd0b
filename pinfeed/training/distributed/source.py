"""ShardedSource: a loader's batches, each with the rows of sharded tables that ranks look up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.devices.device import Tensor
from pinfeed.errors import ClosedError
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, RowGroup
from pinfeed.pipeline.sources.dataloader import END, HostLeaf
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.training.distributed.batch_rows import (
    RowPositions,
    ShardedDeviceBatch,
    ShardedDeviceRows,
)
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.process_groups import RankGroup
from pinfeed.training.distributed.row_exchange import (
    Counts,
    ExchangedTable,
    ExchangePlan,
    RowExchange,
)
from pinfeed.training.distributed.row_partition import RowPartition
from pinfeed.training.embeddings.lookup import DataOnDevice, HostLookup, position_parts
from pinfeed.training.embeddings.source import (
    Exchanged,
    TableRowSource,
    TableSpec,
    add_rows,
    take_rows,
)


@dataclass(frozen=True)
class ShardedTableSpec:
    """A sharded table in a loop."""

    table: TableSpec
    """The table. Its stores have this rank's rows."""
    trained: bool
    """Whether the loop changes the rows."""
    mean: bool
    """Whether gradients are averaged over ranks, instead of summed."""

    @property
    def description(self) -> str:
        """Text that must be the same on all ranks."""
        kinds = ", ".join(f"{one.dtype} {tuple(one.row_shape)}" for one in self.table.stores)
        return f"{self.table.name}: {self.table.n_rows} rows, {kinds}, mean={self.mean}"


@dataclass(frozen=True)
class _BatchTable:
    """A table and its rows in one batch."""

    spec: ShardedTableSpec
    lookup: HostLookup
    counts: Counts
    group: RowGroup


class ShardedSource(TableRowSource):
    """The batches of this rank's loader, with the rows of sharded tables.

    Each batch has two kinds of rows. The first are rows of this rank that any rank looks up in its
    batch of the same number. The second are rows of other ranks that this rank looks up.

    Args:
        loader: A loader, as for ``wrap_loader``.
        tables: The tables.
        group: The ranks.
        schedule: Prefetch schedule of the loop.
        verify: Whether the loop is verified.
    """

    # Rows are deferred for a number of batches, but changes are in the stores after a number of
    # writes. Every batch must therefore count as a write.
    writes_always = True

    def __init__(
        self,
        loader: Any,
        tables: Sequence[ShardedTableSpec],
        group: RankGroup,
        schedule: PrefetchSchedule,
        verify: bool,
    ) -> None:
        super().__init__(loader, [spec.table for spec in tables])
        self._specs = tables
        self._group = group
        self._first = 0
        # Without reader threads, the consumer thread also exchanges rows. Both kinds of steps then
        # use the same lockstep, to detect a rank that takes another step.
        self._lockstep = group.reader_lockstep if schedule.depth else group.loop_lockstep
        self._exchanged_tables = [
            ExchangedTable(
                RowPartition(spec.table.n_rows, group.size),
                spec.table.stores[0],
                schedule.max_unseen_writes * spec.trained,
                spec.trained,
            )
            for spec in tables
        ]
        # Bytes that were sent before this source was made.
        self._sent_before = group.loop_lockstep.sent + group.reader_lockstep.sent
        descriptions = [spec.description for spec in tables]
        self._description = "; ".join([*descriptions, f"depth={schedule.depth}, verify={verify}"])

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {**super().fingerprint, "ranks": [self._group.rank, self._group.size]}

    @property
    def exchanged(self) -> Exchanged:
        group = self._group
        sent = group.loop_lockstep.sent + group.reader_lockstep.sent - self._sent_before
        return Exchanged(
            ids=sent["ids"],
            rows=sent["rows"],
            late_rows=sent["late rows"],
            gradients=sent["gradients"],
            words=sent["words"] + sent["marks"],
        )

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        return self._group.loop_lockstep.report_failure()

    @contextlib.contextmanager
    def claim_ranks(self) -> Iterator[None]:
        group = self._group
        thread = threading.get_ident()
        if group.is_looping:
            raise ClosedError(
                "a loop over sharded tables of these ranks is running, and ranks exchange rows for "
                "one loop at a time; end it first"
            )
        group.is_looping = True
        try:
            yield
        finally:
            try:
                if threading.get_ident() == thread:
                    self._lockstep.leave(RankStep.LEFT, "it was left")
            finally:
                group.is_looping = False

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        lockstep = self._group.loop_lockstep
        thread = threading.get_ident()
        checksum = zlib.crc32(self._description.encode())
        lockstep.agree(RankStep.BEGIN, checksum, reason=self._description)
        lockstep.begin()
        self._lockstep.begin(len(self._tables))
        try:
            yield
            lockstep.agree(RankStep.END)
            lockstep.end()
        except BaseException as error:
            # If the garbage collector ends the loop in another thread, the other ranks notice it
            # only after their timeout.
            if threading.get_ident() == thread:
                is_break = isinstance(error, GeneratorExit)
                reason = "break, or an error in its training step" if is_break else repr(error)
                lockstep.leave(RankStep.LEFT, reason)
            raise

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        self._first = start
        return super().epoch(number, start, checksum, batches_per_slot)

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        exchange = RowExchange(self._lockstep, self._exchanged_tables, self.caches)
        for number in itertools.count(self._first):
            try:
                if (batch := self.next_batch(batches)) is END:
                    self._end(exchange, number)
                    return
                ids = [table.ids_of(batch) for table in self._tables]
                load, lookups = self._looked_up(batch, ids)
            except Exception as error:
                self._lockstep.leave(RankStep.BAD_BATCH, repr(error), number)
                # In a generator, Python raises a user's StopIteration as a RuntimeError.
                raise
            wanted = [lookup.rows for lookup in lookups]
            # A variable for the plans would keep their rows in memory until the next batch.
            yield functools.partial(
                self._sharded_batch, load, lookups, exchange.exchange(number, wanted), number
            )

    def _end(self, exchange: RowExchange, number: int) -> None:
        """Agree that the loaders of all ranks have ended before batch ``number``."""
        exchange.end(number)
        if self._lockstep is not self._group.loop_lockstep:
            self._lockstep.end()

    def _sharded_batch(
        self,
        load: HostBatch,
        lookups: Sequence[HostLookup],
        plans: Sequence[ExchangePlan],
        number: int,
    ) -> HostBatch:
        """Return a batch with the parts of ``load``, followed by the parts of each table."""
        parts = list(load.parts)
        tables = []
        for spec, lookup, plan in zip(self._specs, lookups, plans, strict=True):
            positions = [torch.from_numpy(getattr(plan, name)) for name in RowPositions._fields]
            parts += map(
                HostLeaf, (torch.from_numpy(lookup.rows), to_torch(plan.values), *positions)
            )
            group = add_rows(parts, plan.own, spec.table.stores, plan.cached)
            parts += position_parts(lookup)
            tables.append(_BatchTable(spec, lookup, plan.counts, group))
        groups = [table.group for table in tables]
        self._cache_hint.add(groups)
        data = DataOnDevice(load, lookups)
        complete = functools.partial(self._lent_batch, data, tables, number)
        return HostBatch(
            parts, data.rebuild, load.batches, groups, n_data=data.n_parts, complete=complete
        )

    def _lent_batch(
        self,
        on_device: DataOnDevice,
        tables: Sequence[_BatchTable],
        number: int,
        data: Any,
        parts: list[Tensor],
    ) -> ShardedDeviceBatch:
        """Add the rows of each table to the batch, from the parts of ``_sharded_batch``."""
        tensors = iter(parts[on_device.n_parts :])
        found = []
        for i, table in enumerate(tables):
            ids = next(tensors)
            values = next(tensors)
            row_positions = RowPositions(*(next(tensors) for _ in RowPositions._fields))
            own = take_rows(table.group, tensors)
            positions = on_device.positions(table.lookup, parts, tensors)
            found.append(
                ShardedDeviceRows(
                    rows=table.group.batch_rows,
                    ids=ids,
                    tensors=own,
                    positions=positions,
                    wanted=table.lookup.rows,
                    values=values,
                    row_positions=row_positions,
                    counts=table.counts,
                    mean=table.spec.mean,
                    numbers=(number, i),
                    lockstep=self._group.loop_lockstep,
                )
            )
        return ShardedDeviceBatch(data, found)
