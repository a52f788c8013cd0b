"""Transfer: the stream and event protocol of batches and of rows that are written back.

Rule 1: every wait, record and sync of batches and rows is in this file, and each wait names the
        hazard that it prevents. Those of activations are in
        training/offload/offload_transfer.py.
Rule 2: this file knows neither threads nor CUDA. It is given a Device, and its methods say which
        thread calls them: the consumer (the training thread), a reader or the writer.
Rule 3: the consumer allocates device memory, on its own stream. So any thread may free it, at any
        time.

A slot is reserved by the consumer, filled by a reader, lent to the consumer, and reserved again.
Its staging memory stays. Its device memory is new each time, because a batch belongs to the user
from the moment it is lent.

    readers                          consumer                            writer

                                     reserve: memory <- allocator (compute)
                                              released = compute.record()
    fill:   filled.sync()       (1)
            gather -> staging
            read.wait(released) (2)
            read.wait(compute)  (2)                          if memory is newer than released
            read: staging -> memory                          staged route
            read: store -> memory                            direct route: the device reads rows
            filled = read.record()
                                     lend: compute.wait(filled)     (3)
                                           compute.wait(ready)      (4)
                                           compute: newer writes -> memory
                                     hold: compute: values -> held
                                           ready = compute.record()
                                                             write_to_stores:
                                                                 write.wait(ready)           (5)
                                                                 write: held -> staging  (staged)
                                                                 write: held -> store    (direct)
                                                                 write.record().sync()       (6)
                                                                 staging -> store        (staged)
    quiesce:                         read.record().sync()           (7)

Each wait prevents a hazard:

    (1) the last copies may still read staging; after a failed fill, they may still write memory
        that is about to be freed
    (2) kernels may still use what the memory was before; memory that ``fill`` itself allocates
        may have been in use until now, so that ``released`` is too early for it
    (3) the rows may not be there yet
    (4) newer values may not be computed yet, in another stream
    (5) the values may not be computed yet
    (6) the values may not have arrived yet
    (7) copies may still write memory that was not lent

Two more syncs are in no loop but one that verifies its batches: in ``copy_to_host``, the values may
not have arrived yet; ``settle`` prevents no hazard, and timestamps are read after it.

A direct gather may run at the same time as the scatter of the same rows and read them half
written. That is allowed: such a write is not completed when the slot is filled, so ``lend`` copies
its values over those rows.

With a timeline, unless the device's memory is the host's, ``released`` and ``filled`` are timed
events. Three more events are timed: before the copies of ``fill`` (lane "copy", until ``filled``),
at the end of ``lend`` (lane "device", until the next ``released``), and before the copies of
``write_to_stores``. No stream waits for them. Their timestamps are read after they have completed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Buffer, Device, Event, Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.forwarding import Write, WriteLog, WrittenRows, newest
from pinfeed.pipeline.pending_write import HeldValues, PendingWrite
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.base import HostBatch, RowGroup
from pinfeed.profiling.counters import Counters
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import HostArray, Store, part_nbytes


class _TimedWork(NamedTuple):
    """The loop's work on the batches that it was lent last."""

    number: int
    """Number of the first batch."""
    n_batches: int
    begun: Event
    """Timed event before the work."""


class Transfer:
    """Moves batches between host and device, for one loop at a time.

    It is one class, though a long one, because the order of all streams is decided here: each wait
    can be read next to the work that it waits for.

    Args:
        device: Device that batches are moved to.
        n_slots: Maximum number of slots.
        capacity: Bytes of each part of a full batch, where they are known in advance. The capacity
            grows with the batches that are moved.
        counters: Counters of the time that moving takes.
    """

    def __init__(
        self, device: Device, n_slots: int, capacity: Sequence[int], counters: Counters
    ) -> None:
        self.device = device
        self.counters = counters
        self._timeline = counters.timeline
        # On a unified device a copy is part of the read, so there is no copy to be timed.
        self._timed = counters.timeline is not None and not device.unified
        # The streams are kept from loop to loop: a new stream strands the allocator's blocks.
        self._read = device.stream("read")
        self._write = device.stream("write")
        self._capacity = list(capacity)
        self.slots = [Slot() for _ in range(n_slots)]
        self._active_slots = self.slots
        self._batches_per_slot = 1
        self._write_staging: dict[int, npt.NDArray[np.uint8]] = {}
        self.log: WriteLog[HeldValues] = WriteLog()
        self._is_stopping = False
        # Event behind the work that the loop had queued when it last asked for a batch.
        self._asked: Event | None = None
        self._lent: _TimedWork | None = None

    def begin(self, n_slots: int, batches_per_slot: int) -> Sequence[Slot]:
        """Begin a loop. All copies and write-backs of earlier loops are completed.

        Args:
            n_slots: Number of slots that the loop uses.
            batches_per_slot: Number of batches in each slot.
        """
        self.log = WriteLog()
        self._is_stopping = False
        self._active_slots = self.slots[:n_slots]
        self._batches_per_slot = batches_per_slot
        return self._active_slots

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self._is_stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self._is_stopping:
            raise Cancelled

    def reserve(self, slot: Slot) -> None:
        """Allocate device memory for the slot's next batches (consumer).

        The memory that the slot lent before belongs to the user.
        """
        # This thread does not capture a CUDA graph while it asks for a batch.
        unlock_freed()
        compute = self.device.current_stream()
        slot.batch = None
        slot.seen = self.log.completed
        sizes = [nbytes * self._batches_per_slot for nbytes in self._capacity]
        slot.memory = [
            (nbytes, self.device.empty(nbytes, compute) if nbytes else None) for nbytes in sizes
        ]
        slot.compute = compute
        slot.released = compute.record(timed=self._timed)
        self._asked = slot.released
        if self._lent is not None:
            self._record_device_span(slot.released)

    def fill(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather a batch and queue its copies to the device (reader; one thread per slot).

        Args:
            slot: Slot that was reserved.
            batch: Batch to gather.
            number: Number of the batch, or of the first of several.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        if slot.filled is not None:
            slot.filled.sync()  # copies may still read staging, or write memory that is freed
        slot.number = number
        slot.batch = batch
        slot.seen = self.log.completed
        start = self.counters.now()
        slot.held_s = start - slot.drawn_s
        direct, staged, is_late = self._gather(slot, batch)
        # From here on only the tensors keep the memory.
        slot.memory = []
        assert slot.compute is not None
        assert slot.released is not None
        self._read.wait(slot.released)  # kernels may still use what the memory was before
        if is_late:
            # Memory was allocated since, or parts were adopted, which moves them in this stream.
            self._read.wait(slot.compute.record())  # kernels may still use what it was before
        begun = self._read.record(timed=True) if self._timed else None
        try:
            for source, tensor in staged:
                self.device.copy(source, tensor, self._read)
            for _ in self.device.read(direct, self._read):
                self.check_stop()
        finally:
            # The next fill of this slot waits for the queued copies, after an error too.
            slot.filled = self._read.record(timed=self._timed)
        slot.ready_s = self.counters.now()
        slot.read_s = slot.draw_s + slot.ready_s - start
        if self._timeline is not None:
            n_batches = len(batch.batches)
            self._timeline.add("read", number, slot.ready_s - slot.read_s, slot.ready_s, n_batches)
            if begun is not None:
                self._timeline.add_timed("copy", number, begun, slot.filled, n_batches)
        return slot

    def is_idle(self) -> bool:
        """Tell whether the device has done all work queued before the last request (consumer)."""
        return self._asked is None or self._asked.is_done()

    def lend(self, slot: Slot) -> list[Tensor]:
        """Return the slot's tensors (consumer).

        The consumer's work from here on sees the batch as if it was gathered now.
        """
        assert slot.batch is not None
        assert slot.filled is not None
        compute = self.device.current_stream()
        compute.wait(slot.filled)  # the rows may not be there yet
        tensors = slot.tensors
        if compute != slot.compute:
            for tensor in tensors:
                self.device.share(tensor, compute)
        if writes := self.log.since(slot.seen):
            self._forward(writes, slot.batch.groups, tensors, compute)
        if self._timed and self._timeline is not None:
            begun = compute.record(timed=True)
            self._lent = _TimedWork(slot.number, len(slot.batch.batches), begun)
            self._timeline.settle()
        needed = [-(-nbytes // self._batches_per_slot) for nbytes in slot.needed]
        self._capacity = [
            _grown(*sizes) for sizes in itertools.zip_longest(self._capacity, needed, fillvalue=0)
        ]
        slot.tensors = []
        slot.batch = None
        self.counters.read_s += slot.read_s
        self.counters.draw_s += slot.draw_s
        self.counters.held_s += slot.held_s
        return tensors

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
                change them at once.

        Raises:
            WriteBackError: If a row occurs twice.
        """
        compute = self.device.current_stream()
        written = [
            None
            if tensors is None
            else WrittenRows(group.rows, whole=all(tensor is not None for tensor in tensors))
            for group, tensors in zip(groups, values, strict=True)
        ]
        held: list[list[Tensor | None]] = []
        for group, tensors in zip(groups, values, strict=True):
            kept = list(tensors) if tensors is not None else []
            if copied:
                kept = [
                    None if tensor is None else self._copy(tensor, group, i, compute)
                    for i, tensor in enumerate(kept)
                ]
            held.append(kept)
        write = self.log.append(written, HeldValues(held, compute, compute.record()))
        return PendingWrite(write, groups, self.log, batch)

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Write held values to their stores (writer).

        Raises:
            WriteBackError: If an earlier write failed, because a later one must not overtake it.
        """
        write = pending.write
        start = self.counters.now()
        if pending.log.completed != write.number:
            raise WriteBackError("not written: an earlier write_back of this loop failed")
        self._write.wait(write.values.ready)  # the values may not be computed yet
        begun = self._write.record(timed=True) if self._timed else None
        staged: list[tuple[Store, Rows, npt.NDArray[Any]]] = []
        try:
            for group, tensors in zip(pending.groups, write.values.tensors, strict=True):
                staged += self._copy_to_host(group, tensors)
        finally:
            self._write.record().sync()  # the values may not have arrived yet
        for store, rows, values in staged:
            store.scatter(rows, values)
        pending.log.completed = write.number + 1
        now = self.counters.now()
        self.counters.write_s += now - start
        if self._timeline is not None:
            began_s = start if begun is None else begun.at_s()
            self._timeline.add("write", pending.batch, began_s, now)

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Return the values of a tensor that was lent (consumer). It waits for the device."""
        nbytes = math.prod(shape) * dtype.itemsize
        out: npt.NDArray[Any] = np.ndarray(shape, dtype, self.device.staging(max(1, nbytes)))
        compute = self.device.current_stream()
        self.device.copy(tensor, out, compute)
        compute.record().sync()  # the values may not have arrived yet
        return out

    def forget(self) -> None:
        """Drop the writes that every prefetched batch has seen (consumer)."""
        self.log.forget(min(slot.seen for slot in self._active_slots))

    def settle(self) -> None:
        """Wait until the timestamps of the loop's last request are known.

        The reader of the timeline calls this. No loop does.
        """
        if self._timed and self._asked is not None:
            self._asked.sync()  # prevents no hazard: the timestamps are read next

    def quiesce(self) -> None:
        """Wait for queued copies and release what they use (consumer).

        No copy uses the slots' memory after this has returned.
        """
        self._read.record().sync()  # copies may still write memory that was not lent
        if self._lent is not None:
            self._asked = self.device.current_stream().record(timed=True)
            self._record_device_span(self._asked)
        for slot in self.slots:
            slot.batch = None
            slot.released = None
            slot.compute = None
            slot.error = None
            slot.tensors = []
            slot.memory = []
            slot.sources = []
        self.log = WriteLog()

    def close(self) -> None:
        """Free the staging memory."""
        self.slots = []
        self._active_slots = []
        self._write_staging = {}
        unlock_freed()

    def _gather(
        self, slot: Slot, batch: HostBatch
    ) -> tuple[list[tuple[HostArray, Tensor]], list[tuple[npt.NDArray[Any], Tensor]], bool]:
        """Give each part of a batch a tensor, and gather the parts that are staged.

        Returns:
            Parts that the device reads itself, staged parts, each with its tensor, and whether
            memory was allocated, or a part adopted, after the slot was reserved.
        """
        assert slot.compute is not None
        slot.tensors = []
        slot.needed = []
        slot.sources = []
        direct: list[tuple[HostArray, Tensor]] = []
        staged: list[tuple[npt.NDArray[Any], Tensor]] = []
        is_late = False
        for i, part in enumerate(batch.parts):
            tensor = self.device.adopt(part, slot.compute)
            if tensor is not None:
                is_late = True
                slot.needed.append(0)
            else:
                slot.needed.append(part_nbytes(part))
                memory, is_reserved = self._memory(slot, i)
                is_late |= not is_reserved
                tensor = self.device.tensor(memory, part.shape, part.dtype)
                if self.device.reaches(part):
                    direct.append((part, tensor))
                    slot.sources.append(part)
                else:
                    staged.append((self._read_part(slot, i, part), tensor))
            slot.tensors.append(tensor)
        return direct, staged, is_late

    def _memory(self, slot: Slot, i: int) -> tuple[Buffer, bool]:
        """Return memory for part ``i``, and whether it was reserved.

        A part that is larger than any before gets memory of its own now.
        """
        nbytes, memory = slot.memory[i] if i < len(slot.memory) else (0, None)
        if memory is not None and nbytes >= slot.needed[i]:
            return memory, True
        assert slot.compute is not None
        return self.device.empty(_grown(nbytes, slot.needed[i]), slot.compute), False

    def _read_part(self, slot: Slot, i: int, part: HostArray) -> npt.NDArray[Any]:
        """Read a part into staging memory."""
        out = self._staging(slot.staging, i, part.shape, part.dtype)
        for _ in part.read(out):
            self.check_stop()
        return out

    def _staging(
        self,
        staging: dict[int, npt.NDArray[np.uint8]],
        i: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> npt.NDArray[Any]:
        """Return staging memory of part ``i`` in a shape, and grow it if needed.

        It grows to a full batch at once, because locking pages is slow.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if i not in staging or len(staging[i]) < nbytes:
            expected = self._capacity[i] if i < len(self._capacity) else 0
            staging[i] = self.device.staging(max(nbytes, expected))
        return staging[i][:nbytes].view(dtype).reshape(shape)

    def _copy_to_host(
        self, group: RowGroup, tensors: Sequence[Tensor | None]
    ) -> list[tuple[Store, Rows, npt.NDArray[Any]]]:
        """Queue copies of a group's values to staging, or to stores that the device writes itself.

        Returns:
            Stores that are to be written from staging, with rows and values.
        """
        direct: list[tuple[Store, Tensor]] = []
        staged: list[tuple[Store, Rows, npt.NDArray[Any]]] = []
        # A group that stays unchanged has no tensors.
        for i, (store, held) in enumerate(zip(group.stores, tensors, strict=False)):
            if held is None:
                continue
            if self.device.reaches(store):
                direct.append((store, held))
                continue
            shape = (len(group.rows), *store.row_shape)
            out = self._staging(self._write_staging, group.first + i, shape, store.dtype)
            self.device.copy(held, out, self._write)
            staged.append((store, group.rows, out))
        self.device.write(direct, group.rows, self._write)
        return staged

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Tensor:
        """Copy values of a group's store ``i`` on the device."""
        store = group.stores[i]
        # The allocator finds memory of one size again, so it always is that of a full batch.
        memory = self.device.empty(self._capacity[group.first + i], compute)
        tensor = self.device.tensor(memory, (len(group.rows), *store.row_shape), store.dtype)
        self.device.copy(value, tensor, compute)
        return tensor

    def _forward(
        self,
        writes: Sequence[Write[HeldValues]],
        groups: Sequence[RowGroup],
        tensors: Sequence[Tensor],
        compute: Stream,
    ) -> None:
        """Queue copies of newer values over the rows that a batch and later writes share."""
        for g, group in enumerate(groups):
            for write, dst_pos, src_pos in newest(writes, g, group.rows):
                is_elsewhere = compute != write.values.compute
                if is_elsewhere:
                    compute.wait(write.values.ready)  # not computed yet, in the stream of then
                for i, held in enumerate(write.values.tensors[g]):
                    if held is None:
                        continue
                    if is_elsewhere:
                        self.device.share(held, compute)
                    tensor = tensors[group.first + i]
                    self.device.copy_rows(held, src_pos, tensor, dst_pos, compute)

    def _record_device_span(self, end: Event) -> None:
        """Record the loop's work on the batches that it was lent; it has queued all of it."""
        assert self._lent is not None
        assert self._timeline is not None
        work = self._lent
        self._lent = None
        self._timeline.add_timed("device", work.number, work.begun, end, work.n_batches)


def _grown(capacity: int, needed: int) -> int:
    """Return the bytes to allocate for a part that took ``capacity`` bytes so far.

    A larger part is rounded up to a sixteenth of its size, so that few sizes occur and the
    allocator finds memory again.
    """
    if needed <= capacity or not capacity:
        return max(capacity, needed)
    step = 1 << max(0, needed.bit_length() - 5)
    return -(-needed // step) * step
