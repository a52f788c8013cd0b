"""One loop over a source: readers and a writer, a deque of futures, order, errors, closing.

Prefetching is a deque of futures, so order, back-pressure, the end of the data and errors with their tracebacks are those of
``Future``. The generator's frame owns both workers: whatever ends the loop, its ``finally`` joins them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from .devices.base import Tensor
from .errors import ClosedError, WorkerError, WriteBackError
from .rows import Rows
from .sources import Load
from .stats import Meter
from .stores.base import Store
from .transfer import Cancelled, Landing, Slot, Transfer


class Filling(NamedTuple):
    """Slots that a reader fills."""

    group: Sequence[Slot]
    filled: list[Slot]
    """Those that it has filled. Fewer than there are, when it is done: there is nothing more to fill them with, or an error."""
    done: Future[None]


class Inline:
    """An executor that runs its tasks at once, in the caller's thread: depth 0."""

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        futures: list[Future[Any]] = [Future()]
        try:
            futures[0].set_result(fn(*args))
        except Exception as error:  # KeyboardInterrupt is the caller's own here and goes straight up
            futures[0].set_exception(error)
        return futures.pop()  # an error's traceback keeps this frame, which must not keep the future, which keeps the error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is under way."""


class Landings:
    """Write-backs under way, oldest first.

    Args:
        land: Submits one.
        limit: So many may be under way; one more waits for the oldest, so that their memory is bounded.
    """

    def __init__(self, land: Callable[[Landing], Future[None]], limit: int) -> None:
        self._land, self._limit = land, limit
        self._futures: deque[Future[None]] = deque()
        self._failed = False
        self.failure: BaseException | None = None
        """The first error of a write-back, until it is raised; those of later ones only follow from it."""

    def add(self, landing: Landing) -> None:
        """Submit a write-back."""
        while len(self._futures) >= self._limit:
            self._take(self._futures.popleft())
        self.check()
        self._futures.append(self._land(landing))

    def check(self) -> None:
        """Raise the error of a write-back that has failed."""
        while self._futures and self._futures[0].done():
            self._take(self._futures.popleft())
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def finish(self) -> None:
        """Wait for all of them; ``failure`` tells how they ended."""
        while self._futures:
            self._take(self._futures.popleft())

    def _take(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None and not self._failed:
            self.failure, self._failed = error, True


class Loan:
    """A batch that is lent. Its tensors are taken once; from then on they belong to the user alone."""

    def __init__(self, transfer: Transfer, landings: Landings, slot: Slot, number: int) -> None:
        assert slot.load is not None
        load = slot.load
        self.rows, self.checksum, self.number, self.n_rows, self.nbytes = load.rows, load.checksum, number, load.n_rows, sum(slot.needed)
        self._rebuild, self._tensors = load.rebuild, transfer.lend(slot)
        self._transfer, self._landings = transfer, landings
        self._over = self._written = False

    def take(self) -> Any:
        """The batch, in the structure that the user knows."""
        tensors, rebuild = self._tensors, self._rebuild
        del self._tensors, self._rebuild  # which may know the batch as it was on the host
        return rebuild(iter(tensors))

    def end(self) -> None:
        """The next batch is asked for, or the loop has ended."""
        self._over = True

    def require_writable(self) -> Rows:
        """The rows of the batch, if it can be written back now.

        Raises:
            WriteBackError: The next batch was asked for, the loop is over, or it was written back already.
        """
        if self.rows is None:
            raise WriteBackError("write_back of a batch that does not come from stores; only rows of stores can be written back")
        if self._over:
            raise WriteBackError("write_back after the next batch was taken, or after the loop; call it before asking for the next batch")
        if self._written:
            raise WriteBackError("write_back was called for this batch before; give all values in one call (None for what stays as it is)")
        return self.rows

    def write(self, stores: Sequence[Store], values: Sequence[Tensor | None]) -> None:
        """Start to write values back; they have been checked."""
        self._landings.add(self._transfer.hold(stores, self.require_writable(), values))
        self._written = True


@dataclass(frozen=True)
class Pace:
    """How the batches of a loop are gathered."""

    n_readers: int = 1
    """Tasks at the same time. A loop that computes for longer than a gather takes asks for one at a time, so that one thread is busy at
    most; a loop that waits has all of them at work."""
    n_together: int = 1
    """Batches that one task gathers: small ones take less time than it takes to wake a thread."""


class Epoch:
    """One loop.

    Args:
        transfer: Whose slots are used; nobody else may be using them.
        meter: Counts.
        first: Number of the first batch.
        depth: Batches ahead.
        pace: Of the readers.
    """

    def __init__(self, transfer: Transfer, meter: Meter, first: int, depth: int, pace: Pace) -> None:
        device = transfer.device
        self._transfer, self._meter, self._first, self._n_slots, self._pace = transfer, meter, first, depth + 1, pace
        self._reader: Executor | Inline = device.worker("pinfeed-read", pace.n_readers) if depth else Inline()
        self._writer: Executor | Inline = device.worker("pinfeed-write") if depth else Inline()
        self.landings = Landings(lambda landing: self._writer.submit(self._task, transfer.land, landing), max(depth, 1))
        self._workers: set[int] = set()  # threads that have done a task
        self._drawn, self._turn = first, threading.Condition()

    def loans(self, loads: Generator[Load, None, None]) -> Iterator[Loan]:
        """Lend the batches in order. One that cannot be filled raises its error in its turn; a failed write-back, as soon as it is known.

        Args:
            loads: What to lend: a generator, iterated in the readers' threads, one at a time.
        """
        meter, transfer = self._meter, self._transfer
        loan: Loan | None = None
        consumer = threading.get_ident()
        slots, n_together = transfer.begin(self._n_slots), self._pace.n_together
        groups = [slots[i : i + n_together] for i in range(0, len(slots), n_together)]
        numbers = itertools.accumulate(itertools.cycle(map(len, groups)), initial=self._first)

        def submit(group: Sequence[Slot]) -> Filling:
            for slot in group:
                transfer.reserve(slot)
            filled: list[Slot] = []
            return Filling(group, filled, self._reader.submit(self._task, self._fill, loads, group, next(numbers), filled))

        asked = meter.enter()
        try:
            filling = deque(map(submit, groups))
            while True:
                filling[0].done.exception()
                for slot in filling[0].filled:
                    loan = Loan(transfer, self.landings, slot, self._first if loan is None else loan.number + 1)
                    lent = meter.lent(loan.number, loan.n_rows, loan.nbytes, asked)
                    yield loan
                    loan.end()
                    asked = meter.span("compute", loan.number, lent)
                    self.landings.check()
                group, filled = filling[0][:2]
                filling.popleft().done.result()  # by no name: an error's traceback keeps this frame, which must not keep the error
                if len(filled) < len(group):
                    break
                filling.append(submit(group))
                transfer.forget()
        except Cancelled:
            raise ClosedError("the feeder was closed while its loop was waiting for a batch") from None
        finally:
            meter.leave()
            if loan is not None:
                loan.end()
            if threading.get_ident() in self._workers - {consumer}:
                # The garbage collector has found the loop dropped while a worker ran, and a worker cannot wait for itself.
                threading.Thread(target=self._end, args=(loads,), name="pinfeed-end").start()
            else:
                self._end(loads)
        self.landings.check()

    def _fill(self, loads: Iterator[Load], group: Sequence[Slot], first: int, filled: list[Slot]) -> None:
        """Fill as many slots as there are loads for. An error comes when the batches before it have been filled."""
        drawn: list[Load] = []
        try:
            self._draw(loads, first, len(group), drawn)
        finally:
            for number, (slot, load) in enumerate(zip(group, drawn, strict=False), first):
                filled.append(self._transfer.fill(slot, load, number))

    def _draw(self, loads: Iterator[Load], first: int, n: int, drawn: list[Load]) -> None:
        """Append the loads from batch ``first`` on, at most ``n``. Readers take turns: tasks begin in order, but may come here in any."""
        with self._turn:
            self._turn.wait_for(lambda: self._drawn == first)
            try:
                drawn.extend(itertools.islice(loads, n))
            finally:
                self._drawn += n
                self._turn.notify_all()

    def _task(self, fn: Callable[..., Any], *args: Any) -> Any:
        self._workers.add(threading.get_ident())
        return guarded(fn, *args)

    def _end(self, loads: Generator[Load, None, None]) -> None:
        """Join the workers and let go of everything. Each step is done even if an interrupt ends the one before it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._transfer.quiesce)
            stack.callback(self._writer.shutdown, wait=True)
            stack.callback(self.landings.finish)
            stack.callback(loads.close)  # what the source holds goes now, not when an error's traceback does
            stack.callback(self._reader.shutdown, wait=True, cancel_futures=True)
            self._transfer.stop()


def guarded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn``; what would end the loop or the program in silence becomes an error that says so.

    Raises:
        WorkerError: ``fn`` raised StopIteration, SystemExit or the like.
    """
    try:
        return fn(*args)
    except (StopIteration, StopAsyncIteration, SystemExit, GeneratorExit) as error:
        raise WorkerError(
            f"{_where(error)} raised {error!r}, which would end the loop in silence; raise an error that says what is wrong"
        ) from error
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):  # a generator turns it into this
            raise WorkerError(
                f"{_where(error.__cause__)} raised {error.__cause__!r}, which would end the loop in silence"
            ) from error.__cause__
        raise


def _where(error: BaseException) -> str:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}, line {traceback.tb_lineno})"
