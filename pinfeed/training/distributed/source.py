"""ShardedSource: a loader's batches, each with the rows of sharded tables that the ranks look up in it."""

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

from pinfeed.devices.base import Tensor
from pinfeed.errors import ClosedError
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, RowGroup
from pinfeed.pipeline.sources.dataloader import HostLeaf, is_end
from pinfeed.readahead.base import StoreRows
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.training.distributed.batch_rows import RowPlaces, ShardedBatch, SharedRows
from pinfeed.training.distributed.lockstep import Step
from pinfeed.training.distributed.process_groups import RankGroup
from pinfeed.training.distributed.row_exchange import ExchangePlan, RowExchange, ShardedRows
from pinfeed.training.distributed.row_partition import RowPartition
from pinfeed.training.embeddings.source import Exchanged, Lookup, RowsOfTables, TableRows, places_of


@dataclass(frozen=True)
class ShardedTable:
    """A sharded table in a loop."""

    rows: TableRows
    """Its stores have this rank's rows."""
    trained: bool
    """Whether the loop changes them."""
    mean: bool
    """Whether gradients are averaged over ranks, else summed."""


class ShardedSource(RowsOfTables):
    """The batches of this rank's loader, and of its rows of the tables those that any rank looks up in the same batch.

    Args:
        loader: As ``wrap_loader`` takes it.
        tables: What is looked up.
        peers: The ranks.
        schedule: Of the loop.
        verify: Whether it is verified.
    """

    # Writes are counted, and with them batches whose changes may not be in the stores.
    writes_always = True

    def __init__(
        self,
        loader: Any,
        tables: Sequence[ShardedTable],
        peers: RankGroup,
        schedule: PrefetchSchedule,
        verify: bool,
    ) -> None:
        super().__init__(loader, [table.rows for table in tables])
        self._peers = peers
        self._means = [table.mean for table in tables]
        self._first = 0
        # Without readers, what they would exchange is between what the loop does: a rank that does
        # something else must hear it there.
        self._ahead = peers.ahead if schedule.depth else peers.loop
        self._sharded = [
            ShardedRows(
                RowPartition(table.rows.n_rows, peers.size),
                table.rows.stores[0],
                schedule.max_unseen_writes * table.trained,
            )
            for table in tables
        ]
        kinds = [
            f"{table.rows.name}: {table.rows.n_rows} rows, {_kinds(table.rows)}, mean={table.mean}"
            for table in tables
        ]
        # Before this was made.
        self._sent = peers.loop.sent + peers.ahead.sent
        self._described = "; ".join([*kinds, f"depth={schedule.depth}, verify={verify}"])

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {**super().fingerprint, "ranks": [self._peers.rank, self._peers.size]}

    @property
    def exchanged(self) -> Exchanged:
        sent = self._peers.loop.sent + self._peers.ahead.sent - self._sent
        return Exchanged(
            sent["ids"],
            sent["rows"],
            sent["late rows"],
            sent["gradients"],
            sent["words"] + sent["marks"],
        )

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return self._peers.loop.telling()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        peers, thread = self._peers, threading.get_ident()
        if peers.looping:
            raise ClosedError(
                "a loop over sharded tables of these ranks is running; end it first: they exchange for one loop at a time"
            )
        peers.looping = True
        try:
            yield
        finally:
            try:
                if threading.get_ident() == thread:
                    self._ahead.leave(Step.LEFT, "it was left")
            finally:
                peers.looping = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        peers, thread = self._peers, threading.get_ident()
        peers.loop.meet(Step.BEGIN, zlib.crc32(self._described.encode()), why=self._described)
        peers.loop.begin()
        self._ahead.begin(len(self._tables))
        try:
            yield
            peers.loop.meet(Step.END)
            peers.loop.end()
        except BaseException as error:
            if threading.get_ident() == thread:
                # Where the garbage collector ends it elsewhere, the others find out by their
                # timeout.
                peers.loop.leave(
                    Step.LEFT,
                    "break, or an error in its body"
                    if isinstance(error, GeneratorExit)
                    else repr(error),
                )
            raise

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        self._first = start
        return super().epoch(number, start, checksum, batches_per_slot)

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        meeting = self._ahead
        trade = RowExchange(meeting, self._sharded)
        for number in itertools.count(self._first):
            try:
                try:
                    batch = next(batches)
                except StopIteration as stop:
                    if is_end(stop):
                        trade.end(number)
                        if meeting is not self._peers.loop:
                            meeting.end()
                        return
                    raise
                load, lookups = self._looked_up(
                    batch, [table.ids_of(batch) for table in self._tables]
                )
            except Exception as error:
                meeting.leave(Step.BAD_BATCH, repr(error), number)
                # A StopIteration as a RuntimeError, for this is a generator.
                raise
            yield functools.partial(
                self._shared,
                load,
                lookups,
                trade.trade(number, [lookup.rows for lookup in lookups]),
                number,
            )

    def _shared(
        self,
        load: HostBatch,
        lookups: Sequence[Lookup],
        traded: Sequence[ExchangePlan],
        number: int,
    ) -> HostBatch:
        parts, groups = list(load.parts), []
        for table, lookup, rows in zip(self._tables, lookups, traded, strict=True):
            places = (torch.from_numpy(getattr(rows, name)) for name in RowPlaces._fields)
            parts += map(HostLeaf, (torch.from_numpy(lookup.rows), to_torch(rows.values), *places))
            groups.append(RowGroup(rows.own, len(parts), table.stores))
            parts += [*(StoreRows(store, rows.own) for store in table.stores), *places_of(lookup)]
        ids, counts = [lookup.rows for lookup in lookups], [rows.counts for rows in traded]

        def rebuild(tensors: Iterator[Tensor]) -> ShardedBatch:
            batch, tables = [next(tensors) for _ in load.parts], []
            for i, (group, lookup) in enumerate(zip(groups, lookups, strict=True)):
                on_device, values, *places = (
                    next(tensors) for _ in range(2 + len(RowPlaces._fields))
                )
                own = [next(tensors) for _ in group.stores]
                positions = [(batch[place], next(tensors)) for place, _ in lookup.places]
                tables.append(
                    SharedRows(
                        rows=group.rows,
                        ids=on_device,
                        tensors=own,
                        positions=positions,
                        wanted=ids[i],
                        values=values,
                        places=RowPlaces(*places),
                        counts=counts[i],
                        mean=self._means[i],
                        at=(number, i),
                        meeting=self._peers.loop,
                    )
                )
            return ShardedBatch(load.rebuild(iter(batch)), tables)

        return HostBatch(parts, rebuild, load.batches, groups)


def _kinds(table: TableRows) -> str:
    """What the stores have for each row."""
    return ", ".join(f"{store.dtype} {tuple(store.row_shape)}" for store in table.stores)
