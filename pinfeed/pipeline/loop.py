"""Loop: one loop over a source, from its first batch to its end.

A loop consists of what it needs, chosen when it begins: draws, a filler and a mover, and if it
writes rows back also a writer and its queue. However the loop ends, the ``finally`` of its
generator joins the threads and releases the memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.device import Tensor
from pinfeed.errors import ClosedError, logger
from pinfeed.memory import page_locked
from pinfeed.pipeline.device_batches import DeviceBatches
from pinfeed.pipeline.device_rows import DeviceRows
from pinfeed.pipeline.filler import Mover
from pinfeed.pipeline.lent_batch import LentBatch, WritableBatch
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Slot, raise_kept
from pinfeed.pipeline.sources.source import Cancelled
from pinfeed.pipeline.sources.user_calls import ENDS_SILENTLY, raise_if_silent
from pinfeed.pipeline.write_queue import LoopWrites
from pinfeed.threads.exit import exit_hook

EPOCH_END: Any = None
"""Value that a loop yields after an epoch, if it has read the first batches of the next one."""

CLOSED_WHILE_WAITING = "the feeder was closed while its loop was waiting for a batch"


@dataclass(kw_only=True)
class LoopParts:
    """The mover and the functions that every loop consists of."""

    mover: Mover | DeviceRows | DeviceBatches
    first: int
    """Number of the first batch."""
    schedule: PrefetchSchedule
    lend: Callable[[Slot], deque[list[Tensor]]]
    """Returns the tensors of each batch in a full slot."""
    stop: Callable[[], object]
    """Ends every fill at its next step."""
    close: Callable[[int], object]
    """Closes the source now, not when an error's traceback is freed.

    It takes the number of batches of the epoch that were requested. The end counts as one.
    """
    quiesce: Callable[[], object]
    """Waits for queued copies, and releases the memory of the loop."""
    open_writes: Callable[[LoopThreads], LoopWrites] | None = None
    """Returns the write-backs of the loop, given its threads; None for a loop without any."""
    is_named: bool = False
    """Whether a profiler of the device should show each write-back under a name."""


class Loop:
    """One loop over a source.

    A subclass defines how the next slot is filled.

    Args:
        parts: Mover and functions of the loop.
    """

    keeps_last = False
    """Whether the loop must keep each batch until it has received the next one.

    If it frees a batch on receiving the next one, torch releases the interpreter's lock, and the
    loop waits for reader threads that were just woken.
    """

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._counters = parts.mover.counters
        self.consumer: int | None = None
        """Identifier of the thread that runs the training loop."""
        self.owner = threading.current_thread()
        self._reference = weakref.ref(self)
        # The loop, close() and the garbage collector may end it at the same time.
        self._ending = threading.RLock()
        self.threads = LoopThreads(parts.mover.device, parts.schedule, is_named=parts.is_named)
        self.finish_step: Callable[[], object] | None = None
        """Writes the rows of the batch that is lent, unless that was done; None without tables.

        The garbage collector may free this loop before the generators around it, which then could
        not write rows any more.
        """
        self.is_between_epochs = False
        """Whether the loop has ended an epoch, and keeps the first batches of the next one."""
        self.writes: LoopWrites | None = None
        if parts.open_writes is not None:
            self.writes = parts.open_writes(self.threads)
        # Slots that are not being filled; the last one was lent last.
        self._free: deque[Slot] = deque(parts.mover.begin(parts.schedule))
        # Number of batches of the epoch that were requested.
        self._n_requested = parts.first + 1

    def batches(self) -> Generator[LentBatch, None, None]:
        """Yield the batches in order, for the training steps.

        A batch is written back, and its rows move into and out of caches, until the loop requests
        the next one. A continuous loop yields ``EPOCH_END`` after an epoch instead of ending, and
        then the batches of the next one.

        Raises:
            Exception: If a batch cannot be filled, when the loop requests it. If a write-back
                failed, as soon as that is known.
        """
        counters = self._counters
        mover: Any = self._parts.mover
        writes = self.writes
        make = LentBatch if writes is None else functools.partial(WritableBatch, writes)
        lent_batch: Any = None
        is_unified = mover.device.unified
        self.consumer = threading.get_ident()
        exit_hook.loops.add(self._reference)
        try:
            # This may start threads, which the end of the loop joins.
            next_slot = self._slots()
            while True:
                try:
                    slot = next_slot()
                except ENDS_SILENTLY as error:
                    raise_if_silent(error)
                    raise
                if slot is None:
                    if not self._pause():
                        break
                    yield EPOCH_END
                    continue
                batch = slot.batch
                if batch is None:
                    # Another thread closes the feeder now.
                    raise Cancelled
                idle = is_unified or mover.is_idle()
                tensors = self._received(slot)
                n_batches = len(tensors)
                nbytes = slot.nbytes // n_batches
                for i, number in enumerate(range(slot.number, slot.number + n_batches)):
                    if i and not is_unified:
                        mover.lend_next(slot, tensors[0])
                    lent_batch = make(batch, tensors.popleft(), i, number)
                    if not tensors:
                        # From now on, only the lent batch keeps the data.
                        del batch
                    counters.receive(number, lent_batch.n_rows, nbytes, slot.ready_s, idle=idle)
                    yield lent_batch
                    if writes is not None:
                        lent_batch.finish()
                    self._request()
                    # The device is not checked again for the other batches of the slot.
                    idle = is_unified
                if slot.error is not None:
                    raise_kept(slot)
                self._free.append(slot)
        except Cancelled:
            raise ClosedError(CLOSED_WHILE_WAITING) from None
        finally:
            if writes is not None and lent_batch is not None:
                lent_batch.is_over = True
            self._leave()
        if writes is not None:
            writes.check()

    def _request(self) -> None:
        """Note that the program requests another batch.

        Raises:
            ClosedError: If the process is a fork, or another thread has closed the feeder.
        """
        self._n_requested += 1
        if page_locked.freed:
            # This thread captures no CUDA graph while it requests a batch.
            page_locked.unlock_freed()
        threads = self.threads
        if threads.has_ended or threads.n_forks != exit_hook.n_forks:
            threads.require_running()

    def _received(self, slot: Slot) -> deque[list[Tensor]]:
        """Return the tensors of each batch of a slot, which does not keep them."""
        tensors = self._parts.lend(slot)
        slot.batch = None
        slot.tensors = []
        self._counters.counts.read_s += slot.read_s
        self._counters.counts.source_s += slot.source_s
        return tensors

    def _slots(self) -> Callable[[], Slot | None]:
        """Return a function that returns the next full slot, or None after the last batch."""
        raise NotImplementedError

    @property
    def is_continuous(self) -> bool:
        """Whether ``batches`` may continue with the next epoch."""
        return False

    def resume(self, schedule: PrefetchSchedule, epoch: int, batch: int) -> bool:
        """Continue with the next epoch, if it is the one whose batches were read.

        Args:
            schedule: Schedule of the next epoch.
            epoch: Number of the next epoch.
            batch: Number of its first batch.

        Returns:
            False if another loop must begin instead.
        """
        return False

    def end_between_epochs(self) -> None:
        """End the loop if it waits for its next epoch. Any thread may call this."""
        # A worker thread cannot wait for itself.
        if not self.is_between_epochs or self.threads.is_inside:
            return
        with self._ending:
            if self.is_between_epochs:
                self.end()

    def end(self) -> None:
        """Join the threads and release the loop's memory. It may be called again.

        Each step runs even if an interrupt ends the previous one. A caller that continues after an
        interrupt calls this again first.
        """
        with self._ending:
            if self.threads.has_ended:
                return
            # The steps run in reverse order.
            with contextlib.ExitStack() as stack:
                stack.callback(self._parts.quiesce)
                stack.callback(self.threads.join_writers)
                if self.writes is not None:
                    stack.callback(self.writes.finish)
                    # Twice, in case an interrupt ends the first call, because only the device has
                    # the rows.
                    stack.callback(self.writes.flush, is_last=True)
                    stack.callback(self.writes.flush, is_last=True)
                stack.callback(self._parts.close, self._n_requested)
                # Fills that have not begun are not cancelled, because each submitted fill must take
                # its turn. Later fills would wait for it otherwise.
                stack.callback(self.threads.join_readers)
                self._parts.stop()
            self.threads.has_ended = True
            exit_hook.loops.discard(self._reference)

    def save(self) -> None:
        """Queue writes of all rows that only the device has, because the program ends first."""
        try:
            if self.writes is not None:
                self.writes.save()
        except Exception:
            logger.exception("rows on the device could not be written at program exit")

    def drain(self) -> None:
        """Wait until all values so far are in their stores, including those in caches.

        Raises:
            Exception: If a write-back failed; its error. The loop then writes the rows of caches
                again when it ends.
        """
        if self.writes is not None:
            self.writes.drain()

    def _pause(self) -> bool:
        """Wait for the next epoch, if some of its batches were read; return whether it does."""
        return False

    def _forget_slots(self) -> None:
        """Drop all slots, because their memory belongs to the loop that ends."""
        self._free.clear()

    def _leave(self) -> None:
        """End the loop, for whatever reason its generator has ended."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_in_any_thread)
            if self.finish_step is not None:
                self.finish_step()

    def _end_in_any_thread(self) -> None:
        self.finish_step = None
        self._forget_slots()
        if not self.is_between_epochs:
            # A loop that was left has not requested another batch.
            self._counters.request()
            self._counters.receive_none()
        if self.threads.is_forked:
            # The threads and their work belong to the other process.
            return
        here = threading.current_thread()
        is_worker = self.threads.is_inside and here.name != "pinfeed-end"
        if here.ident != self.consumer and is_worker:
            # The garbage collector frees the loop in one of its worker threads, maybe in one of the
            # source. A worker thread cannot wait for itself.
            threading.Thread(target=self.end, name="pinfeed-end").start()
        else:
            self.end()
