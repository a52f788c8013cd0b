"""Transfer: the stream and event protocol of batches and of rows that are written back.

Rule 1: every wait, record and sync of batches and rows is in this file, and each wait names the
        hazard that it prevents. Only those of ``copy_batch`` are in the device, whose driver makes
        them in one call. ``Writer`` records ``ready``. Waits of caches are in row_cache.py, and
        those of tables that the device writes itself in row_window.py. Loops whose batches need no
        Python wait in native/engine.c, write.c and move.c, and activations in
        training/offload/offload_transfer.py.
Rule 2: this file knows neither threads nor CUDA. It uses a Device. Its methods say which thread
        calls them: the consumer (it runs the training loop), a reader, or the writer.
Rule 3: the consumer allocates device memory, on its own stream. So any thread may free it, at any
        time. Only ``device_transform`` allocates on another stream, and a device that uploads row
        indices itself.
Rule 4: the consumer queues all copies. Readers fill staging memory, and the writer empties it; both
        only wait for an event before they begin, and lock the pages of new staging memory.

The consumer reserves a slot, a reader fills it, the consumer queues its copies and lends its batch
to the loop. Whenever the loop requests a batch, the consumer also queues the copies of later slots
that are full, so that they run during the training step. The slot keeps its staging memory. Its
device memory is new each time, because the user owns a batch from the moment it is lent.

    readers                          consumer                            writer

    fill:   copied.sync()        (1)
            gather -> staging
                                     queue: memory <- allocator (compute)
                                            Device.copy_batch:
                                                released = compute.record()
                                                read.wait(released)   (2)
                                                read: staging -> memory  with row indices
                                                read.wait(written)    (13)   row_window.py
                                                read: store -> memory        direct route
                                                copied = read.record()
                                            transform.wait(copied) (11)
                                            transform: function(batch)
                                                       -> memory <- allocator (transform)
                                            filled = transform.record()
                                     lend:  compute.wait(filled)  (4)
                                            compute.wait(ready)   (5)
                                            compute: newer writes -> memory
                                            compute.wait(cache)    (10)
                                            compute: cache -> memory  cached rows
                                     lend_next:
                                            compute.wait(filled)  (4)    in another stream
                                     capture_values:
                                            compute.wait(cache)    (10)
                                            compute: values -> held
                                            compute: values -> cache  cached rows
                                            ready = compute.record()
                                     begin_write:
                                            earlier.exception()   (6)
                                            write.wait(ready)     (7)
                                            write: held -> staging       staged
                                            write: held -> store         direct
                                            arrived = write.record()
                                                             finish_write:
                                                                 arrived.sync()         (8)
                                                                 staging -> store    staged
    quiesce:                         read.record().sync()           (9)
                                     transform.record().sync()      (12)

Each wait prevents a hazard:

    (1) the last copies may still read staging, or staging that is about to be freed
    (2) kernels may still use an earlier tensor in the same memory
    (4) the rows may not have arrived yet, and results of ``device_transform`` may not be computed
        yet
    (5) newer values may not be computed yet, in another stream
    (6) the scatter of the write before the last one may still read this staging memory; and rows
        that the device writes itself must not overtake the scatter of the last write, which may
        also fail
    (7) the values may not be computed yet
    (8) the values may not have arrived yet
    (9) copies may still write memory that was not lent; if an interrupt or an error kept a begun
        write from being finished, its copies may still use memory that is about to be freed; the
        consumer may queue copies after another thread has waited for the earlier ones
   (10) work on the cache may not be done yet, in another stream
   (11) the rows for ``device_transform`` may not have arrived yet
   (12) ``device_transform`` may still use memory that was not lent, or tensors of its own, which
        the program may free after the loop

``device_transform`` runs in a stream of its own, and so overlaps with the training step. Its batch
was allocated in the stream of the consumer, and stays in the slot until ``lend`` has queued (4).
The function may keep the batch longer and drop it at any time, so ``queue`` shares the batch with
the function's stream. Its results are allocated in its own stream, so ``lend`` shares them
with the consumer's stream. The allocator then gives their memory to a later call only when the
training step has done its work. Tensors that the function holds from before the loop need no wait,
because (2) and (11) order it after all work that the consumer queued before.

The loop may change its current stream, once or often. Memory then returns to the stream that it was
allocated for. So memory is shared with each other stream that works with it: a batch in ``lend``,
values in ``capture_values``, because the program may have computed them before it changed its
stream, and values that are forwarded. ``TableSession`` shares the rows that a table looks up.

Batches that were gathered together are lent one by one, so the program may change its stream
between two of them. ``lend_next`` then repeats (4) in the new stream.

Two write-backs overlap: the copies of one are queued before the rows of the other are scattered.
Scatters run in the order of the writes.

Only verification and timelines use two further syncs. In ``copy_to_host``, the values may not have
arrived yet. ``settle`` prevents no hazard, and timestamps are read after it.

A direct gather may run at the same time as the scatter of the same rows and read them half
written. This is safe, because such a write is not completed when the slot is filled, so ``lend``
copies its values over those rows.

A device that uses host memory needs no waits: see ``host_transfer.py``.

With a timeline, ``asked`` of ``reserve``, ``copied`` and ``filled`` are timed events. Four more
events are timed: before the copies of ``queue`` (lane "copy", until ``copied``), before the
function (lane "device_transform", until ``filled``), at the end of ``lend`` (lane "device", until
the next ``asked``), and before the copies of ``begin_write``. No stream waits for these events.
Their timestamps are read after they have completed.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.batch_copies import BatchCopies, PartReads, share_each
from pinfeed.devices.device import Device, Event, RowPairs, Stream, Tensor
from pinfeed.devices.layout import BatchPart, RowLayout
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.forwarding import HeldValues, WriteLog
from pinfeed.pipeline.part_memory import PartMemory, Staging, known_nbytes
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, Slot, raise_kept
from pinfeed.pipeline.slot_gather import Gathered, SlotGather
from pinfeed.pipeline.sources.source import (
    BatchValues,
    Cancelled,
    HostBatch,
    RowGroup,
    failed_batch,
)
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.pipeline.writer import PendingWrite, StagedRows, Writer
from pinfeed.profiling.counters import Counters
from pinfeed.stores.store import Store
from pinfeed.threads.call import Pending

RunAll = Callable[[Sequence[Callable[[], object]]], None]
"""Makes several calls, maybe in several threads, and returns when all have ended."""

_NOT_WRITTEN = "not written: an earlier write_back of this loop failed"


class _TimedWork(NamedTuple):
    """The loop's work on the batches that it has received last."""

    number: int
    """Number of the first batch."""
    n_batches: int
    begun: Event
    """Timed event before the work."""


class Transfer(Writer):
    """Moves batches between host and device, for one loop at a time.

    It is one class, although a long one, because it decides the order of all streams: each wait can
    be read next to the work that it waits for.

    Args:
        device: Device that batches are moved to.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance. The
            capacity grows with the batches that are moved.
        counters: Counters of the time that moving takes.
        has_device_transform: Whether the loops call ``device_transform``.
    """

    def __init__(
        self,
        device: Device,
        capacity: Sequence[int],
        counters: Counters,
        *,
        has_device_transform: bool,
    ) -> None:
        super().__init__(device, counters)
        self._timeline = counters.timeline
        self._timed = counters.timeline is not None
        # All loops use the same streams, because a new stream strands the allocator's blocks.
        self.read_stream = device.stream("read")
        """Stream of the copies to the device."""
        self.write_stream = device.stream("write")
        """Stream of the copies from the device."""
        self._transform = device.stream("transform") if has_device_transform else None
        self._memory = PartMemory(device, capacity)
        self._gather = SlotGather(device, self._memory, self.check_stop)
        self.slots: list[DeviceSlot] = []
        self._active_slots = self.slots
        # Two write-backs overlap, each with its own staging memory.
        self._write_staging: tuple[Staging, Staging] = ({}, {})
        # Number of begun write-backs. An interrupt may keep a write-back from beginning.
        self._n_begun = 0
        # Write-backs that were begun and not finished, by number.
        self._begun: dict[int, PendingWrite] = {}
        # Whether some rows of the last write-back were staged.
        self._was_staged = False
        # Time at which the last write-back was completed.
        self._written_s = 0.0
        self.is_stopping = False
        # Event after the work that the loop had queued when it last requested a batch.
        self._asked: Event | None = None
        self._lent: _TimedWork | None = None

    def begin(self, schedule: PrefetchSchedule) -> Sequence[DeviceSlot]:
        """Begin a loop, and return the slots that it uses.

        All copies and write-backs of earlier loops are completed.
        """
        self.log = WriteLog()
        self.is_stopping = False
        self._was_staged = False
        self.slots += [DeviceSlot() for _ in range(schedule.n_slots - len(self.slots))]
        self._active_slots = self.slots[: schedule.n_slots]
        self._gather.batches_per_slot = schedule.batches_per_slot
        # Batches that are prefetched must have memory of their own.
        self._gather.copies_values = not schedule.depth
        return self._active_slots

    def staging_of(self, slot: DeviceSlot, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the slot's page-locked memory for all parts of a job, shape (nbytes,)."""
        return self._memory.slot_staging(slot.staging, nbytes)

    def write_staging(self, nbytes: int) -> list[npt.NDArray[np.uint8]]:
        """Return two page-locked memories for write-backs, each of shape (nbytes,)."""
        return [self._memory.slot_staging(staging, nbytes) for staging in self._write_staging]

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self.is_stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self.is_stopping:
            raise Cancelled

    def reserve(self, slot: DeviceSlot) -> None:
        """Prepare a slot for its next batches; the user owns what it has lent (consumer)."""
        slot.batch = None
        slot.gathered = None
        slot.seen = self.log.completed
        if len(self.log):
            # Every batch that is not lent yet has seen these writes.
            self.log.forget(min(slot.seen for slot in self._active_slots))
        self._asked = self.device.current_stream().record(timed=self._timed)
        if self._lent is not None:
            self._record_device_span(self._asked)

    def fill(self, slot: DeviceSlot, batch: HostBatch, *, reads_rows: bool = False) -> DeviceSlot:
        """Gather a batch into staging memory (reader; one thread per slot).

        Args:
            slot: Reserved slot.
            batch: Batch to gather.
            reads_rows: Whether the device reads all rows itself, whatever its present route.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        if slot.copied is not None:
            slot.copied.sync()  # copies may still read staging, or staging that is freed
        slot.batch = batch
        slot.seen = self.log.completed
        start = self.counters.now()
        slot.copy_wait_s = start - slot.source_done_s
        slot.gathered = self._gather.gather(slot, batch, reads_rows=reads_rows)
        slot.ready_s = self.counters.now()
        slot.read_s = slot.source_s + slot.rows_s + slot.ready_s - start
        return slot

    def queue(self, slot: DeviceSlot, written: Event | None = None) -> None:
        """Queue the copies of a full slot to the device, unless that was done (consumer).

        Slots are in the order of their batches. An error is raised by ``lend``.

        Args:
            slot: The slot.
            written: Event after which the device may read rows of the batch itself; None if it may
                at once.
        """
        if slot.gathered is None:
            return
        batch = slot.batch
        if batch is None:
            # Another thread ends the loop now.
            raise Cancelled
        try:
            with slot.context():
                guarded(self._queue_copies, slot, written)
                if slot.on_device is not None:
                    slot.on_device(slot)
        except Exception as error:
            if not batch.keeps_errors:
                slot.failure = error
                return
            failed = failed_batch(error)
            failed.state = batch.state
            try:
                with slot.context():
                    self._queue_copies(self.fill(slot, failed))
            except Exception as second:
                slot.failure = second
            finally:
                # The error's traceback keeps this frame, which must not keep the batch.
                del slot, batch, failed

    def transform(self, slot: DeviceSlot, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a slot (consumer).

        Args:
            slot: The slot, which has one batch.
            function: Function of the batch in the user's structure.
        """
        batch = slot.batch
        stream = self._transform
        assert batch is not None
        assert slot.copied is not None
        assert stream is not None
        stream.wait(slot.copied)  # the rows for device_transform may not have arrived yet
        # The function may keep its batch, and drop it while this stream still uses it.
        share_each(self.device, self._own_tensors_in(slot.tensors[: batch.n_data]), stream)
        begun = stream.record(timed=True) if self._timed else None
        try:
            with self.device.in_stream(stream):
                made = function(batch.data(slot.tensors))
        finally:
            slot.filled = stream.record(timed=self._timed)
            if self.is_stopping:
                slot.filled.sync()  # device_transform may still use memory that is freed next
        if self._timeline is not None and begun is not None:
            self._timeline.add_timed("device_transform", slot.number, begun, slot.filled)
        slot.transform_outputs = self._own_tensors_in(made)
        batch.rebuild = lambda tensors: made
        slot.ready_s = max(slot.ready_s, self.counters.now())

    def is_idle(self) -> bool:
        """Return whether the device has done all work queued before the last request (consumer)."""
        return self._asked is None or self._asked.is_done()

    def lend(
        self, slot: DeviceSlot, update: Callable[[DeviceSlot, Stream], None] | None = None
    ) -> deque[list[Tensor]]:
        """Return the tensors of each of the slot's batches (consumer).

        The consumer's work from here on sees the batches as if they were gathered now.

        Args:
            slot: The slot.
            update: Copies newer values to the batch, given the slot and the stream of the consumer.
                By default, these are held values and rows of caches.
        """
        if slot.failure is not None:
            raise_kept(slot)
        assert slot.batch is not None
        assert slot.filled is not None
        compute = self.device.current_stream()
        compute.wait(slot.filled)  # rows or transform results may not have arrived yet
        batch = slot.batch
        share_each(self.device, slot.transform_outputs, compute)
        slot.transform_outputs = []
        if compute != slot.compute:
            share_each(self.device, (*slot.tensors, *slot.indices), compute)
            slot.compute = compute
        (update or self._update_rows)(slot, compute)
        tensors = slot.tensors
        # The positions of shared rows are not a part of the batch.
        del tensors[len(batch.parts) :]
        slot.tensors = []
        slot.indices = []
        slot.batch = None
        if self._timed and self._timeline is not None:
            begun = compute.record(timed=True)
            self._lent = _TimedWork(slot.number, len(batch.batches), begun)
            self._timeline.settle()
        self.counters.counts.copy_wait_s += slot.copy_wait_s
        return self._cut(batch, tensors)

    def lend_next(self, slot: DeviceSlot, tensors: Sequence[Tensor]) -> None:
        """Lend the slot's next batch, if the loop has changed its stream (consumer).

        Only a loop that writes no rows has several batches in a slot.

        Args:
            slot: The slot; its earlier batches were lent.
            tensors: Tensors of the batch.
        """
        assert slot.filled is not None
        compute = self.device.current_stream()
        if compute != slot.compute:
            compute.wait(slot.filled)  # the rows may not have arrived yet, in another stream
            # Later batches of the slot are in the same memory.
            share_each(self.device, tensors, compute)
            slot.compute = compute

    def capture_values(self, batch: BatchValues, *, copied: bool) -> PendingWrite:
        """Take values that are to be written back, as every ``Writer`` does (consumer)."""
        compute = self.device.current_stream()
        for tensors in batch.values:
            # The program may have changed its stream since it allocated these.
            share_each(self.device, tensors or (), compute)
        return super().capture_values(batch, copied=copied)

    def begin_write(self, pending: PendingWrite, earlier: Sequence[Pending[None]]) -> None:
        """Queue copies of held values to staging memory, or to their stores (consumer).

        ``finish_write`` raises the error, if this fails.

        Args:
            pending: The write-back.
            earlier: Calls of ``finish_write`` for those of the two previous writes that are not
                completed.
        """
        write = pending.write
        # This is decided once, because another feeder on the device may change the route.
        reached = [[self.device.reaches(store) for store in g.stores] for g in pending.groups]
        is_staged = not all(map(all, reached))
        overtakes = any(map(any, reached)) and self._was_staged
        self._was_staged = is_staged
        for call in earlier if overtakes else earlier[: -1 if is_staged else 0]:
            call.exception()  # a scatter may still read this staging memory, or be overtaken
        pending.started_s = self.counters.now()
        self._begun[pending.number] = pending
        staging = self._write_staging[self._n_begun % 2]
        self._n_begun += 1
        try:
            self.write_stream.wait(write.values.ready)  # the values may not be computed yet
            # The source memory stays allocated until this wait.
            if pending.log.has_failed:
                raise WriteBackError(_NOT_WRITTEN)
            pending.begun = self.write_stream.record(timed=True) if self._timed else None
            tensors = write.values.tensors
            for group, held, are_reached in zip(pending.groups, tensors, reached, strict=True):
                pending.staged += self._copy_to_host(group, held, are_reached, staging)
        except Exception as error:
            pending.log.has_failed = True
            pending.error = error
        finally:
            pending.arrived = self.write_stream.record()

    def finish_write(self, pending: PendingWrite, run_all: RunAll) -> None:
        """Scatter the values of a write-back that have arrived in staging memory (writer).

        Args:
            pending: The write-back.
            run_all: Makes several calls, maybe in several threads, and returns when all have ended.

        Raises:
            Exception: If ``begin_write`` has failed; its error.
            WriteBackError: If an earlier write failed.
        """
        log = pending.log
        try:
            if pending.arrived is not None:
                pending.arrived.sync()  # the values may not have arrived yet
                del self._begun[pending.number]
            if pending.error is not None:
                raise pending.error
            if log.completed != pending.write.number:
                raise WriteBackError(_NOT_WRITTEN)
            in_memory = [staged for staged in pending.staged if staged.is_in_memory]
            run_all([call for staged in in_memory for call in staged.scatters()])
            for staged in pending.staged:
                if not staged.is_in_memory:
                    staged.store.scatter(staged.rows, staged.values)
        except BaseException:
            log.has_failed = True
            # The error's traceback keeps this frame, which must not keep the error.
            pending.error = None
            raise
        log.completed = pending.write.number + 1
        now = self.counters.now()
        # The time in which two writes overlap counts only once.
        last_s = self._written_s
        self._written_s = now
        self.counters.counts.write_s += now - max(pending.started_s, last_s)
        if self._timeline is not None:
            began_s = pending.started_s if pending.begun is None else pending.begun.at_s()
            self._timeline.add("write", pending.batch, max(began_s, last_s), now)

    def abandon_write(self, pending: PendingWrite) -> None:
        """Wait for the copies of a write-back that no thread finishes (consumer)."""
        if pending.arrived is not None:
            pending.arrived.sync()  # copies may still use memory that is about to be freed

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Begin and finish a write-back (the consumer at depth 0, or the writer)."""
        self.begin_write(pending, ())
        self.finish_write(pending, _run_in_turn)

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Wait for the device, and return the values of a lent tensor (consumer)."""
        nbytes = math.prod(shape) * dtype.itemsize
        out: npt.NDArray[Any] = np.ndarray(shape, dtype, self.device.staging(max(1, nbytes)))
        compute = self.device.current_stream()
        self.device.copy(tensor, out, compute)
        compute.record().sync()  # the values may not have arrived yet
        return out

    def settle(self) -> None:
        """Wait until the timestamps of the loop's last request are known.

        Reading the timeline calls this. No loop does.
        """
        if self._timed and self._asked is not None:
            self._asked.sync()  # prevents no hazard: the timestamps are read next

    def pause(self) -> None:
        """Record the end of the loop's work on the batches that it has received (consumer)."""
        if self._lent is not None:
            self._asked = self.device.current_stream().record(timed=True)
            self._record_device_span(self._asked)

    def quiesce(self) -> None:
        """Wait for queued copies and release their memory (consumer).

        No copy uses the slots' memory after this has returned.
        """
        self.read_stream.record().sync()  # copies may still write memory that was not lent
        if self._transform is not None:
            self._transform.record().sync()  # transforms may still use memory that is freed next
        for pending in tuple(self._begun.values()):
            if pending.arrived is not None:
                pending.arrived.sync()  # as above, if an error kept a write from being finished
        self._begun = {}
        self.pause()
        for slot in self.slots:
            slot.clear()
        self.caches.close()
        self.log = WriteLog()

    def close(self) -> None:
        """Free the staging memory."""
        self.slots = []
        self._active_slots = []
        self._write_staging = ({}, {})
        unlock_freed()

    def _own_tensors_in(self, value: Any) -> list[Tensor]:
        """Return the dense tensors on the device in a value."""
        from pinfeed.tensors.transform_calls import tensors_in

        described = ((tensor, self.device.describe(tensor)) for tensor in tensors_in(value))
        return [tensor for tensor, found in described if found is not None and found[2]]

    def _cut(self, batch: HostBatch, tensors: list[Tensor]) -> deque[list[Tensor]]:
        """Return the tensors of each of the batches that were gathered together."""
        if len(batch.batches) == 1:
            return deque((tensors,))
        sizes = [n_rows for n_rows, _ in batch.batches]
        cut = [self.device.split(tensor, sizes) for tensor in tensors]
        return deque(map(list, zip(*cut, strict=True)))

    def _queue_copies(self, slot: DeviceSlot, written: Event | None = None) -> None:
        """Allocate the device memory of a slot, and queue the copies to it (consumer)."""
        device = self.device
        batch = slot.batch
        gathered: Gathered = slot.gathered
        slot.gathered = None
        assert batch is not None
        compute = device.current_stream()
        layout = gathered.layout
        tensors: list[Any] = [None] * len(gathered.parts)
        slot.nbytes = gathered.nbytes
        for i in gathered.adopted:
            tensors[i] = device.adopt(gathered.parts[i], compute)
            slot.nbytes += known_nbytes(tensors[i])
        moved, wholes = device.empty_parts(layout, compute)
        for i, tensor in zip(gathered.order, moved, strict=True):
            tensors[i] = tensor
        slot.compute = compute
        slot.tensors = tensors[: gathered.n_batch]
        slot.indices = tensors[gathered.n_batch :]
        slot.sources = [gathered.parts[i] for read in gathered.reads for i in read.parts]
        reads = self._direct_reads(gathered, batch, tensors)
        copies = BatchCopies(gathered.staged, layout, wholes, reads, written)
        begun = copied = None
        try:
            begun, copied = device.copy_batch(
                copies, (compute, self.read_stream), timed=self._timed
            )
        finally:
            # The next fill of this slot waits for the queued copies, after an error too.
            slot.copied = slot.filled = copied or self.read_stream.record(timed=self._timed)
            if self.is_stopping:
                # Another thread ends the loop, and may have waited for its copies before these.
                slot.copied.sync()  # copies may still write memory that was not lent
        if self._timeline is not None and begun is not None:
            n_batches = len(batch.batches)
            self._timeline.add_timed("copy", slot.number, begun, slot.copied, n_batches)

    def _direct_reads(
        self, gathered: Gathered, batch: HostBatch, tensors: Sequence[Tensor]
    ) -> list[PartReads]:
        """Return the reads of parts by the device itself, and note row indices in their groups."""
        parts = gathered.parts
        reads = []
        for own, g, index_part, pairs in gathered.reads:
            indices = None if index_part is None else tensors[index_part]
            if pairs is not None:
                indices = RowPairs(indices, pairs.begin, pairs.n_rows)
            elif g is not None:
                batch.groups[g] = batch.groups[g]._replace(indices=indices)
            reads.append(PartReads([(parts[i], tensors[i]) for i in own], indices))
        return reads

    def _copy_to_host(
        self,
        group: RowGroup,
        tensors: Sequence[Tensor | None],
        are_reached: Sequence[bool],
        staging: Staging,
    ) -> list[StagedRows]:
        """Queue copies of a group's values to staging, or to stores that the device writes itself.

        Args:
            group: Rows to write, and their stores.
            tensors: Values for each store; None leaves a store unchanged.
            are_reached: Whether the device writes each store itself.
            staging: Staging memory of the write-back.

        Returns:
            Rows that are to be scattered from staging.
        """
        direct: list[tuple[Store, Tensor]] = []
        staged: list[StagedRows] = []
        if not len(group.rows):
            # All rows of the batch may stay in the cache.
            return staged
        # An unchanged group has no tensors.
        for i, (store, held) in enumerate(zip(group.stores, tensors, strict=False)):
            if held is None:
                continue
            if are_reached[i]:
                direct.append((store, held))
                continue
            shape = (len(group.rows), *store.row_shape)
            out = self._memory.staging(staging, group.first + i, shape, store.dtype)
            self.device.copy(held, out, self.write_stream)
            staged.append(StagedRows(store, group.rows, out))
        if direct:
            self.device.write(direct, group.rows, self.write_stream, group.indices)
        return staged

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Tensor:
        """Copy values of a group's store ``i`` on the device."""
        store = group.stores[i]
        layout = _layout_of((len(group.rows), *store.row_shape), store.dtype)
        (tensor,), _ = self.device.empty_parts(layout, compute)
        self.device.copy(value, tensor, compute)
        return tensor

    def _await_values(self, values: HeldValues, g: int, compute: Stream) -> None:
        compute.wait(values.ready)  # values may not be computed yet, in another stream
        share_each(self.device, values.tensors[g], compute)

    def _shared_positions(self, slot: Slot) -> Tensor:
        return slot.tensors[-1]

    def _record_device_span(self, end: Event) -> None:
        """Record the loop's queued work on the batches that it has received."""
        assert self._lent is not None
        assert self._timeline is not None
        work = self._lent
        self._lent = None
        self._timeline.add_timed("device", work.number, work.begun, end, work.n_batches)


# Most batches have one size.
@functools.lru_cache
def _layout_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowLayout:
    """Return the layout of one part."""
    return RowLayout.of([BatchPart.of(shape, dtype)])


def _run_in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
