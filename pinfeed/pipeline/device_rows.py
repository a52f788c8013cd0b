"""DeviceRows: the memory on a device of batches whose rows an engine gathers and moves.

The engine owns the protocol of streams and events; ``pinfeed/native/engine.c`` shows it. Here is
what stays in Python: memory of torch, which the consumer allocates in its own stream, so that any
thread may free it at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import EngineDevice, Tensor
from pinfeed.devices.layout import RowLayout
from pinfeed.native.driver import Driver
from pinfeed.native.engine import Engine, Staged
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import RowMoves, StagedIndices
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, JobMemory, JobParts
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.pipeline.transfer import Transfer
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import Store

# Stands for the row indices among the positions of stores.
_INDICES = -1


class DeviceRows:
    """Moves the batches of one loop, whose rows an engine gathers, to a device.

    Args:
        transfer: Mover of the feeder, with the stream of the copies and the slots.
        driver: Driver of the device.
    """

    most_threads = 8
    """Threads of an engine; they and the copies to the device share the memory of the host."""
    cached_nbytes = 32 << 20
    """Bytes of staging memory that stays in the caches, from which a device reads, too."""

    def __init__(self, transfer: Transfer, driver: Driver) -> None:
        self.transfer = transfer
        """Mover of the feeder, which also writes rows back."""
        self.driver = driver
        """Driver of the device."""
        self.device: EngineDevice = transfer.device
        self.counters = transfer.counters
        self.engine: Engine
        """Engine of the loop, which sets this."""
        self._slots: Sequence[DeviceSlot] = ()
        # Position of the row indices that the device needs among the parts of a job; None if the
        # engine gathers all rows.
        self._index_part: int | None = None
        self._read: npt.NDArray[np.int64] | None = None
        self._n_parts = self._n_sources = 0
        # Rows that the device reads until the last job has ended.
        self._reached: Sequence[object] = ()

    def begin(self, schedule: PrefetchSchedule) -> Sequence[DeviceSlot]:
        """Begin a loop, and return the slots that it uses."""
        self._slots = self.transfer.begin(schedule)
        return self._slots

    def arrange(self, stores: Sequence[Store], memory_rows: Sequence[MemoryRows]) -> JobParts:
        """Return the parts of each job; short rows come first, because small parts share memory.

        Args:
            stores: Stores of the rows.
            memory_rows: Rows of each store, in memory.
        """
        reached = {k: store for k, store in enumerate(stores) if self.device.reaches(store)}
        sources: dict[int, MemoryRows | StagedIndices] = dict(enumerate(memory_rows))
        types = {k: (store.row_shape, store.dtype) for k, store in enumerate(stores)}
        reads: RowMoves | None = None
        if reached:
            reads = self.device.row_moves("gather", reached)
            sources[_INDICES] = reads.indices
            types[_INDICES] = reads.indices.row_type
        # What the engine gathers comes before the rows that the device reads itself.
        order = sorted(sources, key=lambda k: (k in reached, sources[k].row_nbytes))
        self._n_parts = len(order)
        self._n_sources = len(order) - len(reached)
        self._reached = [memory_rows[k] for k in reached]
        if reads is not None:
            self._index_part = order.index(_INDICES)
            self._read = reads.description(lambda table: order.index(table.store), self._index_part)
        places = [order.index(k) for k in range(len(stores))]
        return JobParts(
            [sources[k] for k in order[: self._n_sources]],
            [types[k] for k in order],
            None if places == list(range(len(order))) else places,
        )

    def staged(self, layout: RowLayout) -> Staged:
        """Return how the jobs move, of which none is larger than ``layout``."""
        nbytes = [*layout.offsets, layout.nbytes][self._n_sources]
        staging = [self.transfer.staging_of(slot, nbytes) for slot in self._slots]
        return Staged(
            self.driver,
            self.transfer.read_stream.handle,
            [memory.ctypes.data for memory in staging],
            self._n_parts,
            # The device has compiled the kernels.
            (staging, self._reached, self.device),
            self._read,
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
        slot.indices = [] if self._index_part is None else [wholes[self._index_part]]
        addresses = list(map(self.device.address, wholes))
        if len(batch.batches) == 1:
            tensors = deque([wholes])
        else:
            sizes = [n for n, _ in batch.batches]
            cut = [self.device.split(whole, sizes) for whole in wholes]
            tensors = deque(map(list, zip(*cut, strict=True)))
        offsets = layout.offsets[: self._n_sources]
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
        source.gather_to(rows, staging.ctypes.data)
        out = staging[: len(rows) * source.row_nbytes].view(dtype).reshape(shape)
        self.device.copy(out, tensor, compute)
        compute.record().sync()  # the staging memory is freed next

    def stop(self) -> None:
        """End the loop; the engine ends with it. Any thread may call this."""
        self.transfer.stop()

    def quiesce(self) -> None:
        """Drop the batches in the slots; the engine has waited for its copies (consumer)."""
        self.transfer.quiesce()

    def _share(self, slot: DeviceSlot, batches: Any) -> None:
        """Share the memory of batches with the consumer's current stream."""
        compute = self.device.current_stream()
        for tensors in batches:
            for tensor in tensors:
                self.device.share(tensor, compute)
        slot.compute = compute
