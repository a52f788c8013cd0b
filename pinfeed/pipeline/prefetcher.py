"""Prefetcher: one loop over a source, from its first batch to joining its threads.

A loop is a deque of calls that reader threads make. So order, back-pressure, the end of the data,
and errors with their tracebacks are those of a call. Whatever ends the loop, the ``finally`` of its
generator joins the threads.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from pinfeed.devices.base import Tensor
from pinfeed.errors import ClosedError
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.slot_filler import SlotFiller
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.threads.call import Pending

_CLOSED_WHILE_WAITING = "the feeder was closed while its loop was waiting for a batch"


class Prefetcher:
    """One loop over a source.

    Args:
        transfer: Transfer whose slots the loop uses. No other loop may use them.
        first: Number of the first batch.
        schedule: Number of batches to prefetch, and of reader threads.
    """

    def __init__(self, transfer: Transfer, first: int, schedule: PrefetchSchedule) -> None:
        device = transfer.device
        self._transfer = transfer
        self._counters = transfer.counters
        self._timeline = transfer.counters.timeline
        self._first = first
        self._schedule = schedule
        self._filler: SlotFiller | None = None
        self._turns = itertools.count()
        self.consumer: int | None = None
        """Identifier of the thread that batches are lent to."""
        # The loop, close() and the garbage collector may end it at the same time.
        self._ending = threading.RLock()
        is_named = self._timeline is not None and not device.unified
        self._threads = LoopThreads(device, schedule, is_named=is_named)
        self.write_queue = WriteQueue(transfer, self._threads, schedule.max_pending_writes)
        # This is the last step. An interrupt after it would leave threads to the garbage collector.
        self._threads.start_readers()

    def lend(self, thunks: Generator[BatchThunk, None, None]) -> Iterator[LentBatch]:
        """Lend the batches in order.

        The error of a batch that cannot be filled is raised when the loop asks for that batch. The
        error of a write-back is raised as soon as it is known.

        Args:
            thunks: Batches of the epoch. Reader threads iterate them, one at a time.
        """
        counters = self._counters
        transfer = self._transfer
        timeline = self._timeline
        call = self._threads.call
        write_queue = self.write_queue
        number = self._first
        lent_batch: LentBatch | None = None
        slots, asked = self._begin(thunks)
        lent = asked
        try:
            filling = deque(self._submit(slot) for slot in slots)
            while (slot := call("wait", number, filling.popleft().result)) is not None:
                late = slot.ready_s > asked
                host_batch, tensors, idle, received = self._receive(slot, number)
                n_batches = len(host_batch.batches)
                nbytes = sum(slot.needed[: len(tensors)]) // n_batches
                for i in range(n_batches):
                    lent_batch = LentBatch(transfer, write_queue, host_batch, tensors, i, number)
                    if i == n_batches - 1:
                        # From here on only the lent batch keeps the tensors.
                        del tensors, host_batch
                    lent = counters.lent(lent_batch.n_rows, nbytes, asked, late=late, idle=idle)
                    if timeline is not None:
                        self._record_lent(lent_batch, nbytes, asked, received, lent)
                    yield lent_batch
                    lent_batch.end()
                    self._threads.require_running()
                    asked, late = counters.now(), False
                    if timeline is not None:
                        received = asked
                        timeline.add("compute", number, lent, asked)
                    number += 1
                    write_queue.check()
                _raise_error(slot)
                filling.append(self._submit(slot))
                transfer.forget()
        except Cancelled:
            raise ClosedError(_CLOSED_WHILE_WAITING) from None
        finally:
            self._leave(lent_batch, lent)
        write_queue.check()

    def end(self) -> None:
        """Join the threads and release what the loop holds. It may be called again.

        Each step is made even if an interrupt ends the one before it. A caller that continues after
        an interrupt calls this again first.
        """
        with self._ending:
            if self._threads.has_ended:
                return
            # The steps are made in reverse order.
            with contextlib.ExitStack() as stack:
                stack.callback(self._transfer.quiesce)
                stack.callback(self._threads.join_writers)
                stack.callback(self.write_queue.finish)
                if self._filler is not None:
                    stack.callback(self._filler.close)
                # Fills that have not begun are not cancelled: each one that was submitted takes its
                # turn, or those after it would wait for it.
                stack.callback(self._threads.join_readers)
                self._transfer.stop()
            self._threads.has_ended = True

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one in which the loop ran, without its threads."""
        return self._threads.is_forked

    def require_not_forked(self) -> None:
        """Check that this is the process in which the loop began.

        Raises:
            ClosedError: If it is another process.
        """
        self._threads.require_not_forked()

    def _begin(self, thunks: Generator[BatchThunk, None, None]) -> tuple[Sequence[Slot], float]:
        """Begin the loop in this thread; return its slots and the time."""
        schedule = self._schedule
        self.consumer = threading.get_ident()
        self._filler = SlotFiller(self._transfer, thunks, self._first, schedule)
        slots = self._transfer.begin(schedule.n_slots, schedule.batches_per_slot)
        now = self._counters.enter(
            schedule.depth, schedule.n_readers, asynchronous=not self._transfer.device.unified
        )
        return slots, now

    def _submit(self, slot: Slot) -> Pending[Slot | None]:
        """Reserve a slot, and let a reader thread fill it."""
        filler = self._filler
        assert filler is not None
        self._transfer.reserve(slot)
        turn = next(self._turns)
        return self._threads.submit_read(filler.number(turn), filler.fill, slot, turn)

    def _receive(self, slot: Slot, number: int) -> tuple[HostBatch, list[Tensor], bool, float]:
        """Take the contents of a slot that is filled.

        Returns:
            The batch, its tensors, whether the device was idle, and the time if it is recorded.
        """
        transfer = self._transfer
        host_batch = slot.batch
        assert host_batch is not None
        idle = transfer.device.unified or transfer.is_idle()
        received = self._counters.now() if self._timeline is not None else 0.0
        tensors = self._threads.call("lend", number, transfer.lend, slot)
        return host_batch, tensors, idle, received

    def _record_lent(
        self, batch: LentBatch, nbytes: int, asked: float, received: float, lent: float
    ) -> None:
        """Record that a batch of so many bytes was asked for, received and lent at these times."""
        assert self._timeline is not None
        self._timeline.add("wait", batch.number, asked, received)
        self._timeline.add("lend", batch.number, received, lent, 1, batch.n_rows, nbytes)

    def _leave(self, lent_batch: LentBatch | None, lent: float) -> None:
        """End the loop, whatever has ended its generator.

        Args:
            lent_batch: Batch that was lent last.
            lent: Time at which it was lent.
        """
        self._counters.leave()
        if lent_batch is not None:
            if self._timeline is not None and not lent_batch.is_over:
                self._timeline.add("compute", lent_batch.number, lent, self._counters.now())
            lent_batch.end()
        if self._threads.is_forked:
            # The threads and their work belong to the other process.
            return
        here = threading.current_thread()
        is_worker = self._threads.is_inside or here.name.startswith("pinfeed-")
        if here.ident != self.consumer and is_worker and here.name != "pinfeed-end":
            # The garbage collector has found the loop dropped while a worker ran, maybe a source's,
            # and a worker cannot wait for itself.
            threading.Thread(target=self.end, name="pinfeed-end").start()
        else:
            self.end()


def _raise_error(slot: Slot) -> None:
    """Raise the error of a batch that the slot could not carry, if there is one."""
    if slot.error is None:
        return
    try:
        raise slot.error
    finally:
        # The error's traceback keeps this frame, which keeps the slot.
        slot.error = None
