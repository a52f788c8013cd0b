"""HostWrites: write-backs of a loop on a device that uses host memory, such as the CPU.

Rows are written back from the values themselves. Nothing is queued in a stream, so a write-back is
one call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pinfeed.devices.device import Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.pipeline.forwarding import WriteLog
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import HostBatch, RowGroup
from pinfeed.pipeline.writer import PendingWrite, Writer


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
