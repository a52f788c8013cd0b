"""HostTransfer: moves batches on a device that uses host memory, such as the CPU.

Rows are gathered into the batch itself, and written back from the values themselves. No work is
queued in a stream, so no thread waits for an event, and the reader threads allocate the memory. The
code that this class shares with other devices is in ``transfer.py``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.part_memory import known_nbytes
from pinfeed.pipeline.pending_write import PendingWrite
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.base import HostBatch, RowGroup
from pinfeed.pipeline.transfer import Transfer
from pinfeed.stores.base import HostArray, part_nbytes


class HostTransfer(Transfer):
    """Gathers batches into memory of the host, and writes rows back from there."""

    def reserve(self, slot: Slot) -> None:
        """Make the slot ready to be filled again (consumer)."""
        unlock_freed()
        slot.batch = None
        slot.seen = self.log.completed

    def fill(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather a batch, with the arguments and errors of ``Transfer.fill`` (reader)."""
        slot.number = number
        slot.batch = batch
        slot.seen = self.log.completed
        slot.needed = []
        slot.adopted_nbytes = 0
        slot.tensors = []
        for i, part in enumerate(batch.all_parts()):
            slot.tensors.append(self._read_part(slot, i, part))
        if len(batch.batches) > 1:
            # The consumer thread need not do this, because newer values reach the same memory.
            slot.batch_tensors = self._cut(batch, slot.tensors[: len(batch.parts)])
        else:
            slot.batch_tensors.clear()
        slot.ready_s = self.counters.now()
        slot.read_s = slot.source_s + slot.rows_s + slot.ready_s - slot.made_s
        return slot

    def transform(self, slot: Slot, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a slot, as ``Transfer.transform`` does."""
        self.check_stop()
        batch = slot.batch
        assert batch is not None
        tensors = slot.tensors
        if batch.n_data is None:
            # Only the function keeps the memory of its batch.
            slot.tensors = []
        made = function(batch.data(tensors))
        batch.rebuild = lambda tensors: made
        slot.ready_s = self.counters.now()

    def lend(self, slot: Slot) -> deque[list[Tensor]]:
        """Return the tensors of each of the slot's batches (consumer), with newer values."""
        tensors = self._hand_over(slot, self._read)
        batch_tensors = slot.batch_tensors or deque((tensors,))
        slot.batch_tensors = deque()
        return batch_tensors

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
                    self.device.write(changed, group.rows, self._write)
        except BaseException:
            log.has_failed = True
            raise
        log.completed = pending.write.number + 1
        now = self.counters.now()
        self.counters.write_s += now - start
        if self._timeline is not None:
            self._timeline.add("write", pending.batch, start, now)

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Tensor:
        """Copy values of a group's store ``i`` into an array, which ``write`` also accepts."""
        store = group.stores[i]
        part = group.first + i
        shape = (len(group.rows), *store.row_shape)
        nbytes = math.prod(shape) * store.dtype.itemsize
        memory = self._parts.allocate(part, nbytes, self._batches_per_slot, compute)
        out: npt.NDArray[Any] = np.ndarray(shape, store.dtype, memory)
        self.device.copy(value, out, compute)
        return out

    def _read_part(self, slot: Slot, i: int, part: HostArray) -> Tensor:
        """Read part ``i`` into new memory, unless it is a tensor that can be lent itself."""
        device = self.device
        if (adopted := device.adopt(part, self._read)) is not None:
            slot.needed.append(0)
            slot.adopted_nbytes += known_nbytes(adopted)
            return adopted
        nbytes = part_nbytes(part)
        memory = self._parts.allocate(i, nbytes, self._batches_per_slot, self._read)
        slot.needed.append(nbytes)
        part.read(np.ndarray(part.shape, part.dtype, memory), self.check_stop)
        return device.tensor(memory, part.shape, part.dtype)
