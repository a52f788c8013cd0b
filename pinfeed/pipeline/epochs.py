"""EpochRunner: the epochs of one source, one at a time: numbers, resuming, statistics, closing."""

from __future__ import annotations

import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NoReturn, TypeVar, cast

from pinfeed.devices.base import Device
from pinfeed.errors import ArgumentError, ClosedError, CopyError
from pinfeed.pipeline.abandoned import is_abandoned
from pinfeed.pipeline.prefetcher import LentBatch, Prefetcher, PrefetchSchedule
from pinfeed.pipeline.sources.base import Source
from pinfeed.pipeline.transfer import Transfer
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.starvation import StarvationMonitor
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.batches import SamplerBatches
from pinfeed.validation.arguments import whole_number

T = TypeVar("T")

logger = logging.getLogger("pinfeed")


def no_copy(feeder: object) -> NoReturn:
    """What pickle and copy get: threads, buffers and positions belong to one process.

    Raises:
        CopyError: Always.
    """
    raise CopyError(
        f"a {type(feeder).__name__} cannot be pickled or copied: its threads and memory are this process's; hand over paths, arrays or a "
        "function, and make it where it is used (its state_dict() can be sent)"
    )


def no_items(feeder: object, rows: object) -> NoReturn:
    """Refuse the samples that a ``torch.utils.data.DataLoader`` asks a data set for; every feeder's ``__getitems__``.

    No feeder has ``__getitem__``: numpy would take it for a sequence, and iterate an epoch where
    one stands in a list.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"a DataLoader asked a {type(feeder).__name__} for samples; expected a loop over the feeder itself, `for batch in feeder`, which "
        "is batched and prefetched as it is; where a DataLoader is wanted, give it pinfeed.RowDataset(source)"
    )


def is_suspended(generator: GeneratorType[Any, None, None]) -> bool:
    """Whether a generator has been begun, and waits to be asked for the next value."""
    return inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED


class EpochRunner:
    """Runs epochs over a source, each in a generator that owns its threads.

    Args:
        source: What to lend.
        device: Where to.
        schedule: How far ahead it is, and how batches are gathered.
        capacity: Bytes of each part of a full batch, as far as they are known.
        progress: Show a progress bar.
        timeline: Record spans.
    """

    def __init__(
        self,
        source: Source,
        device: Device,
        *,
        schedule: PrefetchSchedule,
        capacity: Sequence[int],
        progress: bool,
        timeline: bool,
    ) -> None:
        self.source = source
        self._schedule = schedule
        self._progress = progress
        self._counters = Counters(timeline=Timeline() if timeline else None)
        self._watch = StarvationMonitor(self._counters, source.hint)
        self._transfer = Transfer(device, schedule.n_slots, capacity, self._counters)
        self._epoch = 0
        self._batch = 0
        self._checksum = 0
        # The epoch of a state that was loaded, if all of its batches had been lent.
        self._whole: int | None = None
        # The next run begins at (_epoch, _batch); else that epoch was left, and the one after it
        # begins.
        self._fresh = True
        self._running: weakref.ref[GeneratorType[Any, None, None]] | None = None
        # Two threads may ask for a loop at the same time: one of them gets it.
        self._beginning = threading.Lock()
        self._last: Prefetcher | None = None
        self._closed = False

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or of the next one."""
        return self._epoch if self._is_running() else self._next()[0]

    @property
    def start(self) -> int:
        """The batch with which the next run begins."""
        return self._next()[1]

    @property
    def is_at_rest(self) -> bool:
        """Whether no epoch runs, and none was left before its end."""
        return self._fresh

    def __str__(self) -> str:
        """Say how far ahead it runs, and whether it is closed: the end of a feeder's ``repr``."""
        return f"{self._schedule.depth} ahead{', closed' if self._closed else ''}"

    @property
    def stats(self) -> FeederStats:
        return self._counters.stats()

    @property
    def timeline(self) -> Timeline:
        """What took time, batch by batch.

        Raises:
            ArgumentError: It was not recorded.
        """
        if self._counters.timeline is None:
            raise ArgumentError("no timeline was recorded; make the feeder with timeline=True")
        self._transfer.settle()
        return self._counters.timeline

    def run(
        self,
        lend: Callable[[LentBatch], T],
        schedule: PrefetchSchedule | None = None,
        begin: Callable[[], object] = lambda: None,
    ) -> Iterator[T]:
        """The next epoch, as what ``lend`` makes of each batch.

        Only a reference of the caller's keeps it going: ``break`` ends it.

        Args:
            lend: Called for each batch.
            schedule: Another one than was planned, with no more slots.
            begin: Called here, when an epoch may begin; if it raises, none has.

        Raises:
            ClosedError: The loop is closed, or an epoch runs.
        """
        with self._beginning:
            self._require_open()
            if self._is_running():
                self._leave_abandoned()
            if self._last is not None:
                self._last.require_not_forked()
                # Unless an interrupt has ended the wait for its readers, they are done.
                self._last.end()
            self._raise_failure()
            begin()
            generator = cast(
                "GeneratorType[T, None, None]", self._run(lend, schedule or self._schedule, begin)
            )
            self._running = weakref.ref(generator)
            return generator

    def set_epoch(self, number: int) -> None:
        """Let the next run be epoch ``number``: from where a state was loaded, if that is in this epoch, and else from its beginning."""
        self._require_idle("set_epoch()")
        number = whole_number(number, "epoch", least=0)
        if not (self._fresh and number == self._epoch):
            self._begin_at(number)

    def state(self) -> dict[str, Any]:
        """Where the loop is: batches that were prefetched and not lent count for nothing."""
        epoch, batch, checksum = (
            self._next() if self._fresh else (self._epoch, self._batch, self._checksum)
        )
        return {
            "epoch": epoch,
            "batch": batch,
            "checksum": checksum,
            "source": dict(self.source.fingerprint),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Let the next run go on where ``state`` was taken.

        Raises:
            ArgumentError: It is not such a state, or of another source.
        """
        self._require_idle("load_state_dict()")
        try:
            numbers = [int(state[key]) for key in ("epoch", "batch", "checksum")]
            theirs = dict(state["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a feeder ({error!r}); expected what state_dict() returned"
            ) from None
        ours = dict(self.source.fingerprint)
        if theirs != ours:
            differing = [
                f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}"
                for key in {**ours, **theirs}
                if theirs.get(key) != ours.get(key)
            ]
            raise ArgumentError(
                f"the state is of another feeder: {'; '.join(differing)}; make the feeder as it was made then"
            )
        if min(numbers) < 0 or numbers[1] > self._most():
            raise ArgumentError(
                f"a state of epoch {numbers[0]}, batch {numbers[1]}; an epoch has {self._most()} batches"
            )
        self._whole = numbers[0] if self._is_whole(numbers[1]) else None
        if self._whole is not None:
            numbers = [numbers[0] + 1, 0, 0]
        self._epoch, self._batch, self._checksum = numbers
        self._fresh = True

    def land(self) -> None:
        """Wait until everything that was written back is in its stores.

        Raises:
            The error of a write-back that failed.
        """
        if self._last is not None:
            self._last.require_not_forked()
            if not self._is_running():
                self._last.end()
            self._last.write_queue.land()

    def close(self) -> None:
        """End the run under way: join its workers, land its write-backs. Idempotent.

        Raises:
            The error of a write-back that failed after the loop could have raised it.
        """
        self._closed = True
        generator = self._running() if self._running is not None else None
        if generator is not None and generator.gi_running:
            # Another thread, or the code under a signal handler, waits for a batch.
            self._transfer.stop()
            return
        # A run that was not begun raises ClosedError when it is, and one of another thread when it
        # goes on: neither must seem to be over.
        if (
            generator is not None
            and is_suspended(generator)
            and self._last is not None
            and self._last.consumer == threading.get_ident()
        ):
            generator.close()
        if self._last is not None and not self._last.is_forked:
            self._last.end()
        self._transfer.close()
        self._raise_failure()

    def _run(
        self,
        lend: Callable[[LentBatch], T],
        schedule: PrefetchSchedule,
        begin: Callable[[], object],
    ) -> Iterator[T]:
        self._require_open()
        position = self._next()
        if self._fresh and position[0] != self._epoch:
            self._warn_if_dropped(position[0])
        (self._epoch, self._batch, self._checksum) = position
        self._fresh = False
        self._whole = None
        self._last = Prefetcher(self._transfer, self._batch, schedule)
        loads = self.source.epoch(
            self._epoch, self._batch, self._checksum, schedule.batches_per_slot
        )
        bar = self._bar() if self._progress else None
        counters = self._counters
        watch = self._watch
        start = self._batch
        watch.begin()
        try:
            for loan in self._last.loans(loads):
                self._batch = loan.number + 1
                self._checksum = loan.checksum
                if counters.batches >= watch.look_at:
                    watch.look()
                if bar is not None:
                    bar.update()
                yield lend(loan)
        except GeneratorExit:
            # The inner generator has ended by now.
            if self._last.write_queue.failure is not None:
                failure = self._last.write_queue.failure
                # Not logger.exception: the failure is another one than the GeneratorExit here.
                text = "a write_back failed when its loop was left; close() raises it"
                logger.error(text, exc_info=failure)  # noqa: TRY400
            raise
        finally:
            watch.end()
            if bar is not None:
                bar.close()
        left = self._batch > start
        self._epoch = self._epoch + 1
        self._batch = 0
        self._checksum = 0
        self._fresh = True
        if start and not left and math.isinf(self._most()):
            # The epoch was whole when its state was taken, which nobody could know before.
            begin()
            yield from self._run(lend, schedule, begin)

    def _bar(self) -> Any:
        from pinfeed.profiling.progress_bar import ProgressBar

        most = self._most()
        total = None if math.isinf(most) else most
        return ProgressBar(
            total=total,
            initial=self._batch,
            unit="batch",
            desc=f"epoch {self._epoch}",
            totals=self._counters.totals,
        )

    def _next(self) -> tuple[int, int, int]:
        """Epoch, batch and checksum with which the next run begins."""
        return (
            (self._epoch, self._batch, self._checksum) if self._fresh else (self._epoch + 1, 0, 0)
        )

    def _begin_at(self, epoch: int) -> None:
        """Let the next run be an epoch, from its beginning."""
        if self._fresh:
            self._warn_if_dropped(epoch)
        self._epoch = epoch
        self._batch = 0
        self._checksum = 0
        self._fresh = True

    def _warn_if_dropped(self, epoch: int) -> None:
        """Say so if a position was loaded that the next run, which is another epoch, does not go on from."""
        if epoch == self._whole:
            logger.warning(
                "epoch %d runs again: all of its batches had been lent when the state was taken that was loaded",
                epoch,
            )
        elif self._batch:
            logger.warning(
                "epoch %d begins at its first batch: the position that was loaded, batch %d of epoch %d, is dropped",
                epoch,
                self._batch,
                self._epoch,
            )

    def _is_whole(self, n_batches: int) -> bool:
        """Whether an epoch has no more than so many batches, as far as that is known."""
        return n_batches > 0 and n_batches == self._most()

    def _most(self) -> float:
        """Batches of an epoch, as far as that is known."""
        try:
            return len(self.source)
        except TypeError:
            return math.inf

    def _is_running(self) -> bool:
        generator = self._running() if self._running is not None else None
        return generator is not None and generator.gi_frame is not None

    def _leave_abandoned(self) -> None:
        """End the epoch that runs, if nobody can go on with it.

        Raises:
            ClosedError: If somebody can.
        """
        assert self._running is not None
        if not is_abandoned(self._running):
            raise ClosedError(
                "a loop over this feeder is running: somebody keeps its iterator; close() that iterator, make a second feeder, or iterate "
                "pinfeed.restartable(feeder), where each loop ends the one before; feeder.close() ends this one, and the feeder for good"
            )
        if (generator := self._running()) is not None:
            generator.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the feeder is closed; make a new one")

    def _require_idle(self, what: str) -> None:
        self._require_open()
        if self._is_running():
            raise ClosedError(
                f"{what} while a loop over this feeder is running; call it before the loop"
            )

    def _raise_failure(self) -> None:
        if self._last is not None:
            self._last.write_queue.check()


class SamplerEpochRunner(EpochRunner):
    """The epochs of a sampler.

    It is at the epoch of the loop, and after it at that of the next, unless its owner sets another
    one.

    A sampler that has ``set_epoch`` and does not tell its epoch is left to its owner and to
    ``set_epoch`` here, as it is by a DataLoader.
    """

    def __init__(self, *args: Any, batches: SamplerBatches, **options: Any) -> None:
        super().__init__(*args, **options)
        self._batches = batches

    def set_epoch(self, number: int) -> None:
        super().set_epoch(number)
        self._batches.set_epoch(self._epoch)

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._batches.follow(self._epoch)

    def _run(self, *args: Any) -> Iterator[Any]:
        try:
            yield from super()._run(*args)
        finally:
            # Now, so that an epoch which the owner sets after the loop is told from this one.
            if self._batches.chosen_epoch is None:
                self._batches.follow(self._next()[0])

    def _next(self) -> tuple[int, int, int]:
        epoch, batch, checksum = super()._next()
        chosen = self._batches.chosen_epoch
        return (epoch, batch, checksum) if chosen is None or chosen == epoch else (chosen, 0, 0)
