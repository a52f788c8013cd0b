"""HostWrites: write-backs of a loop on a device that uses host memory, such as the CPU.

Rows are written back from the values themselves. Nothing is queued in a stream, so a write-back is
one call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pinfeed.devices.device import RowCopy, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.pipeline.cache_transfer import CacheTransfer
from pinfeed.pipeline.forwarding import WriteLog, forwards
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.pending_write import HeldValues, PendingWrite, require_distinct
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import HostBatch, RowGroup


class HostWrites:
    """Takes the values of a loop that are to be written back, and writes them to their stores.

    Args:
        transfer: Transfer of the loop's batches.
    """

    def __init__(self, transfer: HostTransfer) -> None:
        self.device = transfer.device
        self.counters = transfer.counters
        self.log: WriteLog[HeldValues] = WriteLog()
        self._transfer = transfer
        self._stream = transfer.device.current_stream()
        self._cache_transfer = CacheTransfer(transfer.device, transfer.counters)
        # Another thread that closes the feeder may take a number, too.
        self._numbers = itertools.count()

    def reserve(self, slot: Slot) -> None:
        """Make a slot ready to be filled again (consumer)."""
        slot.batch = None
        slot.seen = self.log.completed
        if len(self.log):
            self.log.forget(min(slot.seen for slot in self._transfer.active_slots))

    def fill(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather a batch, as ``HostTransfer.fill`` does (reader)."""
        slot.seen = self.log.completed
        return self._transfer.fill(slot, batch, number)

    def lend(self, slot: Slot) -> deque[list[Tensor]]:
        """Return the tensors of the slot's batch, with newer values and cached rows (consumer)."""
        batch = slot.batch
        assert batch is not None
        if batch.shared is not None and (writes := self.log.since(slot.seen)):
            for g, group in enumerate(batch.groups):
                for write, span in forwards(writes, g, slot.number, batch.shared.overlaps[g]):
                    earlier, later = (
                        self.device.wrap(batch.shared.positions[slice(*ends)])
                        for ends in (span.earlier, span.later)
                    )
                    copies = [
                        RowCopy(held, slot.tensors[group.first + i], earlier, later)
                        for i, held in enumerate(write.values.tensors[g])
                        if held is not None
                    ]
                    self.device.copy_rows(copies, self._stream)
        for group in batch.groups:
            if group.cached is not None:
                self._cache_transfer.lend(
                    group, group.cached, slot.tensors, slot.number, self._stream
                )
        return slot.batch_tensors

    def hold(
        self,
        groups: Sequence[RowGroup],
        values: Sequence[Sequence[Tensor | None] | None],
        batch: int,
        *,
        copied: bool,
    ) -> PendingWrite:
        """Take values that are to be written back, as ``Transfer.hold`` does (consumer)."""
        require_distinct(groups, values)
        held: list[list[Tensor | None]] = []
        for group, tensors in zip(groups, values, strict=True):
            kept = list(tensors) if tensors is not None else []
            if group.cached is not None:
                kept = self._cache_transfer.put(group.cached, tensors, self._stream)
            elif copied:
                kept = [
                    None if tensor is None else self._copy(tensor, group, i)
                    for i, tensor in enumerate(kept)
                ]
            held.append(kept)
        return self._pending(self.log, batch, [group.as_written() for group in groups], held)

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
        self.counters.write_s += now - start
        if self.counters.timeline is not None:
            self.counters.timeline.add("write", pending.batch, start, now)

    @property
    def has_caches(self) -> bool:
        """Whether the running loop has lent rows of a cache."""
        return bool(self._cache_transfer.caches)

    def changed_rows(self, *, is_last: bool) -> Iterator[PendingWrite]:
        """Yield writes of changed rows in caches, as ``Transfer.changed_rows`` does (consumer)."""
        for group, chunk in self._cache_transfer.all_changed_rows(is_last=is_last):
            yield self._pending(WriteLog(), chunk.batch, [group], [chunk.values])

    def note_flushed(self) -> None:
        """Note that the rows of ``changed_rows`` were written (consumer)."""
        self._cache_transfer.note_flushed()

    def quiesce(self) -> None:
        """Free the caches, and drop the batches in the slots (consumer)."""
        self._cache_transfer.close()
        self._transfer.quiesce()
        self.log = WriteLog()

    def _copy(self, value: Tensor, group: RowGroup, i: int) -> Any:
        """Copy values of a group's store ``i`` into an array, which ``write`` also accepts."""
        store = group.stores[i]
        shape = (len(group.rows), *store.row_shape)
        out = self._transfer.array(group.first + i, shape, store.dtype)
        self.device.copy(value, out, self._stream)
        return out

    def _pending(
        self,
        log: WriteLog[HeldValues],
        batch: int,
        groups: Sequence[RowGroup],
        held: list[list[Tensor | None]],
    ) -> PendingWrite:
        is_whole = [
            all(tensor is not None for tensor in tensors) if tensors else None for tensors in held
        ]
        values = HeldValues(held, self._stream, self._stream.record())
        write = log.append(batch, is_whole, values)
        return PendingWrite(next(self._numbers), write, groups, log)
