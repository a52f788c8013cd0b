"""EngineLoop: a loop over rows in memory, whose next batches an engine gathers without Python.

Python draws row indices, for many batches at a time, and hands tensors out. The engine gathers the
rows and, with a GPU, moves them there (see ``pinfeed/native/engine.c``). The thread of the loop
helps with the batch that it waits for. At depth 0, there are no threads, and it gathers every batch
itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import cast

import numpy as np

from pinfeed.errors import ReadError
from pinfeed.native.engine import Engine
from pinfeed.native.library import address_of
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.device_rows import DeviceRows
from pinfeed.pipeline.engine_writes import EngineWrites
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.slot import JobParts, Slot
from pinfeed.pipeline.sources.row_source import GROUP_DEFAULTS, RowSource, new_row_group
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.order_batches import sizes
from pinfeed.rows.orders import Rows
from pinfeed.stores.store import row_nbytes

# Waking a thread takes 10 to 50 us, in which it would copy about as many bytes.
_WAKE_BYTES = 256 << 10
_TINY_BYTES = 64 << 10

Spans = Generator[Rows, None, None]
"""Row indices of consecutive batches, many batches at a time."""


class EngineLoop(Loop):
    """A loop over rows in memory, whose next batches an engine gathers.

    Args:
        parts: Mover of the loop, which allocates the batches, and its functions.
        source: Source of the rows, without ragged ones.
        batch_size: Rows of a batch.
        memory_rows: Rows of each store, in memory.
        spans: Row indices of the epoch.
        draws_ahead: Whether a reader thread iterates over ``spans``, if the loop prefetches.
    """

    def __init__(
        self,
        parts: LoopParts,
        source: RowSource,
        batch_size: int,
        memory_rows: Sequence[MemoryRows],
        spans: Spans,
        *,
        draws_ahead: bool,
    ) -> None:
        super().__init__(parts)
        self._mover = cast("HostTransfer | DeviceRows", parts.mover)
        self._source = source
        self._batch_size = batch_size
        self._store_rows = memory_rows
        self._draws_ahead = draws_ahead
        # Draws the next span, in the thread of the loop unless it has a reader thread.
        self._draw_span: Callable[[], Rows | None] = functools.partial(next, spans, None)
        self._take_span: Callable[[], Rows | None] = self._draw_span
        schedule = parts.schedule
        self._slot_rows = schedule.batches_per_slot * batch_size
        # The user may give an array another shape while the loop runs.
        stores = source.stores
        if isinstance(self._mover, DeviceRows):
            self._job = self._mover.arrange(stores, memory_rows)
        else:
            row_types = [(store.row_shape, store.dtype) for store in stores]
            self._job = JobParts(memory_rows, row_types)
        self._full = self._job.layout(self._slot_rows)
        if schedule.writes and self.writes is None and isinstance(self._mover, DeviceRows):
            self.writes = EngineWrites(
                self._mover, stores, memory_rows, batch_size, schedule, self.threads
            )
        self._row_nbytes = sum(map(row_nbytes, stores))
        self._full_sizes = sizes(self._slot_rows, batch_size)
        # Slots that the engine is filling, each with the number of its job, in order.
        self._copying: deque[tuple[Slot, int]] = deque()
        # Row indices of the running span, the position of the next slot in them, and the address
        # of the first index.
        self._span: Rows = np.empty(0, np.int64)
        self._position = 0
        self._address = 0
        self._numbers = itertools.count(parts.first, schedule.batches_per_slot)
        # Whether the epoch has more batches.
        self._has_rows = True

    def _slots(self) -> Callable[[], Slot | None]:
        mover = self._mover
        n_threads = 0
        if self._parts.schedule.depth:
            n_threads = max(1, min(len(os.sched_getaffinity(0)) - 1, mover.most_threads))
            if self._draws_ahead:
                (self._reader,) = self.threads.start_readers()
                self._drawn = self._reader.submit(self._draw_span)
                self._take_span = self._take_drawn
        n_slots = len(self._free)
        # Bytes that the threads gather for a slot.
        nbytes = self._slot_rows * self._job.staged_nbytes
        # One gathered slot should be left when the threads are woken.
        ring_at = min(-(-_WAKE_BYTES // max(1, nbytes)), max(1, n_slots - 1))
        # Tiny slots are gathered in less time than a thread takes to wake up.
        self._is_tiny = n_slots * nbytes <= _TINY_BYTES
        staged = mover.staged(self._full) if isinstance(mover, DeviceRows) else None
        self.threads.engine = self._engine = Engine(
            self._job.sources,
            n_threads=0 if staged is not None and self._is_tiny else n_threads,
            n_jobs=n_slots,
            ring_at=n_slots + 1 if self._is_tiny else ring_at,
            bypass=(n_slots + 1) * nbytes > mover.cached_nbytes,
            staged=staged,
        )
        if isinstance(mover, DeviceRows):
            mover.engine = self._engine
        timeline = self._counters.timeline
        return self._next if timeline is None else functools.partial(self._next_recorded, timeline)

    def _next(self) -> Slot | None:
        """Submit jobs for all free slots, and wait for the next full slot."""
        while self._has_rows and self._free:
            try:
                self._submit()
            except Exception:
                # The batches before the error come first. Then, the next attempt raises it.
                if not self._copying:
                    raise
                break
        if not self._copying:
            return None
        slot, job = self._copying.popleft()
        result = self._engine.wait(job, self._mover.stream_handle())
        slot.ready_s = result.end_s
        slot.read_s = result.end_s - result.begin_s
        if result.failed:
            failed = self._job.sources[result.failed - 1]
            assert isinstance(failed, MemoryRows)
            self._fail(slot, failed)
        return slot

    def _next_recorded(self, timeline: Timeline) -> Slot | None:
        """Do the same, and record the time in which the rows were copied."""
        slot = self._next()
        if slot is not None:
            n_batches = len(slot.batch_tensors)
            timeline.add("read", slot.number, slot.ready_s - slot.read_s, slot.ready_s, n_batches)
        return slot

    def _submit(self) -> None:
        """Make the engine gather the next batches, unless the epoch has ended."""
        begin = self._position
        if begin == len(self._span):
            begin = 0
            if not self._draw():
                return
        n = min(self._slot_rows, len(self._span) - begin)
        is_full = n == self._slot_rows
        slot = self._free[0]
        layout = self._full if is_full else self._job.layout(n)
        source = self._source
        rows = self._span[begin : begin + n]
        group = new_row_group((rows, 0, source.stores, *GROUP_DEFAULTS))
        batches = self._full_sizes if is_full else sizes(n, self._batch_size)
        slot.batch = batch = HostBatch((), source.rebuild, batches, [group])
        memory = self._mover.allocate_rows(layout, batch, slot)
        slot.batch_tensors = memory.tensors
        if (places := self._job.places) is not None:
            slot.batch_tensors = deque([tensors[k] for k in places] for tensors in memory.tensors)
        slot.nbytes = n * self._row_nbytes
        job = self._engine.submit(
            self._address + 8 * begin,
            n,
            memory.outs,
            (self._span, memory.owner),
            memory.devices,
            memory.stream,
        )
        if memory.devices and self._is_tiny:
            # The copy to the device then runs during the training step.
            self._engine.gather(job)
        self._free.popleft()
        self._position = begin + n
        slot.number = next(self._numbers)
        self._copying.append((slot, job))

    def _fail(self, slot: Slot, failed: MemoryRows) -> None:
        """Let a slot carry the batches before the first that cannot be read, and then its error.

        Raises:
            Exception: If no batch can be read.
        """
        batch = slot.batch
        assert batch is not None
        rows = batch.groups[0].rows
        n_good = 0
        with contextlib.suppress(ReadError):
            for (begin, end), tensors in zip(batch.ranges(), slot.batch_tensors, strict=True):
                for memory_rows, tensor in zip(self._store_rows, tensors, strict=True):
                    self._mover.put(rows[begin:end], memory_rows, tensor)
                n_good += 1
        if not n_good:
            raise failed.error()
        slot.error = failed.error()
        slot.nbytes = slot.nbytes * n_good // len(batch.batches)
        slot.batch = batch.cut(0, n_good)
        slot.batch_tensors = deque(itertools.islice(slot.batch_tensors, n_good))

    def _draw(self) -> bool:
        """Take the next span of row indices; return whether there is one."""
        span = self._take_span()
        if span is None:
            self._has_rows = False
            return False
        self._span = span
        self._address = address_of(span)
        return True

    def _take_drawn(self) -> Rows | None:
        """Return the span that the reader thread has drawn, and let it draw the next one."""
        span = self._drawn.result()
        if span is not None:
            self._drawn = self._reader.submit(self._draw_span)
        return span

    def _forget_slots(self) -> None:
        super()._forget_slots()
        # The engine keeps what its threads still use.
        self._copying.clear()
        self._store_rows = ()
        self._job = JobParts((), ())
        self._span = np.empty(0, np.int64)
