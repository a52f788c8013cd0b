"""SampleBatch: a batch of samples that threads make; SkippedSamples: samples that it leaves out."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from pinfeed.errors import ReadError, logger
from pinfeed.pipeline.sources.source import Cancelled, HostBatch, OtherBatch, host_batch_of
from pinfeed.pipeline.sources.user_calls import drop_frames, guarded
from pinfeed.stores.host_rows import CheckStop, FunctionPart, never
from pinfeed.stores.store import Array
from pinfeed.threads.call import Pending, Workers
from pinfeed.validation.arguments import check_choice, whole_number

MakeSamples = Callable[[], AbstractContextManager[Callable[[int], Any]]]
"""Returns a context of a thread, with a function that makes the sample at a position."""
Failures = list[tuple[int, Exception]]
"""Positions of the samples that were left out, in order, each with its error."""


class NoSamples:
    """Stands for a batch without samples, because all of them were left out."""


class SampleBatch:
    """A batch of samples, which several threads make in order.

    Samples that ``default_collate`` would stack are written straight into the memory of the batch.
    The first sample that does not fail gives its layout. Until the memory is known, each thread
    keeps at most one sample. If ``default_collate`` would convert later samples, as it converts
    integers and floats, it makes the batch. It is one class, because one lock guards what the
    threads and the reader of the batch share.

    Args:
        make_samples: Begins to make samples in a thread.
        n: Number of samples.
        collate: Makes a batch from a list of samples; None is ``default_collate``.
        skipped: Receives the samples that failed and were left out, when the loop receives the
            batch; None to raise the error of the first sample that fails.
        in_one_thread: Whether a single thread makes all samples.
    """

    def __init__(
        self,
        make_samples: MakeSamples,
        n: int,
        collate: Callable[[list[Any]], Any] | None,
        skipped: Callable[[Failures], object] | None,
        *,
        in_one_thread: bool = False,
    ) -> None:
        self._make_samples = make_samples
        self._n = n
        self._collate = collate
        self._skipped = skipped
        self._positions = deque(range(n))
        # Whether a sample has failed that is not left out.
        self._has_failed = False
        self._check_stop: CheckStop = never
        # None if the thread of the loop makes the samples.
        self._workers: Workers | None = None
        self._n_threads = 1 if in_one_thread else n
        self._calls: list[Pending[None]] = []
        # Guards the next four attributes. Without it, a sample that is made while the memory of the
        # batch becomes known could be kept, but never written. ``_places`` is set once, so a thread
        # may use it without the lock.
        self._lock = threading.RLock()
        self._layout: Any = None
        # For each leaf its array or list; None until the memory of the batch is known.
        self._places: list[Any] | None = None
        # Samples by position, while their places are not known. Later only those without a place,
        # because ``default_collate`` would convert them.
        self._samples: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        # All samples before this one have failed.
        self._first = 0
        # Memory of the columns so far, and the number of samples, which the HostBatch has.
        self._arrays: list[Array] = []
        self._sizes = [(n, 0)]

    def begin(self, workers: Workers | None, n_threads: int, check_stop: CheckStop) -> None:
        """Make threads begin with the samples; without threads, ``host_batch`` makes them.

        Args:
            workers: The threads; None without threads.
            n_threads: Number of threads that make samples.
            check_stop: Raises an error when the loop has ended; called before each sample.
        """
        self._check_stop = check_stop
        self._workers = workers
        if workers is not None:
            self._n_threads = min(n_threads, self._n_threads)
            self._continue()

    def host_batch(self) -> HostBatch:
        """Return the batch, and make its samples when its parts are read (reader).

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
        """
        if self._collate is None:
            if self._workers is None:
                self._continue()
            for call in self._calls:
                if self._layout is not None:
                    break
                call.result()
            if self._layout is None:
                # All samples have failed.
                self._wait()
        if self._collate is not None:
            return self.reporting(host_batch_of(self.batch()))
        if self._layout is None:
            return self.reporting(HostBatch([], lambda tensors: NoSamples(), [(0, 0)]))
        columns = [column for column in self._layout.columns if column is not None]
        parts = [FunctionPart(self._shape(one), one.dtype, self.read) for one in columns]
        return self.reporting(HostBatch(parts, self._rebuild, self._sizes))

    def read(self, out: Array, check_stop: CheckStop) -> None:
        """Take the memory of the next column, and with the last one complete the batch (reader)."""
        self._arrays.append(out)
        n_columns = sum(column is not None for column in self._layout.columns)
        if len(self._arrays) < n_columns:
            return
        arrays = iter(self._arrays)
        with self._lock:
            self._places = [
                [None] * self._n if column is None else next(arrays)
                for column in self._layout.columns
            ]
            samples = self._samples
            self._samples = {}
        while samples:
            self._write(*samples.popitem())
        self._continue()
        self._wait()
        check_stop()
        if self._samples:
            raise OtherBatch(self.reporting(host_batch_of(self._collate_written())))
        if self._errors:
            self._close_gaps()

    def _continue(self) -> None:
        """Make the samples that are left, in threads, if there are some."""
        if self._workers is None:
            self._work()
        else:
            submit = self._workers.submit
            self._calls += [submit(self._work) for _ in range(self._n_threads)]

    def _work(self) -> None:
        """Make samples until none is left, or until one has to wait for the memory of the batch."""
        with self._make_samples() as make:
            is_kept = False
            while not self._has_failed and not is_kept:
                try:
                    self._check_stop()
                    position = self._positions.popleft()
                except Exception:
                    # Either no position is left, or the loop has ended.
                    break
                try:
                    is_kept = self._put(position, guarded(self._make, make, position))
                except BaseException as error:
                    self._fail(position, error)

    def _make(self, make: Callable[[int], Any], position: int) -> Any:
        """Return the sample at a position."""
        return make(position)

    def _put(self, position: int, sample: Any) -> bool:
        """Write a sample to its place, or keep it until its place is known.

        Returns:
            Whether the thread makes no other sample until then.
        """
        if self._places is None:
            with self._lock:
                if self._places is None:
                    self._samples[position] = sample
                    self._find_layout()
                    return position in self._samples and self._collate is None
        self._write(position, sample)
        return False

    def _write(self, position: int, sample: Any) -> None:
        try:
            self._layout.write(self._layout.leaves(sample), position, self._places)
        except Exception as error:
            if self._layout.converts(sample):
                with self._lock:
                    self._samples[position] = sample
            else:
                self._fail(position, error)

    def _fail(self, position: int, error: BaseException) -> None:
        """Note the error of a sample."""
        with self._lock:
            self._note(position, error)
            self._find_layout()

    def _note(self, position: int, error: BaseException) -> None:
        self._errors[position] = error
        if self._may_skip(error):
            # Its frames would keep the batch as long as the error.
            drop_frames(error)
        else:
            self._has_failed = True

    def _may_skip(self, error: BaseException) -> bool:
        return self._skipped is not None and isinstance(error, Exception)

    def _find_layout(self) -> None:
        """Let the first sample that has not failed give the layout, if it was made (with the lock).

        The first sample to be ready may be another one in every run.
        """
        from pinfeed.tensors.sample_layout import SampleLayout, collated

        while self._collate is None and self._layout is None:
            while self._first in self._errors:
                self._first += 1
            if self._first not in self._samples:
                return
            try:
                layout = SampleLayout(self._samples[self._first])
            except Exception as error:
                del self._samples[self._first]
                # The next sample may give the layout.
                self._note(self._first, error)
                continue
            if not layout.stacks:
                self._collate = collated
            # The reader looks at the layout without the lock, so it is set last.
            self._layout = layout

    def _wait(self) -> None:
        """Wait until the threads have made all samples.

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
        """
        for call in self._calls:
            call.result()
        # Positions are taken in order, so that no earlier sample can fail later.
        fatal = [at for at, error in self._errors.items() if not self._may_skip(error)]
        if fatal:
            error = self._errors[min(fatal)]
            self._errors = {}
            try:
                raise error
            finally:
                # The error's traceback keeps this frame, which must not keep the error.
                del error
        if self._has_failed:
            raise Cancelled
        self._check_stop()

    def batch(self) -> Any:
        """Return what ``collate`` makes from all samples; NoSamples if all failed (reader).

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
        """
        assert self._collate is not None
        if self._workers is None or self._layout is not None:
            self._continue()
        self._wait()
        samples = [self._samples.pop(position) for position in sorted(self._samples)]
        if not samples and self._errors:
            return NoSamples()
        return guarded(self._collate, samples)

    def _collate_written(self) -> Any:
        """Return what ``default_collate`` makes, if some samples are already in their places."""
        from pinfeed.tensors.sample_layout import collated

        samples = []
        for position in range(self._n):
            if position in self._samples:
                samples.append(self._samples[position])
            elif position not in self._errors:
                samples.append(self._layout.sample(position, self._places))
        return guarded(collated, samples)

    def reporting(self, batch: HostBatch) -> HostBatch:
        """Return a HostBatch that reports the samples left out when the loop receives it."""
        if self._skipped is not None:
            batch.complete = self._report
        return batch

    def _shape(self, column: Any) -> tuple[int, ...]:
        """Return the shape of a column of the batch."""
        return (self._n, *column.shape)

    def _close_gaps(self) -> None:
        """Move the samples together, because some were left out."""
        assert self._places is not None
        kept = [position for position in range(self._n) if position not in self._errors]
        for place in self._places:
            for i, position in enumerate(kept):
                if i != position:
                    place[i] = place[position]
        self._sizes[:] = [(len(kept), 0)]

    def _rebuild(self, tensors: Iterator[Any]) -> Any:
        """Return the batch in the structure that ``default_collate`` gives it."""
        assert self._places is not None
        stacked = [
            place if column is None else next(tensors)
            for place, column in zip(self._places, self._layout.columns, strict=True)
        ]
        if self._errors:
            n_kept = self._n - len(self._errors)
            stacked = [column[:n_kept] for column in stacked]
        return self._layout.rebuild(stacked)

    def _report(self, batch: Any, tensors: Sequence[Any]) -> Any:
        """Report the samples that were left out, and return the batch."""
        assert self._skipped is not None
        self._skipped(cast("Failures", sorted(self._errors.items())))
        return batch


class SkippedSamples:
    """The samples that the loops of a feeder have left out.

    Args:
        most: Number of samples that a loop may leave out.

    Attributes:
        found: Epoch, index and error of each sample, in the order of the loop's batches.
    """

    def __init__(self, most: int) -> None:
        self.found: list[tuple[int, Any, Exception]] = []
        self._most = most
        self._n_in_loop = 0

    @staticmethod
    def for_option(on_error: Any, max_skipped: Any) -> SkippedSamples | None:
        """Return the samples that loops have left out; None if ``on_error`` is not ``"skip"``.

        Raises:
            ArgumentError: If an option is invalid.
        """
        check_choice(on_error, "on_error", ("raise", "next", "skip"))
        most = whole_number(max_skipped, "max_skipped", least=0)
        return SkippedSamples(most) if on_error == "skip" else None

    def begin(self) -> None:
        """Note that a loop begins."""
        self._n_in_loop = 0

    def of(self, epoch: int, indices: Sequence[Any]) -> Callable[[Failures], object]:
        """Return the function that notes the failures of a batch, when the loop receives it.

        Args:
            epoch: Number of the epoch.
            indices: Index in the dataset of each sample of the batch.
        """
        return functools.partial(self._add, epoch, indices)

    def without_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches that have samples."""
        given = []
        for batch in batches:
            if type(batch) is not NoSamples:
                given.append(batch)
            del batch
            if given:
                # From now on, the loop alone keeps the batch.
                yield given.pop()

    @staticmethod
    def passing(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return ``device_transform`` as a function that passes batches without samples."""
        if not callable(function):
            return function

        @functools.wraps(getattr(function, "forward", function))
        def transform(batch: Any, **given: Any) -> Any:
            return batch if type(batch) is NoSamples else function(batch, **given)

        return transform

    def _add(self, epoch: int, indices: Sequence[Any], failures: Failures) -> None:
        """Note failures.

        Raises:
            ReadError: If the loop has left out too many samples.
        """
        if not failures:
            return
        for position, error in failures:
            index = indices[position]
            self.found.append((epoch, index, error))
            logger.warning("skipped dataset[%r] in epoch %d: %r", index, epoch, error)
        self._n_in_loop += len(failures)
        if self._n_in_loop > self._most:
            _, index, error = self.found[-1]
            raise ReadError(
                f"{self._n_in_loop} samples failed in epoch {epoch}; expected at most "
                f"max_skipped={self._most}; the last one is dataset[{index!r}]: {error!r}"
            ) from error
