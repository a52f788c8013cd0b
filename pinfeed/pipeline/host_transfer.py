"""HostTransfer: moves batches on a device that uses host memory, such as the CPU; HostWrites.

Rows are gathered into the batch itself, in the thread that reads them, and are written back from
the values themselves, in one call. No work is queued in a stream, so no thread waits for an event.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Stream, Tensor
from pinfeed.devices.layout import RowLayout
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.forwarding import WriteLog
from pinfeed.pipeline.part_memory import grown, known_nbytes, layout
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import JobMemory, Slot
from pinfeed.pipeline.sources.source import Cancelled, HostBatch, RowGroup
from pinfeed.pipeline.writer import PendingWrite, Writer
from pinfeed.profiling.counters import Counters
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import Array

if TYPE_CHECKING:
    from pinfeed.devices.cpu import HostDevice


class HostTransfer:
    """Gathers batches into memory of the host, for one loop at a time.

    All batches take blocks of the same sizes, so that freed blocks are reused. A part that is
    larger than any before gets a block of its own, and later batches take blocks of that size.

    Args:
        device: Device on the host.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance.
        counters: Counters of the time that reading takes.
    """

    most_threads = 4
    """Threads of an engine; memory is as fast as a few cores can copy."""
    cached_nbytes = 8 << 20
    """Bytes of batches that stay in the caches until the loop uses them; more is written past."""
    lend = staticmethod(operator.attrgetter("batch_tensors"))
    """Returns the tensors of each of the batches in a slot (consumer)."""

    def __init__(self, device: HostDevice, capacity: Sequence[int], counters: Counters) -> None:
        self.device = device
        self.counters = counters
        self._capacity = list(capacity)
        self._n_batches = 1
        self._places = _places(self._capacity, 1)
        self.slots: list[Slot] = []
        self.active_slots: Sequence[Slot] = ()
        """Slots that the running loop uses."""
        self.is_stopping = False

    def begin(self, schedule: PrefetchSchedule) -> Sequence[Slot]:
        """Begin a loop, and return the slots that it uses."""
        unlock_freed()
        self.is_stopping = False
        self._n_batches = schedule.batches_per_slot
        self._places = _places(self._capacity, self._n_batches)
        self.slots += [Slot() for _ in range(schedule.n_slots - len(self.slots))]
        self.active_slots = self.slots[: schedule.n_slots]
        return self.active_slots

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self.is_stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self.is_stopping:
            raise Cancelled

    def fill(self, slot: Slot, batch: HostBatch) -> Slot:
        """Gather a batch, with a tensor for each part (reader; one thread per slot).

        A part that is a tensor already is not copied.

        Args:
            slot: The slot.
            batch: Batch to gather, or several batches.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        arrays, slot.nbytes = self.allocate(batch.parts)
        tensors: list[Tensor] = []
        for part, out in zip(batch.parts, arrays, strict=True):
            if out is None:
                tensors.append(self.device.adopt(part, None))
                slot.nbytes += known_nbytes(tensors[-1])
            else:
                part.read(out, self.check_stop)
                tensors.append(self._wrap(out))
        slot.batch = batch
        slot.tensors = tensors
        slot.batch_tensors = (
            deque((tensors,)) if len(batch.batches) == 1 else self.cut(batch, arrays)
        )
        slot.ready_s = self.counters.now()
        slot.read_s = slot.source_s + slot.rows_s + slot.ready_s - slot.source_done_s
        return slot

    def allocate(self, parts: Sequence[Any]) -> tuple[list[Array | None], int]:
        """Return memory for each part of a batch, and the bytes of all (reader).

        Args:
            parts: The parts, or what has the shape and the dtype of each. For a part that is a
                tensor already, there is None instead of memory.
        """
        device = self.device
        places, shared_nbytes = self._places
        shared = device.empty(shared_nbytes, None) if shared_nbytes else None
        arrays: list[Array | None] = []
        total = 0
        for i, part in enumerate(parts):
            if device.adopts(part):
                arrays.append(None)
                continue
            shape = part.shape
            dtype = part.dtype
            nbytes = math.prod(shape) * dtype.itemsize
            total += nbytes
            full, offset = places[i] if i < len(places) else (0, None)
            if nbytes > full:
                full = self._grow(i, nbytes)
                offset = None
            if offset is None:
                arrays.append(np.ndarray(shape, dtype, device.empty(full, None)))
            else:
                arrays.append(np.ndarray(shape, dtype, shared, offset))
        return arrays, total

    def allocate_rows(self, layout: RowLayout, batch: HostBatch, slot: Slot) -> JobMemory:
        """Allocate the memory of rows that an engine gathers (consumer)."""
        arrays, _ = self.allocate(layout.parts)
        tensors = self.cut(batch, arrays)
        # The rows of the first batch are where the rows of all batches begin.
        return JobMemory(tensors, [tensor.data_ptr() for tensor in tensors[0]], arrays)

    def stream_handle(self) -> int:
        """Return 0, because the host has no streams."""
        return 0

    def put(self, rows: Rows, source: MemoryRows, tensor: Tensor) -> None:
        """Gather rows into a tensor.

        Raises:
            ReadError: If the rows cannot be read.
        """
        from pinfeed.tensors.numpy_torch import memory_of

        source.gather(rows, memory_of(tensor))

    def transform(self, slot: Slot, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a full slot (transform thread).

        Args:
            slot: The slot, which has one batch.
            function: Function of the batch in the user's structure.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        self.check_stop()
        batch = slot.batch
        assert batch is not None
        tensors = slot.tensors
        if batch.n_data is None:
            # Only the function keeps the memory of its batch.
            slot.tensors = []
            slot.batch_tensors = deque(([],))
        made = function(batch.data(tensors))
        batch.rebuild = lambda tensors: made
        slot.ready_s = self.counters.now()

    def array(self, i: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array in a block of its own, of the size that part ``i`` of a batch takes."""
        nbytes = math.prod(shape) * dtype.itemsize
        full = self._capacity[i] if i < len(self._capacity) else 0
        return np.ndarray(shape, dtype, self.device.empty(max(nbytes, full), None))

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Return a copy of the values of a lent tensor (consumer)."""
        out: npt.NDArray[Any] = np.empty(shape, dtype)
        self.device.copy(tensor, out, None)
        return out

    def settle(self) -> None:
        """Do nothing, because all timestamps are known."""

    def pause(self) -> None:
        """Do nothing, because no timestamp is open."""

    def quiesce(self) -> None:
        """Drop the batches in the slots."""
        for slot in self.slots:
            slot.clear()

    def close(self) -> None:
        """Free the slots."""
        self.slots = []
        self.active_slots = ()
        unlock_freed()

    def cut(self, batch: HostBatch, arrays: Sequence[Any]) -> deque[list[Tensor]]:
        """Return the tensors of each of the batches that are gathered together.

        They are not views of one tensor, because an operation in place on one batch must not affect
        autograd in another batch.

        Args:
            batch: The batches.
            arrays: Memory of each part of all batches.
        """
        if len(batch.batches) == 1:
            return deque(([self._wrap(array) for array in arrays],))
        ranges = batch.ranges()
        columns = []
        for array in arrays:
            # numpy does not have bfloat16, whose kind is "V".
            wrap = self.device.wrap if array.dtype.kind == "V" else self.device.from_numpy
            columns.append([wrap(array[begin:end]) for begin, end in ranges])
        return deque(map(list, zip(*columns, strict=True)))

    def _wrap(self, array: Array) -> Tensor:
        return self.device.wrap(array) if array.dtype.kind == "V" else self.device.from_numpy(array)

    def _grow(self, i: int, nbytes: int) -> int:
        """Note that part ``i`` of a slot has more bytes than before; return the bytes to take."""
        capacity = [*self._capacity, *[0] * (i + 1 - len(self._capacity))]
        capacity[i] = grown(capacity[i], -(-nbytes // self._n_batches))
        # If two threads do this at the same time, a later batch does it again.
        self._capacity = capacity
        self._places = _places(capacity, self._n_batches)
        return max(nbytes, capacity[i] * self._n_batches)


class HostWrites(Writer):
    """Takes the values of a loop that are to be written back, and writes them to their stores.

    Args:
        transfer: Transfer of the loop's batches.
    """

    def __init__(self, transfer: HostTransfer) -> None:
        super().__init__(transfer.device, transfer.counters)
        self._transfer = transfer
        self._stream = transfer.device.current_stream()

    def reserve(self, slot: Slot) -> None:
        """Make a slot ready to be filled again (consumer)."""
        slot.batch = None
        slot.seen = self.log.completed
        if len(self.log):
            # Every batch that is not lent yet has seen these writes.
            self.log.forget(min(slot.seen for slot in self._transfer.active_slots))

    def fill(self, slot: Slot, batch: HostBatch) -> Slot:
        """Gather a batch, as ``HostTransfer.fill`` does (reader)."""
        slot.seen = self.log.completed
        return self._transfer.fill(slot, batch)

    def lend(self, slot: Slot) -> deque[list[Tensor]]:
        """Return the tensors of the slot's batch, with newer values and cached rows (consumer)."""
        self._update_rows(slot, self._stream)
        return slot.batch_tensors

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Write values back to their stores (a writer, or the consumer at depth 0)."""
        log = pending.log
        if log.has_failed:
            raise WriteBackError("not written: an earlier write_back of this loop failed")
        start = self.counters.now()
        try:
            for group, held in zip(pending.groups, pending.write.values.tensors, strict=True):
                # An unchanged group has no tensors.
                pairs = zip(group.stores, held, strict=False)
                changed = [(store, tensor) for store, tensor in pairs if tensor is not None]
                if len(group.rows):
                    self.device.write(changed, group.rows, self._stream)
        except BaseException:
            log.has_failed = True
            raise
        log.completed = pending.write.number + 1
        now = self.counters.now()
        self.counters.counts.write_s += now - start
        if self.counters.timeline is not None:
            self.counters.timeline.add("write", pending.batch, start, now)

    def quiesce(self) -> None:
        """Free the caches, and drop the batches in the slots (consumer)."""
        self.caches.close()
        self._transfer.quiesce()
        self.log = WriteLog()

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Any:
        """Copy values of a group's store ``i`` into an array, which ``write`` also accepts."""
        store = group.stores[i]
        shape = (len(group.rows), *store.row_shape)
        out = self._transfer.array(group.first + i, shape, store.dtype)
        self.device.copy(value, out, compute)
        return out

    def _shared_positions(self, slot: Slot) -> Tensor:
        assert slot.batch is not None
        assert slot.batch.shared is not None
        return self.device.wrap(slot.batch.shared.positions)


def _places(
    capacity: Sequence[int], n_batches: int
) -> tuple[Sequence[tuple[int, int | None]], int]:
    """Return the places in memory of the parts of a slot.

    Returns:
        Bytes of each part, and its offset in the shared block, which is None for a part with a
        block of its own; and the bytes of the shared block, 0 for none.
    """
    sizes = tuple(nbytes * n_batches for nbytes in capacity)
    offsets, shared_nbytes = layout(sizes)
    return [(nbytes, offsets.get(i)) for i, nbytes in enumerate(sizes)], shared_nbytes


def rows_on_host(capacity: Sequence[int], n_batches: int) -> HostTransfer:
    """Return a transfer for rows that ``host_transform`` takes, on a device of its own.

    Args:
        capacity: Bytes of each part of a full batch; empty if they are unknown.
        n_batches: Number of batches for which blocks are kept for reuse.
    """
    from pinfeed.devices.cpu import HostDevice

    device = HostDevice(n_spare=n_batches * max(1, len(capacity)))
    return HostTransfer(device, capacity, Counters())
