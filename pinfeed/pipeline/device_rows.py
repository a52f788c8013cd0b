"""DeviceRows: the memory on a device of batches whose rows an engine gathers and moves.

The engine owns the protocol of streams and events; ``pinfeed/native/engine.c`` shows it. Here is
what stays in Python: memory of torch, which the consumer allocates in its own stream, so that any
thread may free it at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pinfeed.devices.device import EngineDevice, Tensor
from pinfeed.devices.layout import RowLayout
from pinfeed.native.driver import Driver
from pinfeed.native.engine import Engine, Staged
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import RowDirection, StagedIndices
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, JobMemory, JobParts
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.pipeline.transfer import Transfer
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import Store

# Stands for the row indices among the positions of stores.
_INDICES = -1


class DeviceMover:
    """Moves the batches of one loop to a device, with compiled functions that wait for streams.

    Args:
        transfer: Mover of the feeder, with the streams of the copies and the slots.
        driver: Driver of the device.
    """

    def __init__(self, transfer: Transfer, driver: Driver) -> None:
        self.transfer = transfer
        """Mover of the feeder, which also writes rows back."""
        self.driver = driver
        """Driver of the device."""
        self.device: EngineDevice = transfer.device
        self.counters = transfer.counters
        self._slots: Sequence[DeviceSlot] = ()

    def begin(self, schedule: PrefetchSchedule) -> Sequence[DeviceSlot]:
        """Begin a loop, and return the slots that it uses."""
        self._slots = self.transfer.begin(schedule)
        return self._slots

    def stop(self) -> None:
        """End the loop at its next step. Any thread may call this."""
        self.transfer.stop()

    def quiesce(self) -> None:
        """Wait for queued copies, and drop the batches that were not lent (consumer)."""
        self.transfer.quiesce()


class DeviceParts:
    """The parts of a job, with those that go through staging memory before the others.

    The others are rows of stores that the device moves itself. If there are some, their row indices
    are staged. Short rows come first, because small parts share memory.

    Args:
        device: The device.
        kind: Whether a job reads rows, or writes them. Row indices to write are staged last.
        stores: Stores by their positions in a batch.
        memory_rows: Rows of each store of the batch.

    Attributes:
        sources: Rows, or row indices, of each part.
        n_staged: Number of parts that go through staging memory.
        places: Position of the rows of each store among the parts.
        index_part: Position of the row indices among them; None if there are none.
        direct: Moves by the device itself, see ``RowMoves.description``; None for none.
        job: The parts as an engine takes them.
    """

    def __init__(
        self,
        device: EngineDevice,
        kind: RowDirection,
        stores: Mapping[int, Store],
        memory_rows: Sequence[MemoryRows],
    ) -> None:
        reached = {k: store for k, store in stores.items() if device.reaches(store)}
        sources: dict[int, MemoryRows | StagedIndices] = {k: memory_rows[k] for k in stores}
        types = {k: (store.row_shape, store.dtype) for k, store in stores.items()}
        moves = device.row_moves(kind, reached) if reached else None
        if moves is not None:
            sources[_INDICES] = moves.indices
            types[_INDICES] = moves.indices.row_type
        last = _INDICES if kind == "scatter" else None
        order = sorted(sources, key=lambda k: (k in reached, k == last, sources[k].row_nbytes))
        self.places = places = {k: place for place, k in enumerate(order)}
        self.index_part = places.pop(_INDICES, None)
        self.n_staged = n = len(order) - len(reached)
        self.sources = [sources[k] for k in order]
        self.direct = None
        if moves is not None and self.index_part is not None:
            self.direct = moves.description(lambda table: places[table.store], self.index_part)
        ranks = [places[k] for k in stores]
        is_sorted = ranks == list(range(len(order)))
        row_types = [types[k] for k in order]
        self.job = JobParts(self.sources[:n], row_types, None if is_sorted else ranks)


class DeviceRows(DeviceMover):
    """Moves the batches of one loop, whose rows an engine gathers, to a device.

    Args:
        transfer: Mover of the feeder, with the stream of the copies and the slots.
        driver: Driver of the device.
    """

    most_threads = 8
    """Threads of an engine; they and the copies to the device share the memory of the host."""
    cached_nbytes = 32 << 20
    """Bytes of staging memory that stays in the caches, from which a device reads, too."""

    engine: Engine
    """Engine of the loop, which sets this."""
    _parts: DeviceParts

    def arrange(self, stores: Sequence[Store], memory_rows: Sequence[MemoryRows]) -> JobParts:
        """Return the parts of each job.

        Args:
            stores: Stores of the rows.
            memory_rows: Rows of each store, in memory.
        """
        every = dict(enumerate(stores))
        self._parts = DeviceParts(self.device, "gather", every, memory_rows)
        return self._parts.job

    def staged(self, layout: RowLayout) -> Staged:
        """Return how the jobs move, of which none is larger than ``layout``."""
        parts = self._parts
        nbytes = [*layout.offsets, layout.nbytes][parts.n_staged]
        staging = [self.transfer.staging_of(slot, nbytes) for slot in self._slots]
        return Staged(
            self.driver,
            self.transfer.read_stream.handle,
            [memory.ctypes.data for memory in staging],
            len(parts.sources),
            # The device has compiled the kernels, and reads rows until the last job has ended.
            (staging, parts.sources, self.device),
            parts.direct,
        )

    def allocate_rows(self, layout: RowLayout, batch: HostBatch, slot: Any) -> JobMemory:
        """Allocate the memory of a job (consumer)."""
        log = self.transfer.log
        if len(log):
            # No batch needs values that are in their stores.
            log.forget(log.completed)
        compute = self.device.current_stream()
        slot.compute = compute
        wholes, _ = self.device.empty_parts(layout, compute)
        # The stream of the loop may change before it waits for the reads of the indices.
        index_part = self._parts.index_part
        slot.indices = [] if index_part is None else [wholes[index_part]]
        addresses = list(map(self.device.address, wholes))
        if len(batch.batches) == 1:
            tensors = deque([wholes])
        else:
            sizes = [n for n, _ in batch.batches]
            cut = [self.device.split(whole, sizes) for whole in wholes]
            tensors = deque(map(list, zip(*cut, strict=True)))
        offsets = layout.offsets[: self._parts.n_staged]
        return JobMemory(tensors, offsets, wholes, addresses, compute.handle)

    def stream_handle(self) -> int:
        """Return the handle of the consumer's current stream."""
        return self.device.current_stream().handle

    def is_idle(self) -> bool:
        """Return whether the device had done all work queued before the last request (consumer)."""
        return bool(self.engine.result.is_idle)

    def lend(self, slot: Any) -> deque[list[Tensor]]:
        """Return the tensors of each of the slot's batches (consumer)."""
        if self.device.current_stream() != slot.compute:
            self._share(slot, [*slot.batch_tensors, slot.indices])
        tensors: deque[list[Tensor]] = slot.batch_tensors
        return tensors

    def lend_next(self, slot: DeviceSlot, tensors: Sequence[Tensor]) -> None:
        """Lend the slot's next batch, if the loop has changed its stream (consumer)."""
        compute = self.device.current_stream()
        if compute != slot.compute:
            self.engine.wait_again(compute.handle)
            # Later batches of the slot are in the same memory.
            self._share(slot, [tensors])

    def put(self, rows: Rows, source: MemoryRows, tensor: Tensor) -> None:
        """Gather rows into a lent tensor, and wait for the copy (consumer).

        Raises:
            ReadError: If the rows cannot be read.
        """
        compute = self.device.current_stream()
        shape, dtype, _ = self.device.describe(tensor) or ((), None, False)
        assert dtype is not None
        staging = self.device.staging(max(1, len(rows) * source.row_nbytes))
        out = staging[: len(rows) * source.row_nbytes].view(dtype).reshape(shape)
        source.gather(rows, out)
        self.device.copy(out, tensor, compute)
        compute.record().sync()  # the staging memory is freed next

    def _share(self, slot: DeviceSlot, batches: Any) -> None:
        """Share the memory of batches with the consumer's current stream."""
        compute = self.device.current_stream()
        for tensors in batches:
            for tensor in tensors:
                self.device.share(tensor, compute)
        slot.compute = compute
