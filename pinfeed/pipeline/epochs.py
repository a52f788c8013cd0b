"""EpochRunner: runs the epochs of one source, one at a time."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device, Tensor
from pinfeed.errors import ArgumentError, ClosedError, logger
from pinfeed.pipeline.active_run import ActiveRun, ContinuingIterator, is_suspended
from pinfeed.pipeline.composition import make_loop
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop import EPOCH_END, Loop
from pinfeed.pipeline.loop_transforms import NO_TRANSFORMS, LoopTransforms
from pinfeed.pipeline.position import EpochPosition
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import Source
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.pipeline.transfer import Transfer
from pinfeed.profiling.counters import Counters, StallMonitor
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.validation.arguments import whole_number

T = TypeVar("T")


_IS_RUNNING = (
    "a loop over this feeder is running in another thread, or is waiting for a batch; end that "
    "loop first, or make a second feeder"
)
"""Error of a loop that may not begin."""


class EpochRunner:
    """Runs epochs over a source, each in a generator that owns its threads.

    It is one class because a feeder delegates all of its loop to it: runs, position, statistics.

    Args:
        source: Source of the batches.
        device: Device that batches are moved to.
        schedule: Number of batches to prefetch, and of reader threads.
        capacity: Bytes of each part of a full batch; empty if they are unknown.
        progress: Whether to show a progress bar.
        timeline: Whether to record a timeline.
        transforms: The transforms.
        continuous: Whether loops that only read may read the next epoch before one ends.
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
        transforms: LoopTransforms = NO_TRANSFORMS,
        continuous: bool = False,
    ) -> None:
        self.source = source
        self._continuous = continuous
        self._schedule = schedule
        self._progress = progress
        self._position = EpochPosition(source, transforms.fingerprint)
        self._counters = Counters(timeline=Timeline() if timeline else None)
        self._counters.counts.depth = schedule.depth
        self._stalls = StallMonitor(self._counters)
        self._transforms = transforms
        make_mover: Any = HostTransfer
        if not device.unified:
            has_transform = transforms.device is not None
            make_mover = functools.partial(Transfer, has_device_transform=has_transform)
        self._transfer: Transfer | HostTransfer = make_mover(device, capacity, self._counters)
        self.finish_step: Callable[[], object] | None = None
        """Function that the next run calls before it ends, to write the rows of its last batch."""
        self._active = ActiveRun()
        # If two threads request a run at the same time, only one of the threads begins it.
        self._beginning = threading.Lock()
        # Loop of the last run.
        self._last_loop: Loop | None = None
        self._keeps_last = False
        # Batches of this loop, if it waits for its next epoch. If the runner is dropped, so is this
        # generator, which ends the loop.
        self._paused: Generator[LentBatch, None, None] | None = None
        self._closed = False

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next one if no epoch runs."""
        has_begun = self._active.has_begun and self._active.is_running
        return self._position.epoch if has_begun else self._position.next()[0]

    @property
    def is_running(self) -> bool:
        """Whether an iterator exists whose run has not ended."""
        return self._active.is_running

    @property
    def start(self) -> int:
        """Number of the first batch of the next run."""
        return self._position.next()[1]

    @property
    def is_at_rest(self) -> bool:
        """Whether no epoch is running or was left before its end."""
        return self._position.is_at_rest

    def __str__(self) -> str:
        """Describe the depth and whether the runner is closed, for the ``repr`` of a feeder."""
        return f"depth={self._counters.counts.depth}{', closed' if self._closed else ''}"

    @property
    def stats(self) -> FeederStats:
        """Statistics of all runs."""
        return self._counters.stats()

    @property
    def timeline(self) -> Timeline:
        """Spans of each batch.

        Raises:
            ArgumentError: If no timeline was recorded.
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
        through: Callable[[Iterator[T]], Iterator[Any]] = lambda batches: batches,
        *,
        keeps_errors: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator over the next epoch.

        Only the caller's reference keeps the epoch running, so ``break`` ends it.

        Args:
            lend: Makes the value that is yielded for each batch.
            schedule: Schedule of this run, with no more slots than the planned schedule, which is
                the default.
            begin: Called by ``run``, when an epoch may begin. If it raises, no epoch has begun.
            through: Generator function that takes the iterator over the batches; ``run`` returns
                its iterator. When that is closed, it has finished before the next run begins.
            keeps_errors: Whether the iterator continues after an error of ``lend``.

        Raises:
            ClosedError: If the runner is closed, or an epoch runs and cannot be ended.
        """
        errors: list[Exception] = []
        if keeps_errors:
            lend = functools.partial(self._lend_or_keep, lend, errors)
        with self._beginning:
            self.end_last()
            if self._last_loop is not None and self._paused is None:
                # The reader threads have ended, unless an interrupt has cut off the wait for them.
                self._last_loop.end()
            self._raise_failure()
            begin()
            schedule = schedule or self._schedule
            batches = through(self._run(lend, schedule, begin))
            self._active, generator = ActiveRun.begin(batches)
            return ContinuingIterator(generator, errors) if keeps_errors else generator

    def end_last(self) -> None:
        """End the last run if it has not ended, because another one begins.

        Raises:
            ClosedError: If the runner is closed, or the run cannot be ended.
        """
        self._require_open()
        how = "when another loop over its feeder began; make a second feeder for the other loop"
        self._end_run(how, _IS_RUNNING)

    def leave(self, reason: str) -> None:
        """End the last run, which this thread iterates over, as ``break`` does.

        Args:
            reason: Error that its iterator raises when another batch is requested.
        """
        if self._active.is_running:
            self._active.end(reason)

    def set_epoch(self, number: int) -> None:
        """Make the next run epoch ``number``.

        The run begins at a loaded position in this epoch, or otherwise at the first batch.
        """
        self._require_open()
        number = whole_number(number, "epoch", least=0)
        self._leave_for("set_epoch()")
        position = self._position.next()
        self._position.set_epoch(number)
        if self._position.next() != position:
            self._end_paused()

    def state(self) -> dict[str, Any]:
        """Return the position of the loop; prefetched batches do not count."""
        return self._position.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Make the next run continue at a saved position.

        Raises:
            ArgumentError: If ``state`` is no state, or the state of another source.
        """
        self._require_open()
        self._position.check(state)
        self._leave_for("load_state_dict()")
        self._end_paused()
        self._position.load(state)

    def drain(self) -> None:
        """Wait until all values that were written back are in their stores.

        Raises:
            Exception: If a write-back failed; its error.
        """
        if self._last_loop is not None:
            self._last_loop.threads.require_not_forked()
            if not self._active.is_running and self._paused is None:
                self._last_loop.end()
            self._last_loop.drain()

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Wait for the device, and return the values of a tensor of the current batch."""
        return self._transfer.copy_to_host(tensor, shape, dtype)

    def close(self) -> None:
        """End the run, join its threads and complete its write-backs. It may be called again.

        Raises:
            Exception: If a write-back failed, and the loop could not raise its error any more.
        """
        self._closed = True
        generator = self._active.generator()
        if generator is not None and generator.gi_running:
            # Another thread waits for a batch, or this signal handler has interrupted the wait.
            self.source.stop()
            self._transfer.stop()
            return
        # A run that has not begun raises ClosedError when it begins, and a run of another thread
        # when it continues. Neither epoch must seem to be complete.
        if (
            generator is not None
            and is_suspended(generator)
            and self._last_loop is not None
            and self._last_loop.consumer == threading.get_ident()
        ):
            generator.close()
        self._end_paused()
        if self._last_loop is not None and not self._last_loop.threads.is_forked:
            self._last_loop.end()
        self._transfer.close()
        self._raise_failure()

    def _run(
        self,
        lend: Callable[[LentBatch], T],
        schedule: PrefetchSchedule,
        begin: Callable[[], object],
    ) -> Iterator[T]:
        self._require_open()
        position = self._position
        counters = self._counters
        stalls = self._stalls
        counters.enter(
            schedule.depth,
            schedule.n_readers if schedule.depth else 1,
            n_transform_threads=schedule.n_transform_threads if schedule.depth else 1,
            asynchronous=not self._transfer.device.unified,
        )
        kept: list[T] = []
        bar: Any = None
        try:
            start = position.begin_run()
            bar = self._bar() if self._progress else None
            # No variable holds the inner generator, so it has ended when an except clause runs.
            for lent_batch in self._lend(schedule):
                position.batch = lent_batch.number + 1
                position.checksum = lent_batch.checksum
                if counters.counts.batches >= stalls.next_check:
                    stalls.check()
                if bar is not None:
                    bar.update()
                kept.append(lend(lent_batch))
                counters.lend()
                yield kept[-1] if self._keeps_last else kept.pop()
                counters.request()
                if self._keeps_last:
                    del kept[:-1]
        except GeneratorExit:
            self._log_failure()
            raise
        finally:
            # An error's traceback keeps this frame.
            kept.clear()
            if bar is not None:
                bar.close()
            counters.leave()
            position.end_run()
        n_batches = position.batch - start
        position.complete_epoch()
        if start and not n_batches and position.goes_on_at_end:
            # The epoch was complete when the state was saved, which only its end shows.
            begin()
            yield from self._run(lend, schedule, begin)

    def _lend(self, schedule: PrefetchSchedule) -> Iterator[LentBatch]:
        """Start the threads of a run, or continue a paused loop; return its batches."""
        position = self._position
        batches = self._paused
        self._paused = None
        if batches is not None and self._last_loop is not None:
            if self._last_loop.resume(schedule, position.epoch, position.batch):
                return self._until_epoch_ends(batches)
            batches.close()
        self._last_loop = make_loop(
            self._transfer,
            self.source,
            position,
            schedule,
            self._transforms,
            continuous=self._continuous,
        )
        self._last_loop.finish_step = self.finish_step
        self._keeps_last = self._last_loop.keeps_last
        lent = self._last_loop.batches()
        return self._until_epoch_ends(lent) if self._last_loop.is_continuous else lent

    def _until_epoch_ends(self, batches: Iterator[LentBatch]) -> Iterator[LentBatch]:
        """Yield the batches of an epoch of a continuous loop; keep the loop if it has read on."""
        for lent_batch in batches:
            if lent_batch is EPOCH_END:
                self._paused = cast("Generator[LentBatch, None, None]", batches)
                return
            yield lent_batch

    def _end_paused(self) -> None:
        """End the loop that waits for its next epoch, if any, and join its threads."""
        batches = self._paused
        self._paused = None
        if batches is not None:
            batches.close()

    def _lend_or_keep(
        self, lend: Callable[[LentBatch], Any], errors: list[Exception], lent_batch: LentBatch
    ) -> Any:
        """Return the value to yield for a batch; None if there is an error in its place."""
        try:
            return guarded(lend, lent_batch)
        except Exception as error:
            self._counters.fail()
            errors.append(error)
            return None

    def _log_failure(self) -> None:
        """Log the error of a write-back, because a loop that was left does not raise it."""
        assert self._last_loop is not None
        writes = self._last_loop.writes
        if writes is not None and (failure := writes.failure) is not None:
            text = "a write_back failed after the loop was left; close() raises its error"
            # logger.exception would log the GeneratorExit.
            logger.error(text, exc_info=failure)

    def _bar(self) -> Any:
        from pinfeed.profiling.progress_bar import ProgressBar

        n_batches = self._position.n_batches
        return ProgressBar(
            total=None if math.isinf(n_batches) else n_batches,
            initial=self._position.batch,
            unit="batch",
            desc=f"epoch {self._position.epoch}",
            stats=self._counters.stats,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the feeder is closed; make a new one")

    def _leave_for(self, what: str) -> None:
        """End the last run, because ``what`` was called.

        Raises:
            ClosedError: If the run cannot be ended.
        """
        how = f"by {what}; call it before the loop"
        self._end_run(
            how, f"{what} while a loop over this feeder is running; call it before the loop"
        )

    def _end_run(self, how: str, refusal: str) -> None:
        """End the last run, if it has not ended.

        Args:
            how: End of the error that its iterator raises when another batch is requested.
            refusal: Error of this call if the run cannot be ended.

        Raises:
            ClosedError: If the run cannot be ended.
        """
        if self._last_loop is not None:
            self._last_loop.threads.require_not_forked()
        if self._active.is_running and not self._active.end(f"this loop was ended {how}"):
            raise ClosedError(refusal)

    def _raise_failure(self) -> None:
        if self._last_loop is not None and self._last_loop.writes is not None:
            self._last_loop.writes.check()
