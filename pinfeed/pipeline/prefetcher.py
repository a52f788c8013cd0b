"""One loop over a source: readers and a writer, a deque of calls, order, errors, closing.

Prefetching is a deque of calls that readers make, so order, back-pressure, the end of the data and
errors with their tracebacks are those of a call. The generator's frame owns both workers: whatever
ends the loop, its ``finally`` joins them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

from pinfeed.devices.base import Tensor
from pinfeed.errors import ClosedError, WriteBackError
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, guarded
from pinfeed.pipeline.transfer import Cancelled, PendingWrite, Slot, Transfer
from pinfeed.pipeline.write_queue import WriteQueue
from pinfeed.threads.call import Call, Pending, Workers


class InlineWorkers:
    """Workers that make each call at once, in the caller's thread: depth 0."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Call[Any]:
        calls = [Call(fn, *args)]
        calls[0].run()
        if not isinstance(calls[0].exception(), (Exception, NoneType)):
            # KeyboardInterrupt is the caller's own here and goes straight up.
            calls.pop().result()
        # An error's traceback keeps this frame, which must not keep the call, which keeps the
        # error.
        return calls.pop()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is under way."""


class LentBatch:
    """A batch that is lent.

    Its tensors are taken once; from then on they belong to the user alone.
    """

    def __init__(
        self,
        transfer: Transfer,
        landings: WriteQueue,
        load: HostBatch,
        tensors: list[Tensor],
        i: int,
        number: int,
    ) -> None:
        begin = sum(n_rows for n_rows, _ in load.batches[:i])
        self.number = number
        (self.n_rows, self.checksum) = load.batches[i]
        self.groups = load.groups
        if len(load.batches) > 1:
            end = begin + self.n_rows
            tensors = [transfer.device.cut(tensor, begin, end) for tensor in tensors]
            self.groups = [group.cut(begin, end) for group in self.groups]
        self._rebuild = load.rebuild
        self._tensors = tensors
        self._transfer = transfer
        self._write_queue = landings
        self._over = self._written = False

    def take(self) -> Any:
        """The batch, in the structure that the user knows."""
        tensors, rebuild = self._tensors, self._rebuild
        # Which may know the batch as it was on the host.
        del self._tensors, self._rebuild
        return rebuild(iter(tensors))

    def end(self) -> None:
        """The next batch is asked for, or the loop has ended."""
        self._over = True

    @property
    def is_over(self) -> bool:
        return self._over

    def require_writable(self) -> None:
        """Check that the batch can be written back now.

        Raises:
            WriteBackError: The next batch was asked for, the loop is over, or it was written back
                already.
        """
        if self._over:
            raise WriteBackError(
                "write_back after the next batch was taken, or after the loop; call it before asking for the next batch"
            )
        if self._written:
            raise WriteBackError(
                "write_back was called for this batch before; give all values in one call (None for what stays as it is)"
            )

    def write(
        self,
        values: Sequence[Sequence[Tensor | None] | None],
        *,
        copied: bool = True,
        check: bool = True,
    ) -> None:
        """Start to write values back; they have been checked.

        Args:
            values: For each group of the batch's rows a tensor per store; None where one, or the
                whole group, stays as it is.
            copied: False if nobody changes the tensors any more: then they are held themselves.
            check: Whether to raise the error of an earlier write-back; False where nobody could
                catch it, for the end of the loop to tell.
        """
        self._write_queue.add(
            self._transfer.hold(self.groups, values, self.number, copied=copied), check=check
        )
        self._written = True


@dataclass(frozen=True)
class PrefetchSchedule:
    """How far ahead of the loop batches are gathered, and how."""

    depth: int
    """Batches ahead."""
    batches_per_slot: int = 1
    """Batches that a slot carries: small ones take less time than it takes to wake a thread."""
    n_readers: int = 1
    """Slots that are filled at the same time.

    A loop that computes for longer than a gather takes asks for one at a time, so that one thread
    is busy at most; a loop that waits has all of them at work.
    """

    @property
    def max_unseen_writes(self) -> int:
        """Batches before one whose writes its gather may not have seen: those that wait to be lent, and as many write-backs under way."""
        return 2 * self.depth

    @property
    def n_slots(self) -> int:
        return -(-(self.depth + 1) // self.batches_per_slot)


class Prefetcher:
    """One loop.

    Args:
        transfer: Whose slots are used; nobody else may be using them.
        first: Number of the first batch.
        schedule: Of the readers.
    """

    def __init__(self, transfer: Transfer, first: int, schedule: PrefetchSchedule) -> None:
        device, depth = transfer.device, schedule.depth
        self._transfer = transfer
        self._counters = transfer.counters
        self._first = first
        self._schedule = schedule
        self._timeline = transfer.counters.timeline
        # For a profiler of the device's.
        self._step = self._named if self._timeline is not None and not device.unified else _unnamed
        # Made when something is written.
        self._writer: Workers | None = None if depth else InlineWorkers()
        # Threads that have done a task.
        self._workers: set[int] = set()
        self.write_queue = WriteQueue(
            self._land,
            limit=max(depth, 1),
            # Where the garbage collector ends a loop, a worker may be asked; and in a forked
            # process nobody lands anything.
            may_wait=lambda: threading.get_ident() not in self._workers and not self.is_forked,
            counters=transfer.counters,
        )
        self.consumer: int | None = None
        """The thread that the batches are lent to."""
        # A source is a generator: one reader at a time, in order.
        self._drawn = 0
        self._turn = threading.Condition()
        # close(), the garbage collector and the loop may end it.
        self._pid = os.getpid()
        self._ended = False
        self._ending = threading.RLock()
        self._loads: Generator[BatchThunk, None, None] | None = None
        # The last step: an interrupt behind it would leave threads to the garbage collector.
        self._reader: Workers = (
            device.worker("pinfeed-read", schedule.n_readers) if depth else InlineWorkers()
        )

    def loans(self, loads: Generator[BatchThunk, None, None]) -> Iterator[LentBatch]:
        """Lend the batches in order.

        One that cannot be filled raises its error in its turn; a failed write-back, as soon as it
        is known.

        Args:
            loads: What to lend: a generator, iterated in the readers' threads, one at a time.
        """
        counters = self._counters
        transfer = self._transfer
        timeline = self._timeline
        turns = itertools.count()
        self._loads = loads
        loan: LentBatch | None = None
        number = self._first
        unified = transfer.device.unified
        step = self._step
        self.consumer = consumer = threading.get_ident()

        def submit(slot: Slot) -> Pending[Slot | None]:
            transfer.reserve(slot)
            turn = next(turns)
            return self._reader.submit(
                self._task, step, "read", self._number(turn), self._fill, slot, loads, turn
            )

        slots = transfer.begin(self._schedule.n_slots, self._schedule.batches_per_slot)
        asked = lent = counters.enter(
            self._schedule.depth, self._schedule.n_readers, asynchronous=not unified
        )
        try:
            filling = deque(submit(slot) for slot in slots)
            while (
                slot := cast("Slot | None", step("wait", number, filling.popleft().result))
            ) is not None:
                load = cast(HostBatch, slot.load)
                late = slot.ready_s > asked
                idle = unified or transfer.is_idle()
                got = counters.now() if timeline is not None else asked
                tensors = step("lend", number, transfer.lend, slot)
                nbytes = sum(slot.needed) // len(load.batches)
                for i in range(len(load.batches)):
                    loan = LentBatch(transfer, self.write_queue, load, tensors, i, number)
                    if i == len(load.batches) - 1:
                        # From here on the loan alone holds them.
                        del tensors, load
                    lent = counters.lent(loan.n_rows, nbytes, asked, late=late, idle=idle)
                    if timeline is not None:
                        timeline.add("wait", number, asked, got)
                        timeline.add("lend", number, got, lent, 1, loan.n_rows, nbytes)
                    yield loan
                    loan.end()
                    self.require_not_forked()
                    self._require_open()
                    asked, late = counters.now(), False
                    if timeline is not None:
                        got = asked
                        timeline.add("compute", number, lent, asked)
                    number += 1
                    self.write_queue.check()
                if slot.error is not None:
                    try:
                        raise slot.error
                    finally:
                        # Its traceback keeps this frame, which keeps the slot.
                        slot.error = None
                filling.append(submit(slot))
                transfer.forget()
        except Cancelled:
            raise ClosedError(
                "the feeder was closed while its loop was waiting for a batch"
            ) from None
        finally:
            counters.leave()
            if loan is not None:
                if timeline is not None and not loan.is_over:
                    timeline.add("compute", number, lent, counters.now())
                loan.end()
            here = threading.current_thread()
            if self.is_forked:
                # The threads and what they do are the other process's.
                pass
            elif (
                here.ident != consumer
                and (here.ident in self._workers or here.name.startswith("pinfeed-"))
                and here.name != "pinfeed-end"
            ):
                # The garbage collector has found the loop dropped while a worker ran, maybe a
                # source's, and it cannot wait for itself.
                threading.Thread(target=self.end, name="pinfeed-end").start()
            else:
                self.end()
        self.write_queue.check()

    def _fill(self, slot: Slot, loads: Iterator[BatchThunk], turn: int) -> Slot | None:
        """Fill a slot with the next load; None after the last one.

        Readers take turns: tasks begin in order, but may come here in any.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._drawn == turn)
            start = self._counters.now()
            try:
                self._transfer.check_stop()
                draw = next(loads, None)
            finally:
                self._drawn += 1
                self._turn.notify_all()
        if draw is None:
            return None
        load = draw()
        slot.drawn_s = drawn = self._counters.now()
        slot.draw_s = drawn - start
        return self._fill_with(slot, load, self._number(turn))

    def _fill_with(self, slot: Slot, load: HostBatch, number: int) -> Slot:
        """Fill a slot.

        Where that fails for one of several batches, those before it are lent first, and the error
        comes in its turn.
        """
        try:
            return self._transfer.fill(slot, load, number)
        except Cancelled:
            raise
        except Exception as error:
            n_good = self._n_good(slot, load, number) if len(load.batches) > 1 else 0
            if n_good in (0, len(load.batches)):
                # The first of them; or it does not happen again, and nobody can tell which it was.
                raise
            slot.error = error
        return self._transfer.fill(slot, load.cut(0, n_good), number)

    def _n_good(self, slot: Slot, load: HostBatch, number: int) -> int:
        """The number of batches before the first that cannot be gathered."""
        for i in range(len(load.batches)):
            try:
                self._transfer.fill(slot, load.cut(i, i + 1), number + i)
            except Exception:
                return i
        return len(load.batches)

    def _number(self, turn: int) -> int:
        """Of the first batch of a turn."""
        return self._first + turn * self._schedule.batches_per_slot

    def _land(self, landing: PendingWrite) -> Pending[None]:
        self.require_not_forked()
        self._require_open()
        if self._writer is None:
            self._writer = self._transfer.device.worker("pinfeed-write")
        start, idle = self._counters.now(), landing.write.values.ready.is_done()
        call = self._writer.submit(
            self._task, self._step, "write", landing.batch, self._transfer.land, landing
        )
        if not self._schedule.depth:
            # It has landed, and the loop has waited.
            self._counters.landed(landing.batch, start, idle=idle)
        return call

    def _named(self, lane: str, batch: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn`` under a name that a profiler of the device's shows."""
        with self._transfer.device.named(f"pinfeed {lane} {batch}"):
            try:
                return fn(*args)
            finally:
                # An error's traceback keeps this frame, which must not keep the call, which keeps
                # the error.
                del fn, args

    def _task(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._workers.add(threading.get_ident())
        return guarded(fn, *args)

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy, in a forked process that has none of the threads, of a loop that was running."""
        return self._pid != os.getpid() and not self._ended

    def require_not_forked(self) -> None:
        """Check that this is the process in which the loop began.

        Raises:
            ClosedError: It is not.
        """
        if self.is_forked:
            raise ClosedError(
                "this process was forked while the loop ran, and has not its threads; make a feeder of its own here"
            )

    def _require_open(self) -> None:
        if self._ended:
            raise ClosedError(
                "the feeder was closed by another thread while its loop ran; join that loop's thread before"
            )

    def end(self) -> None:
        """Join the workers and let go of everything. Idempotent.

        Each step is done even if an interrupt ends the one before it; who goes on all the same
        calls this again, before anything else.
        """
        with self._ending:
            if self._ended:
                return
            with contextlib.ExitStack() as stack:
                stack.callback(self._transfer.quiesce)
                if self._writer is not None:
                    stack.callback(self._writer.shutdown, wait=True)
                stack.callback(self.write_queue.finish)
                stack.callback(self._close_loads)
                # Fills that have not begun are not cancelled: each that was submitted takes its
                # turn, or those behind it would wait for it.
                stack.callback(self._reader.shutdown, wait=True)
                self._transfer.stop()
            self._ended = True

    def _close_loads(self) -> None:
        """Let what the source holds go now, not when an error's traceback does."""
        loads = self._loads
        if loads is not None and inspect.getgeneratorstate(loads) != inspect.GEN_RUNNING:
            # An interrupt has ended the wait for its reader.
            loads.close()
            self._loads = None


def _unnamed(lane: str, batch: int, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    finally:
        # As in _named
        del fn, args
