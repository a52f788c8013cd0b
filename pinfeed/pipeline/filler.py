"""Draws: takes the batches of an epoch from their source; Filler: gathers them into slots.

A source is a generator, which one thread at a time may iterate over. Reader threads take turns, in
the order of the slots' turns. ``ComparedDraws`` also finds the rows that each batch shares with
earlier ones, and ``TransformingFiller`` calls the transforms.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from pinfeed.pipeline.forwarding import RecentRows
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.loop_transforms import LoopTransforms, count_calls
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, Slot, raise_kept
from pinfeed.pipeline.sources.source import (
    BatchThunks,
    Cancelled,
    HostBatch,
    OtherBatch,
    failed_batch,
)
from pinfeed.pipeline.sources.user_calls import BatchTransform
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.writer import Writer
from pinfeed.profiling.spans import Lane
from pinfeed.threads.pool import Turns

Mover = Transfer | HostTransfer
"""Moves the batches of one loop at a time to a device, in slots."""


class Draws:
    """The batches of an epoch. Several threads take turns.

    Args:
        mover: Mover that fills the slots.
        thunks: The batches; closed by ``close``.
        n_readers: Number of threads.
        host: ``host_transform`` if the source calls it; otherwise None.
    """

    def __init__(
        self, mover: Mover, thunks: BatchThunks, n_readers: int, host: BatchTransform | None
    ) -> None:
        self._mover = mover
        self.check_stop = mover.check_stop
        self._now = mover.counters.now
        self._thunks = thunks
        self._turns = Turns(is_shared=n_readers > 1)
        self._host = host

    def make(self, slot: Slot) -> HostBatch | None:
        """Return the next batch in the turn of a slot, or None after the last one.

        Args:
            slot: Slot that notes the times.
        """
        self._turns.wait_for(slot.turn)
        start = self._now()
        host_s = 0.0
        try:
            try:
                self.check_stop()
                thunk = next(self._thunks, None)
            finally:
                self._turns.end()
            # The other threads need not wait for this work.
            batch = None if thunk is None else thunk()
        finally:
            if self._host is not None:
                calls = self._host.take_calls()
                host_s = count_calls(self._mover.counters, "host_transform", calls)
        if batch is not None:
            # The slot may still have the times of its last batch.
            slot.host_transform_s = host_s
            slot.source_done_s = done_s = self._now()
            slot.source_s = done_s - start - host_s
        return batch

    def stop(self) -> None:
        """Let no thread wait for its turn, because the loop has ended. Any thread may call this.

        An interrupt may have cut off the call of an earlier turn.
        """
        self._turns.stop()

    def close(self) -> None:
        """Close the source now, not when an error's traceback is freed."""
        close_unless_running(self._thunks)


def close_unless_running(generator: Generator[Any, None, None]) -> None:
    """Close the generator of a source.

    If an interrupt has cut off the wait for the reader threads, one may still run the generator.
    """
    if inspect.getgeneratorstate(generator) != inspect.GEN_RUNNING:
        generator.close()


class ComparedDraws:
    """Finds the rows that each batch of an epoch shares with earlier batches.

    Several reader threads draw batches at the same time. They compare them in order.

    Args:
        draws: The batches.
        writer: Writer of the loop.
        schedule: Number of batches that are prefetched, and of reader threads.
        finds_unread: Whether only rows that no earlier batch has are gathered.
    """

    def __init__(
        self, draws: Draws, writer: Writer, schedule: PrefetchSchedule, *, finds_unread: bool
    ) -> None:
        self._draws = draws
        self._writer = writer
        self._now = writer.counters.now
        self._turns = Turns(is_shared=schedule.n_readers > 1)
        self._finds_unread = finds_unread
        self._recent: RecentRows | None = RecentRows(schedule.depth)

    def make(self, slot: Slot) -> HostBatch | None:
        batch: HostBatch | None = None
        try:
            batch = self._draws.make(slot)
        finally:
            # After an error, too, this call takes its turn, because the next one waits for it.
            self._turns.wait_for(slot.turn)
            try:
                if batch is not None:
                    self._draws.check_stop()
                    self._compare(batch, slot.number)
            finally:
                self._turns.end()
        if batch is not None:
            now = self._now()
            slot.source_s += now - slot.source_done_s
            slot.source_done_s = now
        return batch

    def stop(self) -> None:
        self._draws.stop()
        self._turns.stop()

    def close(self) -> None:
        self._recent = None
        self._draws.close()

    def _compare(self, batch: HostBatch, number: int) -> None:
        """Note the rows that a batch shares with earlier ones, and the rows that repeat."""
        if self._recent is None or not batch.groups:
            return
        batch.shared, repeated = self._recent.add(
            number,
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


class Step(NamedTuple):
    """Work on full slots in threads of its own."""

    function: Callable[[Slot], object]
    n_threads: int


class Filler:
    """Fills slots with the batches of a loop. Reader threads call ``fill``.

    Args:
        mover: Mover of the slots.
        draws: The batches.
        gather: Gathers a batch into a slot, as the mover does.

    Attributes:
        context: Context in which a loop without threads fills slots, as its threads would.
    """

    def __init__(
        self, mover: Mover, draws: Draws | ComparedDraws, gather: Callable[[Slot, HostBatch], Slot]
    ) -> None:
        self._mover: Any = mover
        self._gather = gather
        self._draws = draws
        self.context: Callable[[], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        )

    @property
    def steps(self) -> Sequence[Step]:
        """Work on a full slot, one step after the other."""
        return ()

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self._mover.stop()
        self._draws.stop()

    def fill(self, slot: Slot) -> Slot | None:
        """Fill a slot with the next batches; return None after the last one.

        If one of several batches cannot be gathered, the slot carries the earlier ones. The error
        is raised when the loop requests the batch that failed. If the loop continues after errors,
        the error takes the place of its batch.

        Args:
            slot: Reserved slot, with its turn and the number of its first batch.
        """
        batch = self._draws.make(slot)
        if batch is None:
            return None
        try:
            return self._gather_one(slot, batch)
        except Cancelled:
            raise
        except Exception as error:
            if batch.keeps_errors:
                return self._fail(slot, batch, error)
            if len(batch.batches) == 1:
                raise
            n_good, slot.error = self._good(slot, batch)
            if slot.error is None:
                # All succeed now, so the failed one is unknown.
                raise
        if not n_good:
            raise_kept(slot)
        return self._gather(slot, batch.cut(0, n_good))

    def _gather_one(self, slot: Slot, batch: HostBatch) -> Slot:
        """Gather a batch, or the one that takes its place."""
        try:
            return self._gather(slot, batch)
        except OtherBatch as other:
            made = other.batch
        made.state = batch.state
        made.keeps_errors = batch.keeps_errors
        return self._gather(slot, made)

    def _fail(self, slot: Slot, batch: HostBatch, error: Exception) -> Slot:
        """Fill a slot with the error of its batch, in place of the batch."""
        failed = failed_batch(error)
        failed.state = batch.state
        return self._gather(slot, failed)

    def _good(self, slot: Slot, batch: HostBatch) -> tuple[int, Exception | None]:
        """Return the number of batches before the first that cannot be gathered, and its error."""
        for i in range(len(batch.batches)):
            try:
                self._gather(slot, batch.cut(i, i + 1))
            except Cancelled:
                raise
            except Exception as error:
                return i, error
        return len(batch.batches), None


class TransformingFiller(Filler):
    """Fills slots, and calls the transforms on their batches, in the order of batches.

    Every batch has a slot of its own.

    Args:
        mover: Mover of the slots.
        draws: The batches.
        gather: Gathers a batch into a slot, as the mover does.
        schedule: Schedule of the loop.
        transforms: The transforms.
        in_fill: Whether ``fill`` calls ``host_transform`` on rows, and not another thread.
    """

    def __init__(
        self,
        mover: Mover,
        draws: Draws | ComparedDraws,
        gather: Callable[[Slot, HostBatch], Slot],
        schedule: PrefetchSchedule,
        transforms: LoopTransforms,
        *,
        in_fill: bool,
    ) -> None:
        from pinfeed.tensors.transform_calls import modes_of_a_new_thread

        super().__init__(mover, draws, gather)
        self.context = modes_of_a_new_thread
        self._transforms = transforms
        self._in_fill = in_fill
        self._is_unified = mover.device.unified
        self._n_threads = schedule.n_transform_threads
        if transforms.gather is not None:
            transforms.gather.begin(schedule)

    @property
    def steps(self) -> Sequence[Step]:
        # The source calls ``host_transform`` in reader threads, unless the loop reads the rows for
        # it. A loop on a GPU calls ``device_transform`` when it queues the copies.
        on_host = self._transforms.gather is not None and not self._in_fill
        on_device = self._transforms.device is not None and self._is_unified
        if on_host and on_device and self._n_threads == 1:
            return [Step(self._transform, 1)]
        host, device = Step(self._on_host, self._n_threads), Step(self._on_device, 1)
        return [host] * on_host + [device] * on_device

    def stop(self) -> None:
        super().stop()
        if self._transforms.gather is not None:
            self._transforms.gather.stop()

    def fill(self, slot: Slot) -> Slot | None:
        """Fill a slot with the next batch (reader).

        If ``host_transform`` takes rows of stores, this only adds these rows to the slot, and a
        step fills it.
        """
        gather = self._transforms.gather
        if isinstance(slot, DeviceSlot) and self._transforms.device is not None:
            slot.on_device = self._queue_transform
        if gather is None:
            return super().fill(slot)
        batch = self._draws.make(slot)
        if batch is None:
            return None
        source_done_s = slot.source_done_s
        gather.fill(slot, batch)
        slot.rows = batch.data(slot.tensors)
        slot.tensors = []
        slot.batch_tensors.clear()
        slot.rows_s = self._mover.counters.now() - source_done_s
        if self._in_fill:
            self._on_host(slot)
        return slot

    def _transform(self, slot: Slot) -> None:
        """Call both transforms on the batch of a slot. One thread does so, in order."""
        self._on_host(slot)
        self._on_device(slot)

    def _queue_transform(self, slot: Slot) -> None:
        """Call ``device_transform`` in the thread of the loop, with the modes of a new thread."""
        with self.context():
            self._on_device(slot)

    def _on_host(self, slot: Slot) -> None:
        """Call ``host_transform``. Several threads may do so at the same time."""
        transforms = self._transforms
        counters = self._mover.counters
        rows = slot.rows
        batch = slot.batch
        assert transforms.host is not None
        assert batch is not None
        slot.rows = None
        self._mover.check_stop()
        made = transforms.on_rows(rows, batch, slot.epoch, slot.number)
        # Only the function may keep the memory of these rows.
        del rows, batch
        slot.host_transform_s = count_calls(
            counters, "host_transform", transforms.host.take_calls()
        )
        slot.source_done_s = counters.now()
        self._gather(slot, made)

    def _on_device(self, slot: Slot) -> None:
        """Call ``device_transform``. One thread does so, in order."""
        transforms = self._transforms
        call = transforms.on_device(slot.tensors, slot.epoch, slot.number)
        batch = slot.batch
        assert transforms.device is not None
        assert batch is not None
        try:
            self._mover.transform(slot, call)
        except Cancelled:
            raise
        except Exception as error:
            # On a GPU, the mover does the same for the copies.
            if not batch.keeps_errors or not self._is_unified:
                raise
            self._fail(slot, batch, error)
        finally:
            calls = transforms.device.take_calls()
            # On an asynchronous device, the Transfer records the work that the transform queues.
            lane: Lane | None = "device_transform" if self._is_unified else None
            slot.device_transform_s = count_calls(self._mover.counters, lane, calls)
