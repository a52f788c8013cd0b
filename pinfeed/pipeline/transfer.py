"""The stream and event protocol.

Rule 1: every wait, record and sync of batches and rows is in this file, and each names the hazard
that it prevents; those of activations
        are in training/offload/offload_transfer.py.
Rule 2: this file knows neither threads nor CUDA; it is given a Device and is called by whoever
schedules it. Rule 3: memory of the device is taken on the consumer's stream, by the consumer; so it
can be given back there by anybody, at any time.

A slot goes round: reserved by the consumer, filled by a reader, lent to the consumer, reserved
again. Its staging memory stays; its device memory is new each time, for a batch belongs to the user
from the moment it is lent.

    readers                           consumer                              writer
                                      reserve: memory <- allocator (compute)
                                               released = compute.record()
    fill:   filled.sync()                                                           the last copies may still read staging, or, after a
                                                                                    fill that failed, write memory that is about to be free
            gather -> staging
            read.wait(released)                                                     kernels may still use what the memory was before
            read: staging -> memory   (staged route)
            read: store -> memory     (direct route: the device reads the rows itself)
            filled = read.record()
    lend:                             compute.wait(filled)                          the rows may not be there yet
                                      compute.wait(ready)                           newer values may not be computed yet in another stream
                                      compute: newer writes -> memory
    hold:                             compute: values -> held
                                      ready = compute.record()
    land:                                                   write.wait(ready)       the values may not be computed yet
                                                            write: held -> staging  (staged)
                                                            write: held -> store    (direct)
                                                            landed = write.record()
                                                            landed.sync()           the values may not have arrived yet
                                                            staging -> store        (staged)
    quiesce:                          read.record().sync()                          copies may still write memory that nobody was lent

A direct gather may run beside the scatter of the same rows and get them torn. That is allowed: such
a write has not landed when the slot is filled, so ``lend`` copies its values over those rows.

With a timeline, unless the device's memory is the host's, ``released`` and ``filled`` are timed
events, and so are three more: before the copies of ``fill`` (copy: from there to ``filled``), at
the end of ``lend`` (device: from there to the next ``released``), and before those of ``land``.
Nothing waits for them: their times are taken when they are found done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Buffer, Device, Event, HostArray, Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.forwarding import Write, WriteLog, WrittenRows, newest
from pinfeed.pipeline.sources.base import HostBatch, RowGroup, part_nbytes
from pinfeed.profiling.counters import Counters
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Store


class Cancelled(Exception):
    """The loop has ended; nobody wants this batch any more."""


@dataclass
class Slot:
    """Buffers of one batch and the events that guard them."""

    staging: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Page-locked, by part, for those that are staged; kept from batch to batch."""
    sources: list[HostArray] = field(default_factory=list)
    """Parts that the device reads itself; kept until it has."""
    memory: list[tuple[int, Buffer]] = field(default_factory=list)
    """Of the device, one per part, for the next fill: bytes and buffer."""
    compute: Stream | None = None
    """The consumer's stream when the memory was taken."""
    released: Event | None = None
    filled: Event | None = None
    load: HostBatch | None = None
    error: Exception | None = None
    """Why the next batch was not filled, where it was to be together with those that the slot carries."""
    tensors: list[Tensor] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    """Bytes of device memory that each part of this fill took; 0 where it brought its own."""
    seen: int = 0
    """The gather saw every write numbered below this."""
    number: int = 0
    """Of the first batch."""
    draw_s: float = 0.0
    """Time that it took to ask the source."""
    drawn_s: float = 0.0
    """When that was done."""
    read_s: float = 0.0
    """That, and the time that the gather took."""
    held_s: float = 0.0
    """Time until the last copy was done."""
    ready_s: float = 0.0
    """When it was filled, as far as the host is concerned."""


@dataclass
class HeldValues:
    """Values of a write-back, on the device: for each group of rows one tensor per store, None where a store stays as it is."""

    tensors: list[list[Tensor | None]]
    compute: Stream
    """The consumer's stream when they were taken."""
    ready: Event


@dataclass
class PendingWrite:
    """A write-back under way."""

    write: Write[HeldValues]
    groups: Sequence[RowGroup]
    log: WriteLog[HeldValues]
    """Of its loop."""
    batch: int
    """Whose values they are."""


class Transfer:
    """Moves batches between host and device. One loop at a time.

    Args:
        device: Where to.
        n_slots: Batches under way at a time.
        capacity: Bytes of each part of a full batch, where they are known in advance; grows with
            what passes through.
        counters: Counts.
    """

    def __init__(
        self, device: Device, n_slots: int, capacity: Sequence[int], counters: Counters
    ) -> None:
        self.device = device
        self.counters = counters
        # a copy on the host is a read
        self._timeline = counters.timeline
        self._timed = counters.timeline is not None and not device.unified
        # for good: a new stream strands the allocator's blocks
        self._read = device.stream("read")
        self._write = device.stream("write")
        self._capacity = list(capacity)
        self.slots = [Slot() for _ in range(n_slots)]
        # those that the loop uses, and batches in each
        self._active = self.slots
        self._n_together = 1
        self._write_staging: dict[int, npt.NDArray[np.uint8]] = {}
        self.log: WriteLog[HeldValues] = WriteLog()
        self._stopping = False
        self._asked: Event | None = None
        """What the loop had given the device to do when it asked for a batch last."""
        self._lent: tuple[int, int, Event] | None = (
            None  # number, count and beginning of the batches that the loop works on, if timed
        )

    def begin(self, n_slots: int, batches_per_slot: int) -> Sequence[Slot]:
        """A loop begins, on so many of the slots, each for so many batches: nothing is under way, all earlier writes have landed."""
        self.log = WriteLog()
        self._stopping = False
        self._active = self.slots[:n_slots]
        self._n_together = batches_per_slot
        return self._active

    def stop(self) -> None:
        """The loop has ended: a fill under way ends at its next step.

        May be called from any thread.
        """
        self._stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self._stopping:
            raise Cancelled

    def reserve(self, slot: Slot) -> None:
        """Consumer.

        Give the slot memory for its next batches; what it lent before belongs to the user.
        """
        unlock_freed()  # this thread captures no CUDA graph while it asks for a batch
        compute = self.device.current_stream()
        slot.load = None
        slot.seen = self.log.landed
        sizes = [nbytes * self._n_together for nbytes in self._capacity]
        slot.memory = [
            (nbytes, self.device.empty(nbytes, compute) if nbytes else None) for nbytes in sizes
        ]
        slot.compute = compute
        slot.released = compute.record(timed=self._timed)
        self._asked = slot.released
        if self._lent is not None:
            self._end_lent(slot.released)

    def fill(self, slot: Slot, load: HostBatch, number: int) -> Slot:
        """A reader, several at a time for as many slots.

        Gather a batch and start its way to the device.

        Raises:
            Cancelled: ``stop`` was called.
        """
        if slot.filled is not None:
            slot.filled.sync()  # the last copies may still read staging; those of a fill that failed may still write its memory
        slot.number = number
        slot.load = load
        slot.tensors = []
        slot.needed = []
        slot.sources = []
        slot.seen = self.log.landed
        assert slot.compute is not None
        assert slot.released is not None
        start, late = self.counters.now(), False
        slot.held_s = start - slot.drawn_s
        direct: list[tuple[HostArray, Tensor]] = []
        staged: list[tuple[npt.NDArray[Any], Tensor]] = []
        for i, part in enumerate(load.parts):
            tensor = self.device.adopt(part, slot.compute)
            late |= tensor is not None
            slot.needed.append(0 if tensor is not None else part_nbytes(part))
            if tensor is None:
                memory, reserved = self._memory(slot, i)
                late |= not reserved
                tensor = self.device.tensor(memory, part.shape, part.dtype)
                if self.device.reaches(part):
                    direct.append((part, tensor))
                    slot.sources.append(part)
                else:
                    staged.append((self._gather(slot, i, part), tensor))
            slot.tensors.append(tensor)
        slot.memory = []  # from here on the tensors alone hold it
        self._read.wait(slot.released)  # kernels may still use what the memory was before
        if late:
            self._read.wait(
                slot.compute.record()
            )  # as above, for memory that was taken since; and for what moved there in that stream
        begun = self._read.record(timed=True) if self._timed else None
        try:
            for source, tensor in staged:
                self.device.copy(source, tensor, self._read)
            for _ in self.device.read(direct, self._read):
                self.check_stop()
        finally:
            slot.filled = self._read.record(
                timed=self._timed
            )  # the next fill of this slot waits for what is queued, after an error too
        slot.ready_s = now = self.counters.now()
        slot.read_s = slot.draw_s + now - start
        if self._timeline is not None:
            self._timeline.add("read", number, now - slot.read_s, now, len(load.batches))
            if begun is not None:
                self._timeline.add_timed("copy", number, begun, slot.filled, len(load.batches))
        return slot

    def is_idle(self) -> bool:
        """Consumer.

        Whether the device has done all that it had been given when the loop asked for a batch.
        """
        return self._asked is None or self._asked.is_done()

    def lend(self, slot: Slot) -> list[Tensor]:
        """Consumer.

        The batch's tensors, as if gathered now: the consumer's work from here on sees them whole.
        """
        assert slot.load is not None
        assert slot.filled is not None
        compute = self.device.current_stream()
        compute.wait(slot.filled)  # the rows may not be there yet
        tensors, groups = slot.tensors, slot.load.groups
        if compute != slot.compute:
            for tensor in tensors:
                self.device.share(tensor, compute)
        if writes := self.log.since(slot.seen):
            self._forward(writes, groups, tensors, compute)
        if self._timed and self._timeline is not None:
            self._lent = slot.number, len(slot.load.batches), compute.record(timed=True)
            self._timeline.settle()
        needed = [-(-nbytes // self._n_together) for nbytes in slot.needed]
        self._capacity = [
            _grown(*sizes) for sizes in itertools.zip_longest(self._capacity, needed, fillvalue=0)
        ]
        slot.tensors = []
        slot.load = None
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
        """Consumer.

        Take ``values``: a copy, for the caller may change them at once, and they may be the batch
        itself; or as they are.

        Raises:
            WriteBackError: A row is there twice.
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
        return PendingWrite(
            self.log.append(written, HeldValues(held, compute, compute.record())),
            groups,
            self.log,
            batch,
        )

    def land(self, landing: PendingWrite) -> None:
        """Writer. Bring held values into their stores.

        Raises:
            WriteBackError: An earlier write failed; later ones must not overtake it.
        """
        write, start = landing.write, self.counters.now()
        if landing.log.landed != write.number:
            raise WriteBackError("not written: an earlier write_back of this loop failed")
        self._write.wait(write.values.ready)  # the values may not be computed yet
        begun = self._write.record(timed=True) if self._timed else None
        staged: list[tuple[Store, Rows, npt.NDArray[Any]]] = []
        try:
            for group, tensors in zip(landing.groups, write.values.tensors, strict=True):
                direct: list[tuple[Store, Tensor]] = []
                for i, (store, held) in enumerate(
                    zip(group.stores, tensors, strict=False)
                ):  # none, where the group stays as it is
                    if held is None:
                        continue
                    if self.device.reaches(store):
                        direct.append((store, held))
                    else:
                        out = self._staged(
                            self._write_staging,
                            group.first + i,
                            (len(group.rows), *store.row_shape),
                            store.dtype,
                        )
                        self.device.copy(held, out, self._write)
                        staged.append((store, group.rows, out))
                self.device.write(direct, group.rows, self._write)
        finally:
            self._write.record().sync()  # the values may not have arrived yet
        for store, rows, values in staged:
            store.scatter(rows, values)
        landing.log.landed = write.number + 1
        now = self.counters.now()
        self.counters.write_s += now - start
        if self._timeline is not None:
            self._timeline.add(
                "write", landing.batch, start if begun is None else begun.at_s(), now
            )

    def forget(self) -> None:
        """Consumer. Drop the writes that every batch under way has seen."""
        self.log.forget(min(slot.seen for slot in self._active))

    def settle(self) -> None:
        """Wait until the device has done what a loop had given it when it asked for a batch last: somebody wants to know when."""
        if self._timed and self._asked is not None:
            self._asked.sync()  # no hazard, and nowhere in a loop: it is asked for by whoever reads the timeline

    def quiesce(self) -> None:
        """Consumer.

        Wait for what is under way and let go of it; nothing touches the slots' memory when this
        returns.
        """
        self._read.record().sync()  # copies may still write memory that nobody was lent
        if self._lent is not None:
            self._asked = self.device.current_stream().record(timed=True)
            self._end_lent(self._asked)
        for slot in self.slots:
            slot.load = None
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
        self._active = []
        self._write_staging = {}
        unlock_freed()

    def _end_lent(self, end: Event) -> None:
        """The loop has queued its work on the batches that it was lent."""
        assert self._lent is not None
        assert self._timeline is not None
        (number, n_batches, begun) = self._lent
        self._lent = None
        self._timeline.add_timed("device", number, begun, end, n_batches)

    def _memory(self, slot: Slot, i: int) -> tuple[Buffer, bool]:
        """Memory for part ``i``, and whether it was reserved; a part that is larger than any before gets its own now."""
        nbytes, memory = slot.memory[i] if i < len(slot.memory) else (0, None)
        if memory is not None and nbytes >= slot.needed[i]:
            return memory, True
        assert slot.compute is not None
        return self.device.empty(_grown(nbytes, slot.needed[i]), slot.compute), False

    def _gather(self, slot: Slot, i: int, part: HostArray) -> npt.NDArray[Any]:
        """The part, read into staging."""
        out = self._staged(slot.staging, i, part.shape, part.dtype)
        for _ in part.read(out):
            self.check_stop()
        return out

    def _staged(
        self,
        staging: dict[int, npt.NDArray[np.uint8]],
        i: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> npt.NDArray[Any]:
        """Staging memory of part ``i`` in this shape, made or grown where it has to be: for a full batch at once, for locking is slow."""
        nbytes = math.prod(shape) * dtype.itemsize
        if i not in staging or len(staging[i]) < nbytes:
            expected = self._capacity[i] if i < len(self._capacity) else 0
            staging[i] = self.device.staging(max(nbytes, expected))
        return staging[i][:nbytes].view(dtype).reshape(shape)

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Tensor:
        """A copy of the values of a group's store ``i``."""
        store = group.stores[i]
        memory = self.device.empty(
            self._capacity[group.first + i], compute
        )  # always a full batch's: memory of one size is found again
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
        for g, group in enumerate(groups):
            for write, dst_pos, src_pos in newest(writes, g, group.rows):
                elsewhere = compute != write.values.compute
                if elsewhere:
                    compute.wait(
                        write.values.ready
                    )  # the values may not be computed yet, in the stream that the consumer used then
                for i, held in enumerate(write.values.tensors[g]):
                    if held is not None:
                        if elsewhere:
                            self.device.share(held, compute)
                        self.device.copy_rows(
                            held, src_pos, tensors[group.first + i], dst_pos, compute
                        )


def _grown(capacity: int, needed: int) -> int:
    """Bytes for a part that took ``capacity`` so far.

    More than that comes in steps of a sixteenth: few sizes are found again.
    """
    if needed <= capacity or not capacity:
        return max(capacity, needed)
    step = 1 << max(0, needed.bit_length() - 5)
    return -(-needed // step) * step
