"""Transfer: the stream and event protocol of batches and of rows that are written back.

Rule 1: every wait, record and sync of batches and rows is in this file, and each wait names the
        hazard that it prevents. Waits of caches are in cache_transfer.py, and waits of activations
        in training/offload/offload_transfer.py.
Rule 2: this file knows neither threads nor CUDA. It uses a Device. Its methods say which thread
        calls them: the consumer (it runs the training loop), a reader, the transform thread, or
        one of two writers.
Rule 3: the consumer allocates device memory, on its own stream. So any thread may free it, at any
        time. Only ``device_transform`` allocates on another stream.

The consumer reserves a slot, a reader fills it, the consumer lends its batch to the loop and then
reserves the slot again. The slot keeps its staging memory. Its device memory is new each time,
because the user owns a batch from the moment it is lent.

    readers                          consumer                            writers

                                     reserve: memory <- allocator (compute)
                                              released = compute.record()
    fill:   filled.sync()        (1)
            gather -> staging
            read.wait(released)  (2)
            index.wait(released) (2)
            read.wait(compute)   (2)                         if memory is newer than released
            index.wait(compute)  (2)
            index: row indices -> memory                     direct route only
            read: staging -> memory                          staged route
            read.wait(index)     (3)
            read: store -> memory                            direct route: the device reads rows
            filled = read.record()
    transform:                       in the transform thread
            transform.wait(filled) (11)
            transform: function(batch) -> memory <- allocator (transform)
            filled = transform.record()
                                     lend: compute.wait(filled)     (4)
                                           compute.wait(ready)      (5)
                                           compute: newer writes -> memory
                                           compute.wait(cache)       (10)
                                           compute: cache -> memory  cached rows
                                     lend_next:
                                           compute.wait(filled)     (4)    in another stream
                                     hold: compute.wait(cache)       (10)
                                           compute: values -> held
                                           compute: values -> cache  cached rows
                                           ready = compute.record()
                                                             begin_write:
                                                                 earlier.exception()         (6)
                                                                 write.wait(ready)           (7)
                                                                 write: held -> staging  (staged)
                                                                 write: held -> store    (direct)
                                                                 arrived = write.record()
                                                             finish_write:
                                                                 arrived.sync()              (8)
                                                                 staging -> store        (staged)
    quiesce:                         read.record().sync()           (9)
                                     transform.record().sync()      (12)

Each wait prevents a hazard:

    (1) the last copies may still read staging; after a failed fill, they may still write memory
        that is about to be freed
    (2) kernels may still use an earlier tensor in the same memory; memory that ``fill`` itself
        allocates may have been in use until now, so ``released`` is too early for it
    (3) the row indices may not have arrived yet; they have a stream of their own, so that they are
        copied while kernels read the rows of the previous batch
    (4) the rows may not have arrived yet, and results of ``device_transform`` may not be computed
        yet
    (5) newer values may not be computed yet, in another stream
    (6) the scatter of the write before the last one may still read this staging memory; and rows
        that the device writes itself must not overtake the scatter of the last write, which may
        also fail
    (7) the values may not be computed yet
    (8) the values may not have arrived yet
    (9) copies may still write memory that was not lent; if an interrupt or an error kept a begun
        write from being finished, its copies may still use memory that is about to be freed
   (10) work on the cache may not be done yet, in another stream
   (11) the rows for ``device_transform`` may not have arrived yet
   (12) ``device_transform`` may still use memory that was not lent, or tensors of its own, which
        the program may free after the loop

``device_transform`` runs in a stream of its own, and so overlaps with the training step. Its batch
was allocated in the stream of the consumer, and stays in the slot until ``lend`` has queued (4).
The function may keep the batch longer and drop it at any time, so ``transform`` shares the batch
with the function's stream. Its results are allocated in its own stream, so ``lend`` shares them
with the consumer's stream. The allocator then gives their memory to a later call only when the
training step has done its work. Tensors that the function holds from before the loop need no wait,
because (2) and (11) order it after all work that the consumer queued before it reserved the slot.

The loop may change its current stream, once or often. Memory then returns to the stream that it was
allocated for, and a reader may still allocate for that stream, in a slot that was reserved before
the change. So memory is shared with each other stream that works with it: a batch in ``lend``,
values in ``hold``, because the program may have computed them before it changed its stream, and
values that are forwarded. ``TableSession`` shares the rows that a table looks up.

Batches that were gathered together are lent one by one, so the program may change its stream
between two of them. ``lend_next`` then repeats (4) in the new stream.

Two write-backs overlap: the copies of one are queued before the rows of the other are scattered.
Scatters run in the order of the writes.

Two more syncs exist, which a loop does not use unless it verifies its batches. In ``copy_to_host``,
the values may not have arrived yet. ``settle`` prevents no hazard, and timestamps are read after
it.

A direct gather may run at the same time as the scatter of the same rows and read them half
written. This is safe, because such a write is not completed when the slot is filled, so ``lend``
copies its values over those rows.

A device that uses host memory needs no waits: see ``host_transfer.py``.

With a timeline, ``released`` and ``filled`` are timed events. Four more events are timed: before
the copies of ``fill`` (lane "copy", until ``filled``), before the function of ``transform`` (lane
"device_transform", until the later ``filled``), at the end of ``lend`` (lane "device", until the
next ``released``), and before the copies of ``begin_write``. No stream waits for these events.
Their timestamps are read after they have completed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device, Event, RowCopy, Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.cache_transfer import CacheTransfer
from pinfeed.pipeline.forwarding import Write, WriteLog, forwards
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.mover import RunAll, run_in_turn
from pinfeed.pipeline.part_memory import PartMemory, Staging
from pinfeed.pipeline.pending_write import HeldValues, PendingWrite, StagedRows, require_distinct
from pinfeed.pipeline.slot import Cancelled, DeviceSlot
from pinfeed.pipeline.slot_gather import Gathered, SlotGather
from pinfeed.pipeline.sources.source import HostBatch, RowGroup
from pinfeed.profiling.counters import Counters
from pinfeed.stores.store import Store
from pinfeed.threads.call import Call, Pending


class _TimedWork(NamedTuple):
    """The loop's work on the batches that it has received last."""

    number: int
    """Number of the first batch."""
    n_batches: int
    begun: Event
    """Timed event before the work."""


class Transfer:
    """Moves batches between host and device, for one loop at a time.

    It is one class, although a long one, because it decides the order of all streams: each wait can
    be read next to the work that it waits for.

    Args:
        device: Device that batches are moved to.
        n_slots: Maximum number of slots.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance. The
            capacity grows with the batches that are moved.
        counters: Counters of the time that moving takes.
        transforms: The transforms.
    """

    def __init__(
        self,
        device: Device,
        n_slots: int,
        capacity: Sequence[int],
        counters: Counters,
        transforms: LoopTransforms,
    ) -> None:
        self.device = device
        self.counters = counters
        self._timeline = counters.timeline
        self._timed = counters.timeline is not None
        # All loops use the same streams, because a new stream strands the allocator's blocks.
        self._read = device.stream("read")
        self._write = device.stream("write")
        self._index = device.stream("index")
        self._transform = device.stream("transform") if transforms.device is not None else None
        self._parts = PartMemory(device, capacity, shares=True)
        self._indices = PartMemory(device, shares=False)
        self._gather = SlotGather(device, self._parts, self._indices, self.check_stop)
        self.slots = [DeviceSlot() for _ in range(n_slots)]
        self._active_slots = self.slots
        self._batches_per_slot = 1
        # Bytes of the parts of the last lent batch.
        self._needed: list[int] = []
        # Numbers of write-backs. Another thread that closes the feeder may take a number, too.
        self._numbers = itertools.count()
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
        self.log: WriteLog[HeldValues] = WriteLog()
        self._cache_transfer = CacheTransfer(device, counters)
        self.is_stopping = False
        # Event after the work that the loop had queued when it last requested a batch.
        self._asked: Event | None = None
        self._lent: _TimedWork | None = None

    def begin(
        self, n_slots: int, batches_per_slot: int, gather_all: RunAll = run_in_turn
    ) -> Sequence[DeviceSlot]:
        """Begin a loop. All copies and write-backs of earlier loops are completed.

        Args:
            n_slots: Number of slots that the loop uses.
            batches_per_slot: Number of batches in each slot.
            gather_all: Makes the calls that gather a long part into staging memory.
        """
        self._gather.run_all = gather_all
        self.log = WriteLog()
        self.is_stopping = False
        self._was_staged = False
        self._needed = []
        self._active_slots = self.slots[:n_slots]
        self._batches_per_slot = batches_per_slot
        return self._active_slots

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self.is_stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self.is_stopping:
            raise Cancelled

    def reserve(self, slot: DeviceSlot) -> None:
        """Allocate device memory for the slot's next batches (consumer).

        The user owns the memory that the slot has lent before.
        """
        compute = self.device.current_stream()
        slot.batch = None
        slot.seen = self.log.completed
        if len(self.log):
            # Every batch that is not lent yet has seen these writes.
            self.log.forget(min(slot.seen for slot in self._active_slots))
        slot.memory = self._parts.reserve(self._batches_per_slot, compute)
        if self._indices.capacity:
            slot.index_memory = self._indices.reserve(self._batches_per_slot, compute)
        slot.compute = compute
        slot.released = compute.record(timed=self._timed)
        self._asked = slot.released
        if self._lent is not None:
            self._record_device_span(slot.released)

    def fill(self, slot: DeviceSlot, batch: HostBatch, number: int) -> DeviceSlot:
        """Gather a batch and queue its copies to the device (reader; one thread per slot).

        Args:
            slot: Reserved slot.
            batch: Batch to gather.
            number: Number of the batch, or of the first of several batches.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        if slot.filled is not None:
            slot.filled.sync()  # copies may still read staging, or write memory that is freed
        slot.number = number
        slot.batch = batch
        slot.seen = self.log.completed
        start = self.counters.now()
        slot.copy_wait_s = start - slot.made_s
        gathered = self._gather.gather(slot, batch)
        # From now on, only the tensors keep the memory.
        slot.memory = []
        slot.index_memory = []
        self._wait_for_memory(slot, gathered)
        begun = self._read.record(timed=True) if self._timed else None
        try:
            self._copy_gathered(gathered)
        finally:
            # The next fill of this slot waits for the queued copies, after an error too.
            slot.filled = self._read.record(timed=self._timed)
        slot.ready_s = self.counters.now()
        slot.read_s = slot.source_s + slot.rows_s + slot.ready_s - start
        if self._timeline is not None and begun is not None:
            self._timeline.add_timed("copy", number, begun, slot.filled, len(batch.batches))
        return slot

    def transform(self, slot: DeviceSlot, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a full slot (transform thread).

        Calls are in the order of batches.

        Args:
            slot: The slot, which has one batch.
            function: Function of the batch in the user's structure.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        self.check_stop()
        batch = slot.batch
        stream = self._transform
        assert batch is not None
        assert slot.filled is not None
        assert stream is not None
        stream.wait(slot.filled)  # the rows may not have arrived yet
        for tensor in self._own_tensors_in(slot.tensors[: batch.n_data]):
            # The function may keep its batch, and drop it while this stream still uses it.
            self.device.share(tensor, stream)
        begun = stream.record(timed=True) if self._timed else None
        try:
            with self.device.in_stream(stream):
                made = function(batch.data(slot.tensors))
        finally:
            # The next fill of this slot waits for the queued work, after an error too.
            slot.filled = stream.record(timed=self._timed)
        if self._timeline is not None and begun is not None:
            self._timeline.add_timed("device_transform", slot.number, begun, slot.filled)
        slot.made = self._own_tensors_in(made)
        batch.rebuild = lambda tensors: made
        slot.ready_s = self.counters.now()

    def is_idle(self) -> bool:
        """Return whether the device has done all work queued before the last request (consumer)."""
        return self._asked is None or self._asked.is_done()

    def lend(self, slot: DeviceSlot) -> deque[list[Tensor]]:
        """Return the tensors of each of the slot's batches (consumer).

        The consumer's work from here on sees the batches as if they were gathered now.
        """
        assert slot.batch is not None
        assert slot.filled is not None
        compute = self.device.current_stream()
        compute.wait(slot.filled)  # rows or transform results may not have arrived yet
        batch = slot.batch
        for tensor in slot.made:
            self.device.share(tensor, compute)
        slot.made = []
        if compute != slot.compute:
            on_device = [group.indices for group in batch.groups if group.indices is not None]
            for tensor in (*slot.tensors, *on_device):
                self.device.share(tensor, compute)
            slot.compute = compute
        tensors = self._hand_over(slot, compute)
        if self._timed and self._timeline is not None:
            begun = compute.record(timed=True)
            self._lent = _TimedWork(slot.number, len(batch.batches), begun)
            self._timeline.settle()
        if slot.index_needed:
            self._indices.learn(slot.index_needed, self._batches_per_slot)
        self.counters.copy_wait_s += slot.copy_wait_s
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
            for tensor in tensors:
                self.device.share(tensor, compute)
            slot.compute = compute

    def hold(
        self,
        groups: Sequence[RowGroup],
        values: Sequence[Sequence[Tensor | None] | None],
        batch: int,
        *,
        copied: bool,
    ) -> PendingWrite:
        """Take values that are to be written back (consumer).

        Args:
            groups: Rows to write, and their stores.
            values: For each group one tensor per store; None leaves a store or a group unchanged.
            batch: Number of the batch that the values belong to.
            copied: Whether to copy the values. They may be the batch itself, and the user may
                change them immediately.

        Raises:
            WriteBackError: If a row occurs twice.
        """
        compute = self.device.current_stream()
        require_distinct(groups, values)
        held: list[list[Tensor | None]] = []
        for group, tensors in zip(groups, values, strict=True):
            kept = list(tensors) if tensors is not None else []
            for tensor in kept:
                if tensor is not None:
                    # The program may have changed its stream since it allocated this.
                    self.device.share(tensor, compute)
            if group.cached is not None:
                kept = self._cache_transfer.put(group.cached, tensors, compute)
            elif copied:
                kept = [
                    None if tensor is None else self._copy(tensor, group, i, compute)
                    for i, tensor in enumerate(kept)
                ]
            held.append(kept)
        return self._pending(self.log, batch, [group.as_written() for group in groups], held)

    @property
    def has_caches(self) -> bool:
        """Whether the running loop has lent rows of a cache."""
        return bool(self._cache_transfer.caches)

    def changed_rows(self, *, is_last: bool) -> Iterator[PendingWrite]:
        """Yield writes of all rows in caches that may differ from their stores (consumer).

        Args:
            is_last: Whether the loop is ending, after which no row may change.
        """
        for group, chunk in self._cache_transfer.all_changed_rows(is_last=is_last):
            # With a log of their own, these rows are written even if another write has failed, and
            # no log keeps their values afterwards.
            pending = self._pending(WriteLog(), chunk.batch, [group], [chunk.values])
            pending.source = chunk.staged
            yield pending

    def note_flushed(self) -> None:
        """Note that the rows of ``changed_rows`` were written (consumer)."""
        self._cache_transfer.note_flushed()

    def begin_write(self, pending: PendingWrite, earlier: Sequence[Pending[None]]) -> None:
        """Queue copies of held values to staging memory, or to their stores (first writer).

        Args:
            pending: The write-back.
            earlier: Calls of ``finish_write`` for those of the two previous writes that are not
                completed.

        Raises:
            WriteBackError: If an earlier write failed, because a later one must not overtake it.
        """
        write = pending.write
        # This is decided once, because another feeder on the device may change the route.
        reached = [[self.device.reaches(store) for store in g.stores] for g in pending.groups]
        overtakes = any(map(any, reached)) and self._was_staged
        self._was_staged = not all(map(all, reached))
        for call in earlier if overtakes else earlier[:-1]:
            call.exception()  # a scatter may still read this staging memory, or be overtaken
        pending.started_s = self.counters.now()
        self._begun[pending.number] = pending
        staging = self._write_staging[self._n_begun % 2]
        self._n_begun += 1
        try:
            self._write.wait(write.values.ready)  # the values may not be computed yet
            # In any case, the memory that they are computed from is kept until then.
            if pending.log.has_failed:
                raise WriteBackError("not written: an earlier write_back of this loop failed")
            pending.begun = self._write.record(timed=True) if self._timed else None
            tensors = write.values.tensors
            for group, held, are_reached in zip(pending.groups, tensors, reached, strict=True):
                pending.staged += self._copy_to_host(group, held, are_reached, staging)
        except BaseException:
            pending.log.has_failed = True
            raise
        finally:
            pending.arrived = self._write.record()

    def finish_write(
        self,
        pending: PendingWrite,
        begun: Pending[None],
        run_all: RunAll,
    ) -> None:
        """Scatter the values of a write-back that have arrived in staging memory (second writer).

        Args:
            pending: The write-back.
            begun: Call of ``begin_write``.
            run_all: Makes several calls, maybe in several threads, and returns when all have ended.

        Raises:
            Exception: If ``begin_write`` raised it.
            WriteBackError: If an earlier write failed.
        """
        log = pending.log
        try:
            begun.exception()
            if pending.arrived is not None:
                pending.arrived.sync()  # the values may not have arrived yet
                del self._begun[pending.number]
            begun.result()
            if log.completed != pending.write.number:
                raise WriteBackError("not written: an earlier write_back of this loop failed")
            in_memory = [staged for staged in pending.staged if staged.is_in_memory]
            run_all([call for staged in in_memory for call in staged.scatters()])
            for staged in pending.staged:
                if not staged.is_in_memory:
                    staged.store.scatter(staged.rows, staged.values)
        except BaseException:
            log.has_failed = True
            # The error's traceback keeps this frame, which must not keep the call, because the call
            # keeps the error.
            del begun
            raise
        log.completed = pending.write.number + 1
        now = self.counters.now()
        # The time in which two writes overlap counts only once.
        last_s = self._written_s
        self._written_s = now
        self.counters.write_s += now - max(pending.started_s, last_s)
        if self._timeline is not None:
            began_s = pending.started_s if pending.begun is None else pending.begun.at_s()
            self._timeline.add("write", pending.batch, max(began_s, last_s), now)

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Begin and finish a write-back (a writer, or the consumer at depth 0)."""
        begun = Call(self.begin_write, pending, ())
        begun.run()
        try:
            self.finish_write(pending, begun, run_in_turn)
        finally:
            # For the same reason as in finish_write.
            del begun

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

    def quiesce(self) -> None:
        """Wait for queued copies and release their memory (consumer).

        No copy uses the slots' memory after this has returned.
        """
        self._read.record().sync()  # copies may still write memory that was not lent
        if self._transform is not None:
            self._transform.record().sync()  # transforms may still use memory that is freed next
        for pending in self._begun.values():
            if pending.arrived is not None:
                pending.arrived.sync()  # as above, if an error kept a write from being finished
        self._begun = {}
        # The threads of the loop have ended.
        self._gather.run_all = run_in_turn
        if self._lent is not None:
            self._asked = self.device.current_stream().record(timed=True)
            self._record_device_span(self._asked)
        for slot in self.slots:
            slot.clear()
        self._cache_transfer.close()
        self.log = WriteLog()

    def close(self) -> None:
        """Free the staging memory."""
        self.slots = []
        self._active_slots = []
        self._write_staging = ({}, {})
        unlock_freed()

    def _hand_over(self, slot: DeviceSlot, compute: Stream) -> list[Tensor]:
        """Return the slot's tensors, after copies of newer values to their rows (consumer)."""
        batch = slot.batch
        assert batch is not None
        if batch.shared is not None and (writes := self.log.since(slot.seen)):
            self._forward(writes, slot, compute)
        tensors = slot.tensors
        for group in batch.groups:
            if group.cached is not None:
                self._cache_transfer.lend(group, group.cached, tensors, slot.number, compute)
        # The positions of shared rows are not a part of the batch.
        del tensors[len(batch.parts) :]
        slot.nbytes = sum(slot.needed[: len(batch.parts)]) + slot.adopted_nbytes
        # Most batches need as many bytes as the previous one.
        if slot.needed != self._needed:
            self._needed = slot.needed
            self._parts.learn(slot.needed, self._batches_per_slot)
        slot.tensors = []
        slot.batch = None
        return tensors

    def _own_tensors_in(self, value: Any) -> list[Tensor]:
        """Return the dense tensors on the device in a value."""
        from pinfeed.tensors.transform_calls import tensors_in

        described = ((tensor, self.device.describe(tensor)) for tensor in tensors_in(value))
        return [tensor for tensor, found in described if found is not None and found[2]]

    def _cut(self, batch: HostBatch, tensors: list[Tensor]) -> deque[list[Tensor]]:
        """Return the tensors of each of the batches that were gathered together."""
        if len(batch.batches) == 1:
            return deque((tensors,))
        return deque(
            [self.device.cut(tensor, begin, end) for tensor in tensors]
            for begin, end in batch.ranges()
        )

    def _wait_for_memory(self, slot: DeviceSlot, gathered: Gathered) -> None:
        """Make the copies of a fill wait until nothing else uses the slot's memory (reader)."""
        assert slot.compute is not None
        assert slot.released is not None
        self._read.wait(slot.released)  # kernels may still use an earlier tensor in this memory
        if gathered.is_late:
            # Memory was allocated later, or parts were adopted, which moves them in this stream.
            self._read.wait(slot.compute.record())  # kernels may still use an earlier tensor
        if gathered.indices:
            self._index.wait(slot.released)  # as above, for the memory of row indices
            if gathered.are_indices_late:
                self._index.wait(slot.compute.record())  # as above, if it was allocated later

    def _copy_gathered(self, gathered: Gathered) -> None:
        """Queue the copies of staged parts, and the reads of direct ones (reader)."""
        try:
            for source, tensor in gathered.indices:
                self.device.copy(source, tensor, self._index)
        finally:
            if gathered.indices:
                self._read.wait(self._index.record())  # the row indices may not have arrived yet
        for source, tensor in gathered.staged:
            self.device.copy(source, tensor, self._read)
        for parts, indices in gathered.direct:
            for _ in self.device.read(parts, self._read, indices):
                self.check_stop()

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
            out = self._parts.staging(staging, group.first + i, shape, store.dtype)
            self.device.copy(held, out, self._write)
            staged.append(StagedRows(store, group.rows, out))
        if direct:
            self.device.write(direct, group.rows, self._write, group.indices)
        return staged

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Tensor:
        """Copy values of a group's store ``i`` on the device."""
        store = group.stores[i]
        # The size is always that of a full batch, because the allocator reuses memory of one size.
        memory = self.device.empty(self._parts.capacity[group.first + i], compute)
        tensor = self.device.tensor(memory, (len(group.rows), *store.row_shape), store.dtype)
        self.device.copy(value, tensor, compute)
        return tensor

    def _forward(
        self, writes: Sequence[Write[HeldValues]], slot: DeviceSlot, compute: Stream
    ) -> None:
        """Queue copies of newer values over the rows that a batch and later writes share."""
        batch = slot.batch
        assert batch is not None
        assert batch.shared is not None
        positions = slot.tensors[-1]
        for g, group in enumerate(batch.groups):
            overlaps = batch.shared.overlaps[g]
            for write, span in forwards(writes, g, slot.number, overlaps):
                values = write.values
                is_elsewhere = compute != values.compute
                if is_elsewhere:
                    compute.wait(values.ready)  # values may not be computed yet, in another stream
                earlier, later = (
                    self.device.cut(positions, *ends) for ends in (span.earlier, span.later)
                )
                copies = []
                for i, held in enumerate(values.tensors[g]):
                    if held is not None:
                        target = slot.tensors[group.first + i]
                        copies.append(RowCopy(held, target, earlier, later))
                        if is_elsewhere:
                            self.device.share(held, compute)
                self.device.copy_rows(copies, compute)

    def _pending(
        self,
        log: WriteLog[HeldValues],
        batch: int,
        groups: Sequence[RowGroup],
        held: list[list[Tensor | None]],
    ) -> PendingWrite:
        """Return the write-back of values that the consumer thread has just queued."""
        compute = self.device.current_stream()
        is_whole = [
            all(tensor is not None for tensor in tensors) if tensors else None for tensors in held
        ]
        write = log.append(batch, is_whole, HeldValues(held, compute, compute.record()))
        return PendingWrite(next(self._numbers), write, groups, log)

    def _record_device_span(self, end: Event) -> None:
        """Record the loop's queued work on the batches that it has received."""
        assert self._lent is not None
        assert self._timeline is not None
        work = self._lent
        self._lent = None
        self._timeline.add_timed("device", work.number, work.begun, end, work.n_batches)
