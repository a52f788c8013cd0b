"""RowWindow: the batches of a training loop whose rows a device reads and writes itself.

Batch k is gathered while batches k-d to k-1, the window, may not be written yet; d is the depth.
Their rows are in flight, and are not read from the stores: when the loop requests batch k, it takes
them on the device from the newest batch that has them. All other rows are gathered after the write
of batch k-d-1. So it is known when a batch is drawn where the newest value of each row will be,
whatever is written and when. A write is work of the device, and no thread waits for it.

``Transfer`` moves the batches. Here are the waits for writes, of which a device makes those of one
batch in one call. The numbers of hazards continue those in transfer.py.

    readers                          consumer

    fill:   rows in flight
            Transfer.fill
                                     queue: Transfer.queue:
                                                read.wait(written of batch k-d-1)  (13)
                                                read: store -> memory  rows that are not in flight
                                     lend:  Transfer.lend
                                            compute: batches k-d to k-1 -> memory  rows in flight
                                            free memory of batch k-d-1
                                            compute: cache -> memory               cached rows
                                     write: compute: values -> cache               cached rows
                                            Device.write_batch:
                                                write.wait(compute.record())       (7)
                                                write: memory -> store
                                                written = write.record()
    end, flush:                             compute: cache -> memory               changed rows
                                            last flushed part .sync()              (15)
                                            Device.write_batch
    finish, quiesce:                 write.record().sync()                         (9), (14)

    (7) the values may not be computed yet
    (9) writes may still use memory that is about to be freed
   (13) the newest values may not be in the stores yet
   (14) the caller reads the stores next
   (15) the parts of a cache may not fit in memory together

The memory of a batch is kept until a later batch was lent that has waited for its write (13), (4).
So the stream of the loop has passed the write before it uses the memory again. If the loop has
changed its stream, the memory of all these batches is shared with the new stream first. A program
that changes its stream makes the new one wait for the step, as torch demands, so rows in flight
need no wait.

A row in a cache is not gathered, and only a flush writes it: row_cache.py brings its newest value
to each batch. The copies that a flush writes are shared with the stream of the writes. At
most two parts of a cache are in memory at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.batch_copies import RowWrites, share_each
from pinfeed.devices.device import Event, RowCopy, Stream, Tensor, TensorRange
from pinfeed.errors import ClosedError
from pinfeed.pipeline.forwarding import PositionRange
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.row_cache import ChangedRows
from pinfeed.pipeline.slot import DeviceSlot
from pinfeed.pipeline.sources.source import BatchValues, HostBatch, RowGroup
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.write_queue import LoopWrites

_ENDED = "the loop has ended, and its batches with it; begin another loop"


@dataclass(eq=False)
class _InFlight:
    """A batch that the loop has received, and whose rows may be in flight."""

    indices: Sequence[Tensor]
    """For each group, its row indices on the device."""
    values: Sequence[list[Tensor]]
    """For each group, the newest values of its rows, one tensor for each store."""
    changed: list[set[int]]
    """For each group, the positions of the stores that were written."""
    written: Event | None = None
    """Event after the last write of the batch; None if it has not changed."""


class RowWindow:
    """Moves the batches of one loop, and writes their rows back.

    Args:
        transfer: Mover of the batches.
        depth: Number of batches in the window.
    """

    def __init__(self, transfer: Transfer, depth: int) -> None:
        self._transfer = transfer
        self.counters = transfer.counters
        self.device = transfer.device
        self.reserve = transfer.reserve
        # Another feeder on the device may choose another route while the loop runs.
        self.fill = functools.partial(transfer.fill, reads_rows=True)
        self._depth = depth
        self._write = transfer.write_stream
        self.caches = transfer.caches
        # Event after the last write of rows of a cache.
        self._flushed: Event | None = None
        # The batches of the window and the one before them, by number, oldest first. Their memory
        # is shared with each stream in which the loop has requested a batch since.
        self._batches: dict[int, _InFlight] = {}
        # Stream in which the last batch was lent.
        self._stream: Stream | None = None

    def queue(self, slot: DeviceSlot) -> None:
        """Queue the copies of a full slot, as ``Transfer.queue`` does (consumer)."""
        # Earlier batches have waited for earlier writes.
        last = self._batches.get(slot.number - self._depth - 1)
        self._transfer.queue(slot, None if last is None else last.written)

    def lend(self, slot: DeviceSlot) -> deque[list[Tensor]]:
        """Return the tensors of the slot's batch with their newest values (consumer)."""
        return self._transfer.lend(slot, self._update)

    def write(self, written: BatchValues, *, has_failed: bool) -> None:
        """Queue the write of a batch that was lent (consumer).

        Args:
            written: The values.
            has_failed: Whether an earlier write has failed. Then only rows in caches change.
        """
        number, groups, values = written
        batch = self._batch(number)
        compute = self.device.current_stream()
        has_switched = compute != self._stream
        stored: list[RowWrites] = []
        for g, (group, tensors) in enumerate(zip(groups, values, strict=True)):
            # The program may have changed its stream since it allocated these.
            share_each(self.device, tensors or (), compute)
            if group.cached is not None:
                tensors = self.caches.put(group.cached, tensors, compute)
            if has_switched:
                # Their memory is freed in a stream in which the loop requests a batch.
                share_each(self.device, tensors or (), self._stream)
            pairs = []
            for i, tensor in enumerate(tensors or ()):
                if tensor is not None:
                    batch.values[g][i] = tensor
                    batch.changed[g].add(i)
                    pairs.append((group.stores[i], tensor))
            rows = group.written
            if pairs and len(rows):
                stored.append(RowWrites(pairs, rows, batch.indices[g]))
        if not has_failed:
            batch.written = self._queue_write(number, stored, compute)

    def write_cached(self, group: RowGroup, changed: ChangedRows) -> None:
        """Queue a write of rows of a cache (consumer, or a thread that ends the loop)."""
        if self._flushed is not None:
            self._flushed.sync()  # the parts of a cache may not fit in memory together
        share_each(self.device, changed.values, self._write)
        pairs = zip(group.stores, changed.values, strict=True)
        values = [(store, tensor) for store, tensor in pairs if tensor is not None]
        stored = [RowWrites(values, group.rows)]
        compute = self.device.current_stream()
        self._flushed = self._queue_write(self.caches.batch, stored, compute)

    def _queue_write(self, number: int, stored: Sequence[RowWrites], compute: Stream) -> Event:
        """Queue a write of values that are queued to be computed; return the event after it.

        Args:
            number: Number of the batch, for the timeline.
            stored: The rows.
            compute: Stream in which the values are computed.
        """
        timeline = self.counters.timeline
        timed = timeline is not None
        written: Event
        begun, written = self.device.write_batch(stored, (compute, self._write), timed=timed)
        if timeline is not None and begun is not None:
            timeline.add_timed("write", number, begun, written)
        return written

    def finish(self) -> None:
        """Wait until all writes are in their stores (consumer, or a thread that ends the loop)."""
        # After an interrupt in ``write``, too, which may have come before its event.
        self._write.record().sync()  # the caller reads the stores, or frees the values next

    def quiesce(self) -> None:
        """Wait for queued copies and release their memory (consumer)."""
        # An interrupt may have ended the last call of this.
        self.finish()
        self._transfer.quiesce()
        self._batches = {}

    def _update(self, slot: DeviceSlot, compute: Stream) -> None:
        """Copy the newest values of rows to a batch, and note where they are from now on."""
        batch = slot.batch
        assert batch is not None
        if compute != self._stream:
            self._share(compute)
        tensors = slot.tensors
        values = [tensors[group.first : group.first + len(group.stores)] for group in batch.groups]
        if len(tensors) > len(batch.parts):
            self._forward(batch, tensors[-1], values, compute)
        self._free(slot.number - self._depth - 1)
        self.caches.lend(batch, tensors, slot.number, compute)
        indices = []
        for g, group in enumerate(batch.groups):
            assert group.ids_part is not None
            own = [tensors[group.ids_part]]
            if group.cached is not None:
                # The cache has the newest values of the other rows.
                values[g] = group.cached.bypassed(values[g])
                own = group.cached.bypassed(own)
            indices += own
        changed: list[set[int]] = [set() for _ in values]
        self._batches[slot.number] = _InFlight(indices, values, changed)

    def _forward(
        self,
        batch: HostBatch,
        positions: Tensor,
        values: Sequence[Sequence[Tensor]],
        compute: Stream,
    ) -> None:
        """Copy the newest values of rows in flight to a batch."""
        assert batch.shared is not None
        copies: list[RowCopy] = []
        frozen: list[list[RowCopy]] = []
        for g, overlaps in enumerate(batch.shared.overlaps):
            for number, (latest, hidden) in overlaps.items():
                earlier = self._batch(number)
                pairs = zip(earlier.values[g], values[g], strict=True)
                places = _ranges(positions, latest)
                if not batch.groups[g].is_frozen:
                    copies += [RowCopy(*pair, *places) for pair in pairs]
                    continue
                # All rows were gathered. Those that the program has written are newer, also if a
                # batch has them that has not.
                every = places, _ranges(positions, hidden)
                changed = [pair for i, pair in enumerate(pairs) if i in earlier.changed[g]]
                frozen.append([RowCopy(*pair, *each) for pair in changed for each in every])
        self.device.copy_rows(copies, compute)
        # The newest batch comes first, and its rows last.
        for of_batch in reversed(frozen):
            self.device.copy_rows(of_batch, compute)

    def _batch(self, number: int) -> _InFlight:
        """Return a batch that was lent.

        Raises:
            ClosedError: If the loop has ended, for example in a signal handler.
        """
        try:
            return self._batches[number]
        except KeyError:
            raise ClosedError(_ENDED) from None

    def _free(self, number: int) -> None:
        """Free the memory of a batch, if it was lent. A wait for its write was queued before."""
        self._batches.pop(number, None)

    def _share(self, compute: Stream) -> None:
        """Share the memory of all batches with a stream, to which the loop has changed."""
        self._stream = compute
        for batch in self._batches.values():
            share_each(self.device, itertools.chain(batch.indices, *batch.values), compute)


def _ranges(positions: Tensor, shared: PositionRange) -> tuple[TensorRange, TensorRange]:
    """Return the positions of rows in the earlier and in the later of two batches."""
    begin, n = shared
    return TensorRange(positions, begin + n, n), TensorRange(positions, begin, n)


class WindowWrites(LoopWrites):
    """Write-backs of a window, and their first error.

    Args:
        window: The window.
        threads: Threads of the loop.
    """

    def __init__(self, window: RowWindow, threads: LoopThreads) -> None:
        super().__init__(threads, window.caches)
        self._window = window

    def write(self, batch: BatchValues, *, copied: bool, check: bool) -> None:
        """Queue the write of a batch (consumer).

        Nothing is copied, because a caller that changes the values afterwards waits for the write.
        """
        self.require_running()
        if check:
            self.check()
        write = functools.partial(self._window.write, has_failed=self._has_failed)
        self._queue(batch.number, write, batch)

    def check(self) -> None:
        if self._has_failed:
            self._raise_noted(is_over=not self._threads.has_ended)

    def save(self) -> None:
        super().save()
        self.finish()

    def finish(self) -> None:
        counters = self._window.counters
        start = counters.now()
        try:
            self._window.finish()
        except Exception as error:
            self._note(error)
        # The GPU may still work on the last training steps.
        counters.count_write_wait(start, idle=False)

    def _write_cached(self, group: RowGroup, changed: ChangedRows) -> None:
        self._queue(self._window.caches.batch, self._window.write_cached, group, changed)

    def _queue(self, batch: int, write: Callable[..., None], *args: Any) -> None:
        """Queue a write, and keep its error."""
        try:
            if not self._threads.queue_write(batch, write, *args):
                # The memory of the loop is freed next.
                self._window.finish()
        except ClosedError:
            raise
        except Exception as error:
            self._note(error)
