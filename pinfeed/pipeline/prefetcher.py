"""Prefetcher: one loop over a source, from its first batch to joining its threads.

A loop is a deque of calls that reader threads make. The results of these calls carry the order,
back-pressure, the end of the data, and errors with their tracebacks. However the loop ends, the
``finally`` of its generator joins the threads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from pinfeed.errors import ClosedError
from pinfeed.pipeline.depth_choice import DepthChoice
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.slot_filler import SlotFiller
from pinfeed.pipeline.sources.base import BatchThunk
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.threads.call import Pending
from pinfeed.threads.exit import exit_hook

logger = logging.getLogger("pinfeed")

_CLOSED_WHILE_WAITING = "the feeder was closed while its loop was waiting for a batch"


@dataclass
class _Slots:
    """Slots of a loop, which only its generator keeps."""

    free: deque[Slot]
    """Slots that are not being filled; the last one was lent last."""
    filling: deque[Pending[Slot | None]] = field(default_factory=deque)
    """Slots that are being filled or are full, in the order of their batches."""


class Prefetcher:
    """One loop over a source.

    Args:
        transfer: Transfer that has the slots. No other loop may use them.
        first: Number of the first batch.
        choice: Number of batches to prefetch, and of reader threads. The choice may change between
            prefetching and the synchronous loop while the loop runs.
        transforms: The transforms.
    """

    def __init__(
        self, transfer: Transfer, first: int, choice: DepthChoice, transforms: LoopTransforms
    ) -> None:
        schedule = choice.schedule
        device = transfer.device
        self._transfer = transfer
        self._counters = transfer.counters
        self._first = first
        self._choice = choice
        self._schedule = schedule
        self._transforms = transforms
        self._has_transforms = bool(transforms)
        self._calls_transforms = transforms.are_called_in_loop
        self._filler: SlotFiller | None = None
        self._turns = itertools.count()
        self.consumer: int | None = None
        """Identifier of the thread that runs the training loop."""
        self.owner = threading.current_thread()
        self._reference = weakref.ref(self)
        # The loop, close() and the garbage collector may end it at the same time.
        self._ending = threading.RLock()
        is_named = transfer.counters.timeline is not None and not device.unified
        self._threads = LoopThreads(device, schedule, is_named=is_named)
        self.write_queue = WriteQueue(transfer, self._threads, schedule.max_pending_writes)
        # This is the last step. An interrupt after it would leave threads to the garbage collector.
        self._threads.start_readers(calls_transforms=self._calls_transforms)

    def lend(self, thunks: Generator[BatchThunk, None, None]) -> Iterator[LentBatch]:
        """Lend the batches in order.

        If a batch cannot be filled, its error is raised when the loop requests that batch. The
        error of a write-back is raised as soon as it is known.

        Args:
            thunks: Batches of the epoch. Reader threads iterate over them, one at a time.
        """
        counters = self._counters
        transfer = self._transfer
        is_unified = transfer.device.unified
        number = self._first
        lent_batch: LentBatch | None = None
        slots = self._begin(thunks)
        try:
            self._refill(slots)
            while (slot := self._next(slots, number)) is not None:
                host_batch = slot.batch
                assert host_batch is not None
                idle = is_unified or transfer.is_idle()
                tensors = self._threads.call("lend", number, transfer.lend, slot)
                n_batches = len(tensors)
                nbytes = slot.nbytes // n_batches
                for i in range(n_batches):
                    lent_batch = LentBatch(
                        transfer, self.write_queue, host_batch, tensors.popleft(), i, number
                    )
                    if not tensors:
                        # From now on, only the lent batch keeps the data.
                        del host_batch
                    counters.receive(
                        number, lent_batch.n_rows, nbytes, slot.ready_s, idle=idle, stages=slot
                    )
                    yield lent_batch
                    lent_batch.end()
                    self._threads.require_running()
                    lent_batch.finish()
                    # The device is not checked again for the other batches of the slot.
                    idle = is_unified
                    number += 1
                    self.write_queue.check()
                _raise_error(slot)
                self._reuse(slots, slot, n_batches)
                if len(transfer.log):
                    transfer.forget()
        except Cancelled:
            raise ClosedError(_CLOSED_WHILE_WAITING) from None
        finally:
            self._leave(lent_batch)
        self.write_queue.check()

    def end(self) -> None:
        """Join the threads and release the loop's memory. It may be called again.

        Each step runs even if an interrupt ends the previous one. A caller that continues after an
        interrupt calls this again first.
        """
        with self._ending:
            if self._threads.has_ended:
                return
            # The steps run in reverse order.
            with contextlib.ExitStack() as stack:
                stack.callback(self._transfer.quiesce)
                stack.callback(self._threads.join_writers)
                stack.callback(self.write_queue.finish)
                # Twice, in case an interrupt ends the first call, because only the device has the
                # rows.
                stack.callback(self.flush_caches, is_last=True)
                stack.callback(self.flush_caches, is_last=True)
                if self._filler is not None:
                    stack.callback(self._filler.close)
                # Fills that have not begun are not cancelled, because each submitted fill must take
                # its turn. Later fills would wait for it otherwise.
                stack.callback(self._threads.join_readers)
                self._transfer.stop()
            self._threads.has_ended = True
            exit_hook.loops.discard(self._reference)

    def save(self) -> None:
        """Queue writes of all rows in caches, because the program ends before the loop."""
        try:
            self.flush_caches()
        except Exception:
            logger.exception("the rows of a device cache could not be written at program exit")

    def flush_caches(self, *, is_last: bool = False) -> None:
        """Queue writes of all rows in caches that may differ from their stores.

        Args:
            is_last: Whether the loop is ending, after which no row may change.
        """
        if not self._transfer.has_caches:
            return
        with self.write_queue.adding:
            for write in self._transfer.changed_rows(is_last=is_last):
                self.write_queue.add(write, check=False)
        if is_last:
            self._transfer.note_flushed()

    def drain(self) -> None:
        """Wait until all values so far are in their stores, including those in caches.

        Raises:
            Exception: If a write-back failed; its error. The loop then writes the rows of caches
                again when it ends.
        """
        self.flush_caches()
        self.write_queue.drain()
        self._transfer.note_flushed()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked while the loop ran, and so has none of its threads."""
        return self._threads.is_forked

    def require_not_forked(self) -> None:
        """Check that this is the process in which the loop began.

        Raises:
            ClosedError: If it is another process.
        """
        self._threads.require_not_forked()

    def _begin(self, thunks: Generator[BatchThunk, None, None]) -> _Slots:
        """Begin the loop in this thread; return its slots."""
        schedule = self._schedule
        self.consumer = threading.get_ident()
        self._filler = SlotFiller(self._transfer, thunks, self._first, schedule, self._transforms)
        exit_hook.loops.add(self._reference)
        slots = self._transfer.begin(schedule.n_slots, schedule.batches_per_slot)
        self._choice.begin()
        return _Slots(deque(slots))

    def _reuse(self, slots: _Slots, slot: Slot, n_batches: int) -> None:
        """Free a slot after the training steps of its batches."""
        slots.free.append(slot)
        self._choice.count(n_batches, self._counters.requested_s)
        self._refill(slots)

    def _refill(self, slots: _Slots) -> None:
        """Submit fills of all free slots, unless the loop is synchronous.

        A loop that becomes synchronous lends the prefetched batches, and then waits for all
        write-backs. From then on, this thread fills one slot at a time, and completes each
        write-back at once. A later change to prefetching therefore has nothing to wait for.
        """
        is_synchronous = self._choice.is_synchronous
        if is_synchronous and slots.filling:
            return
        if self._threads.is_inline != is_synchronous:
            self._change(is_synchronous=is_synchronous)
        if not is_synchronous:
            while slots.free:
                slots.filling.append(self._submit(slots.free.popleft()))

    def _change(self, *, is_synchronous: bool) -> None:
        """Change to the synchronous loop or back, when no slot is being filled."""
        assert self._filler is not None
        self.write_queue.drain()
        self._threads.is_inline = is_synchronous
        depth = 0 if is_synchronous else self._schedule.depth
        self._filler.compare(depth)
        self._counters.change_depth(depth)

    def _submit(self, slot: Slot) -> Pending[Slot | None]:
        """Reserve a slot, and submit its fill to a reader thread."""
        filler, turn = self._reserve(slot)
        number = filler.number(turn)
        filled = self._threads.submit_read(number, filler.fill, slot, turn)
        if not self._calls_transforms:
            return filled
        return self._threads.submit_transform(number, filler.transform, filled, turn)

    def _reserve(self, slot: Slot) -> tuple[SlotFiller, int]:
        """Reserve a slot; return the filler, and the number of the slot's turn."""
        assert self._filler is not None
        self._transfer.reserve(slot)
        return self._filler, next(self._turns)

    def _next(self, slots: _Slots, number: int) -> Slot | None:
        """Return the next full slot, or None after the last batch.

        Args:
            slots: Slots of the loop. If no slot is being filled, the loop is synchronous, and this
                thread fills one.
            number: Number of the slot's first batch.
        """
        if slots.filling:
            filled = self._threads.call("wait", number, slots.filling.popleft().result)
        else:
            slot = slots.free.popleft()
            filler, turn = self._reserve(slot)
            fill = filler.fill_now if self._has_transforms else filler.fill
            filled = guarded(self._threads.call, "read", number, fill, slot, turn)
        found: Slot | None = filled
        if found is not None and found.batch is None:
            # Another thread closes the feeder now.
            raise Cancelled
        return found

    def _leave(self, lent_batch: LentBatch | None) -> None:
        """End the loop, for whatever reason its generator has ended.

        Args:
            lent_batch: Batch that was lent last.
        """
        # A loop that was left has not requested another batch.
        self._counters.request()
        self._counters.receive_none()
        if lent_batch is not None:
            lent_batch.end()
        if self._threads.is_forked:
            # The threads and their work belong to the other process.
            return
        here = threading.current_thread()
        is_worker = self._threads.is_inside or here.name.startswith("pinfeed-")
        if here.ident != self.consumer and is_worker and here.name != "pinfeed-end":
            # The garbage collector frees the loop in one of its worker threads, maybe in one of the
            # source. A worker thread cannot wait for itself.
            threading.Thread(target=self.end, name="pinfeed-end").start()
        else:
            self.end()


def _raise_error(slot: Slot) -> None:
    """Raise the error of the batch that the slot could not carry, if any."""
    if slot.error is None:
        return
    try:
        raise slot.error
    finally:
        # The error's traceback keeps this frame, which keeps the slot.
        slot.error = None
