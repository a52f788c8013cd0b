"""PrefetchLoop: a loop whose next batches reader threads fill; MeasuredLoop: maybe they do.

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

from pinfeed.pipeline.depth_choice import DepthChoice
from pinfeed.pipeline.loop import FillParts, Loop
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import Cancelled
from pinfeed.pipeline.transfer import Transfer
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
        if isinstance(parts.mover, Transfer):
            parts.mover.share_gathers(self.threads.gather_all)
        # Slots that are being filled or are full, in the order of their batches.
        self._filling: deque[Pending[Slot | None]] = deque()
        # The call that this thread has finished last.
        self._helped: list[Call[Slot | None]] = []
        self._result: Callable[[Any], Slot | None] = parts.wait

    def _slots(self) -> Callable[[], Slot | None]:
        self._start_readers()
        return self._in_epochs(self._next_prefetched)

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

    def _in_epochs(self, next_slot: Callable[[], Slot | None]) -> Callable[[], Slot | None]:
        """Return ``next_slot``, or a function that also ends each epoch of a continuous loop."""
        epochs = self._parts.epochs
        if epochs is None:
            return next_slot
        self._turns = epochs.turns()
        return functools.partial(epochs.next_slot, next_slot)

    def _pause(self) -> bool:
        epochs = self._parts.epochs
        if epochs is None or not epochs.has_read_ahead:
            return False
        self._parts.mover.pause()
        self._counters.receive_none()
        self._n_lent = 0
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
        return self._result(self._filling.popleft())


class MeasuredLoop(PrefetchLoop):
    """A loop that changes between prefetching and the synchronous loop, as measured times say.

    To become synchronous, it lends the prefetched batches, and waits for all write-backs. From then
    on, the thread of the loop fills one slot at a time, and completes each write-back at once. A
    later change to prefetching therefore has nothing to wait for. The reader threads start when the
    loop first prefetches.

    Args:
        parts: Mover, draws and functions of the loop.
        choice: Choice between the two ways.
    """

    def __init__(self, parts: FillParts, choice: DepthChoice) -> None:
        self._choice = choice
        super().__init__(parts)
        self._has_readers = False

    def _slots(self) -> Callable[[], Slot | None]:
        self._choice.begin()
        self._change(is_synchronous=self._choice.is_synchronous)
        return self._in_epochs(self._next_of_choice)

    def resume(self, schedule: PrefetchSchedule, epoch: int, batch: int) -> bool:
        is_next = super().resume(schedule, epoch, batch)
        if is_next:
            self._choice.begin()
        return is_next

    def _next_of_choice(self) -> Slot | None:
        """Return the next full slot, in the way that the choice prefers now."""
        if self._n_lent:
            self._choice.count(self._n_lent, self._counters.requested_s)
        is_synchronous = self._choice.is_synchronous
        if is_synchronous and self._filling:
            return self._result(self._filling.popleft())
        if self.threads.is_inline != is_synchronous:
            self._change(is_synchronous=is_synchronous)
        if is_synchronous:
            return self._parts.fill_now(self._free.popleft(), next(self._turns))
        return self._next_prefetched()

    def _change(self, *, is_synchronous: bool) -> None:
        """Begin, or change to the synchronous loop or back, when no slot is being filled."""
        if self.write_queue is not None:
            self.write_queue.drain()
        if not is_synchronous and not self._has_readers:
            self._start_readers()
            self._has_readers = True
        self.threads.is_inline = is_synchronous
        self.keeps_last = self._parts.mover.device.unified and not is_synchronous
        depth = 0 if is_synchronous else self._parts.schedule.depth
        self._parts.draws.compare(depth)
        if depth != self._counters.counts.depth:
            self._counters.change_depth(depth)


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
