"""Draws: the batches of an epoch, drawn from their source one at a time, in order.

A source is a generator, which one thread at a time may iterate over. ``SharedDraws`` lets several
threads take turns, and ``ComparedDraws`` also finds the rows that each batch shares with earlier
ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.loop_transforms import count_calls
from pinfeed.pipeline.recent_rows import RecentRows
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import BatchThunk, Cancelled, HostBatch
from pinfeed.pipeline.sources.user_calls import BatchTransform
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.writer import Writer
from pinfeed.threads.pool import Turns

Mover = Transfer | HostTransfer
"""Moves the batches of one loop at a time to a device, in slots."""

Thunks = Generator[BatchThunk, None, None]


class Draws:
    """Batches of an epoch, for one thread.

    Args:
        mover: Mover that fills the slots.
        thunks: The batches; closed by ``close``.
    """

    def __init__(self, mover: Mover, thunks: Thunks) -> None:
        self._mover = mover
        self._now = mover.counters.now
        self._thunks = thunks

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        """Return the next batch, or None after the last one.

        Args:
            slot: Slot that notes the times.
            turn: Number of this call. Calls begin in the order of turns, but several threads may
                reach this function in any order.
        """
        start = self._now()
        if self._mover.is_stopping:
            raise Cancelled
        thunk = next(self._thunks, None)
        if thunk is None:
            return None
        batch = thunk()
        slot.source_done_s = done_s = self._now()
        slot.source_s = done_s - start
        return batch

    def close(self) -> None:
        """Close the source now, not when an error's traceback is freed."""
        close_unless_running(self._thunks)


def close_unless_running(generator: Generator[Any, None, None]) -> None:
    """Close the generator of a source.

    If an interrupt has cut off the wait for the reader threads, one may still run the generator.
    """
    if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:
        generator.close()


class SharedDraws(Draws):
    """Batches of an epoch, for several threads, which take turns, or with ``host_transform``.

    Args:
        mover: Mover that fills the slots.
        thunks: The batches; closed by ``close``.
        n_readers: Number of threads.
        host: ``host_transform`` if the source calls it; otherwise None.
    """

    def __init__(
        self, mover: Mover, thunks: Thunks, n_readers: int, host: BatchTransform | None
    ) -> None:
        super().__init__(mover, thunks)
        self._turns = Turns(is_shared=n_readers > 1)
        self._host = host

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        self._turns.wait_for(turn)
        start = self._now()
        host_s = 0.0
        try:
            try:
                self._mover.check_stop()
                thunk = next(self._thunks, None)
            finally:
                self._turns.end()
            # The other threads need not wait for this work.
            batch = None if thunk is None else thunk()
        finally:
            if self._host is not None:
                calls = self._host.take_calls()
                host_s = count_calls(self._mover.counters, "host_transform", calls)
        if batch is None:
            return None
        slot.source_done_s = self._now()
        # The slot may still have the times of its last batch.
        slot.host_transform_s = host_s
        slot.source_s = slot.source_done_s - start - host_s
        return batch


class ComparedDraws:
    """Finds the rows that each batch of an epoch shares with earlier batches.

    Several reader threads draw batches at the same time. They compare them in order.

    Args:
        draws: The batches.
        writer: Writer of the loop.
        first: Number of the first batch.
        schedule: Number of batches that are prefetched, and of reader threads.
        finds_unread: Whether only rows that no earlier batch has are gathered.
    """

    def __init__(
        self,
        draws: Draws,
        writer: Writer,
        first: int,
        schedule: PrefetchSchedule,
        *,
        finds_unread: bool,
    ) -> None:
        self._draws = draws
        self._writer = writer
        self._now = writer.counters.now
        self._first = first
        self._turns = Turns(is_shared=schedule.n_readers > 1)
        self._finds_unread = finds_unread
        self._recent: RecentRows | None = RecentRows(schedule.depth)

    def make(self, slot: Slot, turn: int) -> HostBatch | None:
        batch: HostBatch | None = None
        try:
            batch = self._draws.make(slot, turn)
        finally:
            # After an error, too, this call takes its turn, because the next one waits for it.
            self._turns.wait_for(turn)
            try:
                if batch is not None:
                    self._compare(batch, turn)
            finally:
                self._turns.end()
        if batch is not None:
            now = self._now()
            slot.source_s += now - slot.source_done_s
            slot.source_done_s = now
        return batch

    def close(self) -> None:
        self._recent = None
        self._draws.close()

    def _compare(self, batch: HostBatch, turn: int) -> None:
        """Note the rows that a batch shares with earlier ones, and the rows that repeat."""
        if self._recent is None or not batch.groups:
            return
        batch.shared, repeated = self._recent.add(
            self._first + turn,
            [group.rows for group in batch.groups],
            [group.written for group in batch.groups],
            self._writer.log.pending_batches(),
            [self._finds_unread and not group.is_frozen for group in batch.groups],
        )
        if self._finds_unread:
            # A window writes the distinct rows of tables.
            return
        pairs = zip(batch.groups, repeated, strict=True)
        batch.groups = [group._replace(repeated=row) for group, row in pairs]


BatchDraws = Draws | ComparedDraws
