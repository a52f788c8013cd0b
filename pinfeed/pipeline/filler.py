"""Filler: gathers the batches of an epoch into slots; TransformingFiller: transforms them, too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pinfeed.pipeline.draws import BatchDraws, Mover
from pinfeed.pipeline.loop_transforms import LoopTransforms, count_calls
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, Slot, raise_kept
from pinfeed.pipeline.sources.source import Cancelled, HostBatch, OtherBatch, failed_batch
from pinfeed.profiling.spans import Lane

if TYPE_CHECKING:
    from typing_extensions import Self


class Filler:
    """Fills slots with the batches of an epoch. Reader threads call ``fill``.

    Args:
        mover: Mover of the slots.
        draws: The batches.
        gather: Gathers a batch into a slot, given its number, as the mover does.
        first: Number of the first batch.
        schedule: Schedule of the loop.
    """

    def __init__(
        self,
        mover: Mover,
        draws: BatchDraws,
        gather: Callable[[Slot, HostBatch, int], Slot],
        first: int,
        schedule: PrefetchSchedule,
    ) -> None:
        self._mover: Any = mover
        self._gather = gather
        self._make = draws.make
        self._first = first
        self._batches_per_slot = schedule.batches_per_slot

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self._mover.stop()

    def of_epoch(self, epoch: int, turn: int) -> Self:
        """Return a filler for a later epoch of the same loop.

        Args:
            epoch: Number of the epoch.
            turn: Number of the call of ``fill`` for its first batches.
        """
        filler = copy.copy(self)
        filler._first = -turn * self._batches_per_slot
        return filler

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batches; return None after the last one.

        If one of several batches cannot be gathered, the slot carries the earlier ones. The error
        is raised when the loop requests the batch that failed. If the loop continues after errors,
        the error takes the place of its batch.

        Args:
            slot: Reserved slot.
            turn: Number of this call, as ``Draws.make`` takes it.
        """
        batch = self._make(slot, turn)
        if batch is None:
            return None
        number = self._first + turn * self._batches_per_slot
        try:
            return self._gather_one(slot, batch, number)
        except Cancelled:
            raise
        except Exception as error:
            if batch.keeps_errors:
                return self._fail(slot, batch, error, number)
            if len(batch.batches) == 1:
                raise
            n_good, slot.error = self._good(slot, batch, number)
            if slot.error is None:
                # All succeed now, so the failed one is unknown.
                raise
        if not n_good:
            raise_kept(slot)
        return self._gather(slot, batch.cut(0, n_good), number)

    def _gather_one(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather a batch, or the one that takes its place."""
        try:
            return self._gather(slot, batch, number)
        except OtherBatch as other:
            made = other.batch
        made.state = batch.state
        made.keeps_errors = batch.keeps_errors
        return self._gather(slot, made, number)

    def _fail(self, slot: Slot, batch: HostBatch, error: Exception, number: int) -> Slot:
        """Fill a slot with the error of its batch, in place of the batch."""
        failed = failed_batch(error)
        failed.state = batch.state
        return self._gather(slot, failed, number)

    def _good(self, slot: Slot, batch: HostBatch, number: int) -> tuple[int, Exception | None]:
        """Return the number of batches before the first that cannot be gathered, and its error."""
        for i in range(len(batch.batches)):
            try:
                self._gather(slot, batch.cut(i, i + 1), number + i)
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
        gather: Gathers a batch into a slot, given its number, as the mover does.
        first: Number of the first batch.
        schedule: Schedule of the loop.
        transforms: The transforms.
    """

    def __init__(
        self,
        mover: Mover,
        draws: BatchDraws,
        gather: Callable[[Slot, HostBatch, int], Slot],
        first: int,
        schedule: PrefetchSchedule,
        transforms: LoopTransforms,
    ) -> None:
        super().__init__(mover, draws, gather, first, schedule)
        self._transforms = transforms
        self.transforms_in_fill = False
        """Whether ``fill`` calls ``host_transform``, and not another thread."""
        if transforms.gather is not None:
            transforms.gather.begin(schedule)

    def of_epoch(self, epoch: int, turn: int) -> Self:
        filler = super().of_epoch(epoch, turn)
        filler._transforms = dataclasses.replace(self._transforms, epoch=epoch)
        return filler

    def stop(self) -> None:
        super().stop()
        if self._transforms.gather is not None:
            self._transforms.gather.stop()

    def fill(self, slot: Slot, turn: int) -> Slot | None:
        """Fill a slot with the next batch (reader).

        If ``host_transform`` takes rows of stores, this only adds these rows to the slot, and
        ``transform`` fills it.
        """
        gather = self._transforms.gather
        if isinstance(slot, DeviceSlot) and self._transforms.device is not None:
            slot.on_device = self._queue_transform
        if gather is None:
            return super().fill(slot, turn)
        batch = self._make(slot, turn)
        if batch is None:
            return None
        source_done_s = slot.source_done_s
        gather.fill(slot, batch, self._first + turn)
        slot.rows = batch.data(slot.tensors)
        slot.tensors = []
        slot.batch_tensors.clear()
        slot.rows_s = self._mover.counters.now() - source_done_s
        if self.transforms_in_fill:
            self.transform_on_host(slot)
        return slot

    def transform(self, slot: Slot) -> None:
        """Call the transforms on the batch of a slot. One thread does so, in order."""
        if self._transforms.gather is not None:
            self.transform_on_host(slot)
        if self._transforms.device is not None:
            self.transform_on_device(slot)

    def _queue_transform(self, slot: Slot) -> None:
        """Call ``device_transform`` in the thread of the loop, with the modes of a new thread."""
        from pinfeed.tensors.transform_calls import modes_of_a_new_thread

        with modes_of_a_new_thread():
            self.transform_on_device(slot)

    def transform_on_host(self, slot: Slot) -> None:
        """Call ``host_transform`` alone. Several threads may do so at the same time."""
        transforms = self._transforms
        counters = self._mover.counters
        rows = slot.rows
        batch = slot.batch
        assert transforms.host is not None
        assert batch is not None
        slot.rows = None
        self._mover.check_stop()
        made = transforms.on_rows(rows, batch, slot.number)
        # Only the function may keep the memory of these rows.
        del rows, batch
        slot.host_transform_s = count_calls(
            counters, "host_transform", transforms.host.take_calls()
        )
        slot.source_done_s = counters.now()
        self._gather(slot, made, slot.number)

    def transform_on_device(self, slot: Slot) -> None:
        """Call ``device_transform`` alone. One thread does so, in order."""
        transforms = self._transforms
        call = transforms.on_device(slot.tensors, slot.number)
        batch = slot.batch
        assert transforms.device is not None
        assert batch is not None
        is_unified = self._mover.device.unified
        try:
            self._mover.transform(slot, call)
        except Cancelled:
            raise
        except Exception as error:
            # On a GPU, the mover does the same for the copies.
            if not batch.keeps_errors or not is_unified:
                raise
            self._fail(slot, batch, error, slot.number)
        finally:
            calls = transforms.device.take_calls()
            # On an asynchronous device, the Transfer records the work that the transform queues.
            lane: Lane | None = "device_transform" if is_unified else None
            slot.device_transform_s = count_calls(self._mover.counters, lane, calls)
