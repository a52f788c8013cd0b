"""CrewLoop: a loop over rows in memory, whose next batches a crew of native threads copies.

Python draws row indices, for many batches at a time, and hands tensors out. The crew copies the
rows (see ``pinfeed/native/crew.c``). The thread of the loop helps with the batch that it waits for.
At depth 0, there are no threads, and it copies every batch itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from pinfeed.errors import ReadError
from pinfeed.native.crew import Crew
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.row_source import RowSource, new_row_group
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.batches import sizes
from pinfeed.rows.orders import Rows

# Memory is as fast as a few cores can copy.
_MOST_THREADS = 4
# Batches whose rows do not stay in the cache until the loop uses them are written past it.
_BYPASS_BYTES = 8 << 20
# Waking a thread takes 10 to 50 us, in which it would copy about as many bytes.
_WAKE_BYTES = 256 << 10
_TINY_BYTES = 64 << 10

_address_of = operator.methodcaller("data_ptr")

Spans = Generator[Rows, None, None]
"""Row indices of consecutive batches, many batches at a time."""


class BatchPart(NamedTuple):
    """Shape and dtype of one part of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class CrewLoop(Loop):
    """A loop over rows in memory, whose next batches a crew copies.

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
        self._transfer = cast("HostTransfer", parts.mover)
        self._source = source
        self._batch_size = batch_size
        self._memory_rows = memory_rows
        self._draws_ahead = draws_ahead
        # Draws the next span, in the thread of the loop unless it has a reader thread.
        self._draw_span: Callable[[], Rows | None] = functools.partial(next, spans, None)
        self._take_span: Callable[[], Rows | None] = self._draw_span
        schedule = parts.schedule
        self._slot_rows = schedule.batches_per_slot * batch_size
        # The user may give an array another shape while the loop runs.
        self._row_types = [(store.row_shape, store.dtype) for store in source.stores]
        self._full = self._parts_of(self._slot_rows)
        self._full_sizes = sizes(self._slot_rows, batch_size)
        # Slots that the crew is filling, each with the number of its job, in order.
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
        n_threads = 0
        if self._parts.schedule.depth:
            n_threads = max(1, min(len(os.sched_getaffinity(0)) - 1, _MOST_THREADS))
            if self._draws_ahead:
                self.threads.start_readers()
                self._drawn = self.threads.reader.submit(self._draw_span)
                self._take_span = self._take_drawn
        n_slots = len(self._free)
        nbytes = self._slot_rows * sum(rows.row_nbytes for rows in self._memory_rows)
        # One copied slot should be left when the threads are woken.
        ring_at = min(-(-_WAKE_BYTES // max(1, nbytes)), max(1, n_slots - 1))
        self.threads.crew = self._crew = Crew(
            self._memory_rows,
            n_threads=n_threads,
            n_jobs=n_slots,
            # Tiny slots are copied in less time than a thread takes to wake up.
            ring_at=ring_at if n_slots * nbytes > _TINY_BYTES else n_slots + 1,
            bypass=(n_slots + 1) * nbytes > _BYPASS_BYTES,
        )
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
        failed, begin_s, slot.ready_s = self._crew.wait(job)
        if failed:
            self._fail(slot, self._memory_rows[failed - 1])
        slot.read_s = slot.ready_s - begin_s
        return slot

    def _next_recorded(self, timeline: Timeline) -> Slot | None:
        """Do the same, and record the time in which the rows were copied."""
        slot = self._next()
        if slot is not None:
            n_batches = len(slot.batch_tensors)
            timeline.add("read", slot.number, slot.ready_s - slot.read_s, slot.ready_s, n_batches)
        return slot

    def _submit(self) -> None:
        """Make the crew copy the next batches, unless the epoch has ended."""
        begin = self._position
        if begin == len(self._span):
            begin = 0
            if not self._draw():
                return
        n = min(self._slot_rows, len(self._span) - begin)
        is_full = n == self._slot_rows
        slot = self._free[0]
        parts = self._full if is_full else self._parts_of(n)
        arrays, slot.nbytes = self._transfer.allocate(parts)
        source = self._source
        group = new_row_group((self._span[begin : begin + n], 0, source.stores, None, None, None))
        batches = self._full_sizes if is_full else sizes(n, self._batch_size)
        slot.batch = batch = HostBatch((), source.rebuild, batches, [group])
        slot.batch_tensors = self._transfer.cut(batch, arrays)
        # The rows of the first batch are where the rows of all batches begin.
        addresses = map(_address_of, slot.batch_tensors[0])
        job = self._crew.submit(self._address + 8 * begin, n, addresses, (self._span, arrays))
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
                for memory_rows, tensor in zip(self._memory_rows, tensors, strict=True):
                    memory_rows.gather_to(rows[begin:end], tensor.data_ptr())
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
        self._address = span.ctypes.data
        return True

    def _take_drawn(self) -> Rows | None:
        """Return the span that the reader thread has drawn, and let it draw the next one."""
        span = self._drawn.result()
        if span is not None:
            self._drawn = self.threads.reader.submit(self._draw_span)
        return span

    def _parts_of(self, n: int) -> list[BatchPart]:
        return [BatchPart((n, *row_shape), dtype) for row_shape, dtype in self._row_types]

    def _forget_slots(self) -> None:
        super()._forget_slots()
        # The crew keeps what its threads still use.
        self._copying.clear()
        self._memory_rows = ()
        self._span = np.empty(0, np.int64)
