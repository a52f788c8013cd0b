"""PrefetchLoop: a loop whose next batches reader threads fill.

A loop is a deque of calls that reader threads make. The results of these calls carry the order,
back-pressure, the end of the data, and errors with their tracebacks.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pinfeed.pipeline.loop import FillParts, Loop
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import Cancelled
from pinfeed.threads.call import Call, Pending
from pinfeed.threads.pool import ThreadPool


class PrefetchLoop(Loop):
    """A loop that prefetches.

    Args:
        parts: Mover, draws and functions of the loop.
    """

    _parts: FillParts

    def __init__(self, parts: FillParts) -> None:
        super().__init__(parts)
        self.keeps_last = parts.mover.device.unified
        self._turns: Iterator[int] = itertools.count()
        # Slots that are being filled or are full, in the order of their batches.
        self._filling: deque[Pending[Slot | None]] = deque()
        # Number of the first of these whose copies to the device are queued.
        self._n_queued = 0
        # The call that this thread has finished last.
        self._helped: list[Call[Slot | None]] = []
        self._result: Callable[[Any], Slot | None] = parts.wait

    def _slots(self) -> Callable[[], Slot | None]:
        self._start_readers()
        epochs = self._parts.epochs
        if epochs is None:
            return self._next_prefetched
        self._turns = epochs.turns()
        return functools.partial(epochs.next_slot, self._next_prefetched)

    @property
    def is_continuous(self) -> bool:
        return self._parts.epochs is not None

    def resume(self, schedule: PrefetchSchedule, epoch: int, batch: int) -> bool:
        epochs = self._parts.epochs
        assert epochs is not None
        # The threads work for the thread that began the loop, and may end with it.
        if self.owner is not threading.current_thread() or schedule != self._parts.schedule:
            return False
        if batch or not epochs.is_next(epoch):
            return False
        with self._ending:
            # Another thread may have ended the loop, because it forks the process.
            if self.threads.has_ended or self.threads.is_forked:
                return False
            self.is_between_epochs = False
        epochs.begin_next()
        return True

    def _pause(self) -> bool:
        epochs = self._parts.epochs
        if epochs is None or not epochs.has_read_ahead:
            return False
        self._parts.mover.pause()
        self._counters.receive_none()
        self.is_between_epochs = True
        return True

    def _start_readers(self) -> None:
        """Start the reader threads, which ``end`` joins."""
        parts = self._parts
        self.threads.start_readers(
            n_transform_threads=parts.n_transform_threads,
            transforms_on_device=parts.transform_on_device is not None,
        )
        self._submit = self.threads.reader.submit
        if parts.may_help and isinstance(self.threads.reader, ThreadPool):
            # Waking a reader thread takes longer than filling a small slot.
            self._result = self._finish

    def _finish(self, filled: Call[Slot | None]) -> Slot | None:
        """Fill a slot in this thread, unless a reader thread has begun to."""
        self._helped[:] = (filled,)
        return filled.finish()

    def _forget_slots(self) -> None:
        super()._forget_slots()
        while self._helped:
            # A reader thread may wait for this call, which an interrupt may have cut off.
            self._helped.pop().abandon(Cancelled())
        # An error of a fill keeps its tensors.
        self._filling.clear()

    def _next_prefetched(self) -> Slot | None:
        """Submit fills of all free slots, and wait for the next full slot."""
        parts = self._parts
        while self._free:
            slot = self._free.popleft()
            if parts.reserve is not None:
                parts.reserve(slot)
            # The first turn of an epoch changes the parts.
            turn = next(self._turns)
            filled = self._submit(parts.fill, slot, turn)
            if parts.transform is not None:
                threads = self.threads
                filled = threads.transformer.submit(apply, parts.transform, filled)
                if (transform := parts.transform_on_device) is not None:
                    filled = threads.device_transformer.submit(apply, transform, filled)
            self._filling.append(filled)
        filled_slot = self._result(self._filling.popleft())
        if parts.queue is not None and filled_slot is not None:
            self._queue_full(parts.queue, filled_slot)
        return filled_slot

    def _queue_full(self, queue: Callable[[Slot], object], slot: Slot) -> None:
        """Queue the copies of the next slot, and of those after it that are full already."""
        if self._n_queued:
            self._n_queued -= 1
        else:
            queue(slot)
        for filled in itertools.islice(self._filling, self._n_queued, None):
            # The loop raises an error when it requests the batch.
            if not filled.done() or filled.exception() is not None:
                return
            later = filled.result()
            if later is None:
                return
            queue(later)
            self._n_queued += 1


def apply(function: Callable[[Slot], object], pending: Pending[Slot | None]) -> Slot | None:
    """Call a function on the slot that another call returns, if any, and return the slot."""
    try:
        slot = pending.result()
    finally:
        # The error's traceback keeps this frame, which must not keep the call, because the call
        # keeps the error.
        del pending
    if slot is not None:
        function(slot)
    return slot
