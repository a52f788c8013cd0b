"""SynchronousLoop and PrefetchLoop: loops whose slots a Filler fills; EpochsAhead: their epochs.

The thread of a SynchronousLoop fills its only slot. A PrefetchLoop is a deque of calls that reader
threads make. The results of these calls carry the order, back-pressure, the end of the data, and
errors with their tracebacks.

A continuous loop reads the next epoch before it ends one. Its draws and threads stay, and turns are
numbered on. In the turn after an epoch's last slot, the source ends the epoch and opens the next
one. Thus one epoch of the source is open at a time.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pinfeed.pipeline.filler import Filler, Mover, Step
from pinfeed.pipeline.loop import Loop, LoopParts
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import BatchThunks, Cancelled, Source
from pinfeed.threads.call import Call, Pending, Workers
from pinfeed.threads.pool import ThreadPool


class Place(NamedTuple):
    """Turn, epoch, and number of the first batch of one use of a slot."""

    turn: int
    epoch: int
    number: int


@dataclass(kw_only=True)
class FillParts(LoopParts):
    """The parts of a loop whose slots a Filler fills."""

    mover: Mover
    filler: Filler
    epoch: int
    """Number of the first epoch."""
    reserve: Callable[[Slot], object] | None = None
    """Makes a slot ready to be filled; None if nothing has to be done."""
    queue: Callable[[Slot], object] | None = None
    """Queues the copies of a full slot to the device; None if batches are in host memory."""
    wait: Callable[[Pending[Slot | None]], Slot | None] = operator.methodcaller("result")
    """Waits for the last call for a slot."""
    may_help: bool = False
    """Whether the thread of the loop may fill a slot that no reader thread has begun to fill."""
    epochs: EpochsAhead | None = None
    """Epochs that the loop continues with; None if it ends after its epoch."""

    def places(self) -> Iterator[Place]:
        """Return the place of each use of a slot."""
        if self.epochs is not None:
            return self.epochs.places()
        numbers = itertools.count(self.first, self.schedule.batches_per_slot)
        return map(Place, itertools.count(), itertools.repeat(self.epoch), numbers)


class SynchronousLoop(Loop):
    """The loop without threads: it draws each batch, gathers it and lends it.

    Args:
        parts: Mover, filler and functions of the loop.
    """

    _parts: FillParts

    def __init__(self, parts: FillParts) -> None:
        super().__init__(parts)
        # This loop has a single slot, which it fills again and again.
        self._free = deque(self._free, maxlen=1)

    def _slots(self) -> Callable[[], Slot | None]:
        parts = self._parts
        return functools.partial(self._fill, self._free[0], parts.places(), parts.filler.steps)

    def _fill(self, slot: Slot, places: Iterator[Place], steps: Sequence[Step]) -> Slot | None:
        parts = self._parts
        if parts.reserve is not None:
            parts.reserve(slot)
        slot.turn, slot.epoch, slot.number = next(places)
        with parts.filler.context():
            filled = parts.filler.fill(slot)
            if filled is None:
                return None
            for step in steps:
                step.function(filled)
        if parts.queue is not None:
            parts.queue(filled)
        return filled


class PrefetchLoop(Loop):
    """A loop that prefetches.

    Args:
        parts: Mover, filler and functions of the loop.
    """

    _parts: FillParts

    def __init__(self, parts: FillParts) -> None:
        super().__init__(parts)
        self.keeps_last = parts.mover.device.unified
        self._places = parts.places()
        # Slots that are being filled or are full, in the order of their batches.
        self._filling: deque[Pending[Slot | None]] = deque()
        # Number of the first of these whose copies to the device are queued.
        self._n_queued = 0
        # The call that this thread has finished last.
        self._helped: list[Call[Slot | None]] = []
        self._result: Callable[[Any], Slot | None] = parts.wait
        # Threads for each step after the fill.
        self._steps: list[tuple[Workers, Callable[[Slot], object]]] = []

    def _slots(self) -> Callable[[], Slot | None]:
        parts = self._parts
        steps = parts.filler.steps
        reader, *others = self.threads.start_readers(step.n_threads for step in steps)
        self._submit = reader.submit
        self._steps = [(pool, step.function) for pool, step in zip(others, steps, strict=True)]
        if parts.may_help and isinstance(reader, ThreadPool):
            # Waking a reader thread takes longer than filling a small slot.
            self._result = self._finish
        if parts.epochs is None:
            return self._next_prefetched
        return functools.partial(parts.epochs.next_slot, self._next_prefetched)

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
            slot.turn, slot.epoch, slot.number = next(self._places)
            filled = self._submit(parts.filler.fill, slot)
            for pool, function in self._steps:
                filled = pool.submit(_apply, function, filled)
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


def _apply(function: Callable[[Slot], object], pending: Pending[Slot | None]) -> Slot | None:
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


class EpochsAhead:
    """Epochs of a loop that reads the first batches of the next epoch before it ends one.

    Args:
        source: Source of the batches.
        first: Epoch, first batch, and checksum of the batches before it.
        schedule: Schedule of the loop.
    """

    def __init__(
        self, source: Source, first: tuple[int, int, int], schedule: PrefetchSchedule
    ) -> None:
        self._source = source
        self._batches_per_slot = schedule.batches_per_slot
        self._first = first
        # The epoch that the loop receives.
        self._received = first[0]
        # Slots that the loop has not received yet, of its epoch and of each later one.
        self._n_left = deque([self._n_slots(*first[:2])])
        # Later epochs that the readers have not opened yet.
        self._to_open: deque[int] = deque()
        # Version of the rows when a reader opened a later epoch.
        self._versions: dict[int, object] = {}

    def thunks(self) -> BatchThunks:
        """Yield the batches of all epochs, which readers take in the order of their turns."""
        yield from self._source.epoch(*self._first, self._batches_per_slot)
        while self._to_open:
            epoch = self._to_open.popleft()
            self._versions[epoch] = self._source.rows_version()
            yield from self._source.epoch(epoch, 0, 0, self._batches_per_slot)

    def places(self) -> Iterator[Place]:
        """Yield the place of each use of a slot, and begin epochs (consumer)."""
        turns = itertools.count()
        epoch, begin, _ = self._first
        n_slots = self._n_slots(epoch, begin)
        while n_slots:
            for i in range(n_slots):
                yield Place(next(turns), epoch, begin + i * self._batches_per_slot)
            epoch, begin = epoch + 1, 0
            n_slots = self._n_slots(epoch, 0)
            if not (n_slots and self._source.may_open_ahead):
                break
            self._n_left.append(n_slots)
            self._to_open.append(epoch)
        # These calls find that the epoch has ended.
        yield from (Place(turn, epoch, 0) for turn in turns)

    def next_slot(self, next_slot: Callable[[], Slot | None]) -> Slot | None:
        """Return the next slot of the epoch, or None after its last one (consumer)."""
        if not self._n_left[0]:
            return None
        self._n_left[0] -= 1
        return next_slot()

    @property
    def has_read_ahead(self) -> bool:
        """Whether the epoch has ended, and readers fill slots with a later one."""
        return len(self._n_left) > 1 and not self._n_left[0]

    def is_next(self, epoch: int) -> bool:
        """Return whether an epoch is the next one, and its rows have not changed (consumer).

        Args:
            epoch: Number of the epoch.
        """
        if epoch != self._received + 1:
            return False
        # A reader may have opened the previous epoch late, after this function was called for it.
        self._versions.pop(self._received, None)
        # No rows were read yet if no reader has opened the epoch.
        version = self._versions.pop(epoch, None)
        return version is None or version == self._source.rows_version()

    def begin_next(self) -> None:
        """Note that the loop receives the next epoch from now on (consumer)."""
        self._received += 1
        self._n_left.popleft()

    def _n_slots(self, epoch: int, batch: int) -> int:
        return -(-(self._source.n_batches(epoch) - batch) // self._batches_per_slot)
