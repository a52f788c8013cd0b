"""SampleBatch: a batch of samples that several threads make."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np

from pinfeed.errors import add_note
from pinfeed.pipeline.slot import Cancelled
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.pipeline.sources.host_leaves import host_batch_of
from pinfeed.pipeline.sources.sample_stack import Array, SampleStack
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.stores.host_rows import CheckStop, never
from pinfeed.threads.call import Pending, Workers

MakeSamples = Callable[[], AbstractContextManager[Callable[[int], Any]]]
"""Returns a context of a thread, with a function that makes the sample at a position."""
Failures = list[tuple[int, Exception]]
"""Positions of the samples that were left out, in order, each with its error."""


class NoSamples:
    """Stands for a batch without samples, because all of them were left out."""


class SampleBatch:
    """Batch of samples, which threads begin to make in the order of their positions.

    Args:
        make_samples: Begins to make samples in a thread.
        n: Number of samples.
        collate: Makes a batch from a list of samples; None is ``default_collate``.
        skipped: Receives the samples that failed and were left out, when the loop receives the
            batch; None to raise the error of the first sample that fails.
    """

    def __init__(
        self,
        make_samples: MakeSamples,
        n: int,
        collate: Callable[[list[Any]], Any] | None,
        skipped: Callable[[Failures], object] | None,
    ) -> None:
        self._make_samples = make_samples
        self._n = n
        self._collate = collate
        self._skipped = skipped
        self._stack = SampleStack(n, stacks=collate is None)
        self._positions = deque(range(n))
        # Errors by position: of samples, and of samples that cannot be stacked with others.
        self._failures: dict[int, Exception] = {}
        self._misfits: dict[int, Exception] = {}
        self._is_stopped = False
        self._check_stop: CheckStop = never
        self._calls: list[Pending[None]] = []
        self._is_inline = True
        # Whether a sample was made.
        self._has_begun = False
        self._arrays: list[Array] = []
        self._sizes = [(n, 0)]

    def begin(self, workers: Workers | None, n_threads: int) -> None:
        """Make threads begin with the samples; without ``workers``, ``host_batch`` makes them."""
        if workers is not None:
            self._is_inline = False
            # ``host_batch`` waits for the first call, so it makes no more than one sample.
            only_first = [True, *[False] * min(n_threads, self._n)]
            self._calls = [workers.submit(self._work, one) for one in only_first]

    def stop(self) -> None:
        """Make no more samples, because the loop has ended. Any thread may call this."""
        self._is_stopped = True

    def host_batch(self) -> HostBatch:
        """Return the batch; its samples are made at the latest when its parts are read (reader).

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
        """
        if self._is_inline:
            self._work(only_first=True)
        else:
            self._calls[0].result()
        if self._stack.stacks is None:
            # All samples so far have failed.
            self._complete()
        if self._stack.stacks:
            parts = [_ColumnPart(self, *column) for column in self._stack.columns]
            return HostBatch(parts, self._rebuild, self._sizes)
        return self.reporting(host_batch_of(self.batch()))

    def read(self, out: Array, check_stop: CheckStop) -> None:
        """Take the memory of the next column, and with the last one complete the batch (reader)."""
        self._arrays.append(out)
        if len(self._arrays) < len(self._stack.columns):
            return
        self._check_stop = check_stop
        self._stack.place(self._arrays)
        self._complete()
        check_stop()
        if self._failures:
            kept = [position for position in range(self._n) if position not in self._failures]
            self._stack.close_gaps(kept)
            # The HostBatch has this list.
            self._sizes[:] = [(len(kept), 0)]

    def batch(self) -> Any:
        """Return what ``collate`` makes from all samples; NoSamples if all failed (reader).

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
        """
        from torch.utils.data import default_collate

        self._complete()
        samples = [sample for _, sample in sorted(self._stack.kept.items())]
        self._stack.kept = {}
        if not samples:
            return NoSamples()
        try:
            return guarded(self._collate or default_collate, samples)
        except Exception as error:
            add_note(error, f"in collate_fn of {len(samples)} samples")
            raise

    def reporting(self, batch: HostBatch) -> HostBatch:
        """Return a HostBatch that reports the samples left out when the loop receives it."""
        if self._failures:
            rebuild = batch.rebuild

            def report_and_rebuild(tensors: Iterator[Any]) -> Any:
                self._report()
                return rebuild(tensors)

            batch.rebuild = report_and_rebuild
        return batch

    def _work(self, only_first: bool = False) -> None:
        """Make samples until none is left, or only until one was made."""
        with self._make_samples() as make:
            while not self._is_stopped and not (only_first and self._has_begun):
                try:
                    self._check_stop()
                    position = self._positions.popleft()
                except Exception:
                    # Either no position is left, or the loop has ended.
                    break
                self._make(make, position)

    def _make(self, make: Callable[[int], Any], position: int) -> None:
        """Make the sample at a position, and add it to the batch."""
        try:
            sample = guarded(make, position)
        except Exception as error:
            # Without this frame, a kept error does not keep the memory of the batch.
            self._failures[position] = error.with_traceback(_inner(error.__traceback__))
            if self._skipped is None:
                self._is_stopped = True
            return
        try:
            self._stack.put(position, sample)
        except Exception as error:
            add_note(error, f"in sample {position} of a batch of {self._n}")
            self._misfits[position] = error.with_traceback(None)
            self._is_stopped = True
        else:
            self._has_begun = True

    def _complete(self) -> None:
        """Wait until all samples are made, or make them.

        Raises:
            Exception: If a sample failed, and is not left out; the error of the first one.
            Cancelled: If the loop has ended.
        """
        if self._is_inline:
            self._work()
        for call in self._calls:
            call.result()
        errors = self._misfits | (self._failures if self._skipped is None else {})
        if errors:
            # Positions are taken in order, so no earlier sample can fail later.
            error = errors[min(errors)]
            self._failures = {}
            self._misfits = {}
            try:
                raise error
            finally:
                # The error's traceback keeps this frame, which must not keep the error.
                del error, errors
        if self._is_stopped:
            raise Cancelled

    def _rebuild(self, tensors: Iterator[Any]) -> Any:
        """Return the batch in the structure that ``default_collate`` gives it."""
        if self._failures:
            self._report()
        return self._stack.rebuild(tensors, self._sizes[0][0])

    def _report(self) -> None:
        assert self._skipped is not None
        self._skipped(sorted(self._failures.items()))


def _inner(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its outermost frame."""
    return None if traceback is None else traceback.tb_next


class _ColumnPart:
    """A column of a batch, as a part; the last one that is read completes all samples."""

    def __init__(self, batch: SampleBatch, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._batch = batch
        self.shape = shape
        self.dtype = dtype

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Fill ``out``, at the latest when the last column of the batch is read."""
        self._batch.read(out, check_stop)
