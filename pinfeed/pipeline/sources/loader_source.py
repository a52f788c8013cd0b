"""LoaderSource: the batches of a torch DataLoader, or of another iterable of batches."""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.pipeline.sources.row_fetch import RowFetch
from pinfeed.pipeline.sources.sample_batch import SkippedSamples
from pinfeed.pipeline.sources.source import (
    BatchThunk,
    BatchThunks,
    HostBatch,
    Source,
    failed_batch,
    host_batch_of,
    made_or_failed,
)
from pinfeed.pipeline.sources.user_calls import BatchTransform, guarded
from pinfeed.rows.order_batches import EpochHooks
from pinfeed.validation.suggestions import is_array_like

if TYPE_CHECKING:
    from pinfeed.tensors.filled_memory import FilledMemory
    from pinfeed.tensors.rng_state import GeneratorStates


def check_loader(loader: Any) -> None:
    """Refuse an object that does not yield batches.

    Raises:
        ArgumentError: If ``loader`` cannot be iterated over, or yields single samples or names.
    """
    from torch.utils.data import Dataset

    # Iterating over a table of pandas or Arrow, which has columns and no dtype, yields its columns
    # or their names.
    is_table = all(hasattr(loader, name) for name in ("shape", "columns", "__getitem__"))
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    found = ""
    if isinstance(loader, Mapping) or is_table:
        found = "iterating over it yields its keys or columns"
    elif is_array_like(loader) or (isinstance(loader, Dataset) and not hasattr(loader, "__iter__")):
        found = "it yields single samples"
    elif isinstance(loader, (str, bytes)) or not is_iterable:
        found = "it cannot be iterated"
    if found:
        shown = repr(loader) if not is_iterable else f"a {type(loader).__name__}"
        raise ArgumentError(
            f"loader is {shown}, and {found}; expected a DataLoader or another iterable of "
            "batches; give DataLoader(dataset, batch_size=...), or use "
            "pinfeed.Feeder(source, batch_size=...) for arrays, tensors and files"
        )


class LoaderSource(Source):
    """The batches of a loader.

    The consumer thread begins an epoch with ``begin``, and calls every method except ``epoch`` and
    ``draw``.

    Args:
        loader: Loader that each epoch iterates over.

    Attributes:
        fetch: Rows that are added to each batch; None for the loader's batches alone. It is set
            before the first epoch.
        host_transform: Function that is called on every batch before its ids are read; None if
            there is none. It is set before the first epoch.
        transforms_in_thunks: Whether thunks call ``host_transform``, which several threads may do
            at the same time. It is set before the first epoch.
        keeps_errors: Whether an error takes the place of its batch, and the loop continues. It is
            set before the first epoch.
        n_ahead: Maximum number of batches that are requested from the loader while the training
            loop uses an earlier one. It is set before the first epoch.

    Raises:
        ArgumentError: If ``loader`` cannot be iterated over, or yields single samples or names.
    """

    fingerprint: Mapping[str, Any] = {"order": "a DataLoader's own"}

    def __init__(self, loader: Any) -> None:
        check_loader(loader)
        self.loader = loader
        self.fetch: RowFetch | None = None
        self.host_transform: BatchTransform | None = None
        self.transforms_in_thunks = False
        # Epoch and number of the next batch.
        self._epoch = 0
        self._number = 0
        self.keeps_errors = False
        # The samples that are left out; None if none is left out.
        self.skipped: SkippedSamples | None = None
        self.n_ahead = 0
        # Source of a wrapped loader, which is ahead of this one.
        inner = getattr(loader, "_source", None)
        self._inner = inner if isinstance(inner, LoaderSource) else None
        # Maximum number of batches that wait in a loop over the feeder of this source.
        self._n_ahead_outside = 0
        # Batches of the running epoch, if some are requested early.
        self._running: LoaderBatches | None = None
        # Generators of the loader, if batches of the running epoch are requested early.
        self._generators: Sequence[GeneratorStates] = ()
        # Memory of the last batches; None if the loader gives each batch its own.
        self._memory: FilledMemory | None = None
        self._begun: Iterator[Any] | None = None
        # A loader that is an iterator itself serves one epoch.
        self._is_used_up = False

    def __len__(self) -> int:
        return len(self.loader)

    def open(self, device: Device) -> None:
        """Prepare to make batches for a device. A feeder calls this once."""

    def begin(self) -> None:
        """Start the loader's next epoch, as a loop over the loader itself would.

        In this call, the loader draws its seeds and forks its worker processes: before a reader
        thread exists, and in a thread in which torch can watch the worker processes.

        Raises:
            ArgumentError: If the loader is an iterator that has served an epoch.
        """
        if self._inner is not None:
            self._inner._n_ahead_outside = self._n_ahead_of_step
        self._generators = ()
        begun = guarded(iter, self.loader)
        if begun is self.loader and self._is_used_up:
            raise ArgumentError(
                f"loader={self.loader!r} is an iterator, which yields its batches only once; for a "
                "second epoch, give an iterable that can be iterated over again"
            )
        self._begun = begun
        self._is_used_up = True

    def skip(self, n: int) -> None:
        """Drop the first ``n`` batches of the epoch that was begun.

        Raises:
            ArgumentError: If the epoch has fewer batches.
        """
        assert self._begun is not None
        for i in range(n):
            if guarded(next_batch, self._begun) is END:
                raise ArgumentError(
                    f"{n} batches of this epoch were done when the state was saved, but the loader "
                    f"now yields only {i}; make the loader as it was when the state was saved"
                )

    def finish(self) -> None:
        """Drop the remaining batches, so that the loader ends its epoch as usual."""
        begun = self._begun
        self._begun = None
        assert begun is not None
        for _ in self._draws(begun):
            pass

    def end(self) -> None:
        """Release an epoch that was begun without a request for a batch."""
        self._begun = None

    def epoch(self, number: int, start: int, checksum: int, batches_per_slot: int) -> BatchThunks:
        """Yield the batches of the epoch that was begun last, one per thunk."""
        return self._draws(self.own_batches(number, start, may_wait=True))

    def own_batches(self, number: int, start: int, *, may_wait: bool) -> Iterator[Any]:
        """Return the loader's batches of the epoch that was begun last.

        Args:
            number: Number of the epoch.
            start: Number of the first batch.
            may_wait: Whether a batch may be read when the loader has begun the next one, and so
                must keep its memory until then.
        """
        batches = self._begun
        self._begun = None
        assert batches is not None
        self._epoch = number
        self._number = start
        if self._n_ahead_of_step:
            batches = self._running = self._watched(batches, start, may_wait=may_wait)
            self._n_ahead_outside = 0
        return batches

    @property
    def is_plain(self) -> bool:
        """Whether the batches are the loader's own before any transform, and errors end a loop."""
        is_own = type(self) in (LoaderSource, StatefulSource) and self.fetch is None
        return is_own and not self.keeps_errors

    def stop(self) -> None:
        if self._running is not None:
            self._running.wake()

    @property
    def _n_ahead_of_step(self) -> int:
        """Maximum number of batches that wait for the training step, here and outside."""
        return self.n_ahead + self._n_ahead_outside

    def rewind(self, n_requested: int) -> None:
        running = self._running
        self._running = None
        for generator in self._generators:
            generator.rewind(n_requested)
        if self._inner is not None and running is not None:
            # Its loop ends where this one has requested the last batch, which is ahead, too.
            running.close()
            self._inner.rewind(n_requested)

    def _watched(self, batches: Iterator[Any], start: int, *, may_wait: bool) -> LoaderBatches:
        """Return the batches, with notes of what the loader changes ahead of the training loop."""
        from pinfeed.tensors.filled_memory import FilledMemory
        from pinfeed.tensors.rng_state import GeneratorStates, own_generators

        n_ahead = self._n_ahead_of_step
        # A wrapped loader draws at any time, and keeps the states itself.
        generators = own_generators(self.loader) if self._inner is None else ()
        # The end of the epoch counts as a batch.
        self._generators = [GeneratorStates(one, n_ahead + 2, start) for one in generators]
        if may_wait and self._may_fill_again():
            self._memory = FilledMemory(f"loader={type(self.loader).__name__}", n_ahead)
        # If host_transform is called for one batch at a time, its results wait instead.
        waits = self.host_transform is None or self.transforms_in_thunks
        return LoaderBatches(batches, self._generators, self._memory if waits else None)

    def _may_fill_again(self) -> bool:
        """Return whether the loader may return the same memory in several batches."""
        from torch.utils.data import DataLoader, default_collate

        if getattr(self.loader, "num_workers", 0):
            return False
        return type(self.loader) is not DataLoader or self.loader.collate_fn is not default_collate

    def draw(self, batch: Any) -> BatchThunk:
        """Make the thunk of a batch. Reader threads call this in the order of batches."""
        if self.fetch is None:
            return functools.partial(host_batch_of, batch)
        # The user's functions run in this call, one batch at a time. Any free reader thread gathers
        # the rows.
        return functools.partial(self.fetch.add, batch, self.fetch.ids(batch))

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; ``END`` after the last one.

        Reader threads call this, one at a time. It calls ``host_transform``, unless thunks do so.
        """
        number = self._number
        # The number counts batches that fail, too.
        self._number += 1
        batch = next_batch(batches)
        if self.host_transform is None or self.transforms_in_thunks or batch is END:
            return batch
        batch = self.host_transform(batch, self._epoch, number)
        if self._memory is not None:
            self._memory.check(batch)
        return batch

    def _thunk(self, batch: Any) -> BatchThunk:
        """Make the thunk of what ``next_batch`` has returned."""
        if not self.transforms_in_thunks:
            return self.draw(batch)
        return functools.partial(self._transformed, batch, self._epoch, self._number - 1)

    def _transformed(self, batch: Any, epoch: int, number: int) -> HostBatch:
        """Make a batch of the result of ``host_transform``, in any reader thread."""
        assert self.host_transform is not None
        return self.draw(self.host_transform(batch, epoch, number))()

    def _draws(self, batches: Iterator[Any]) -> BatchThunks:
        next_thunk = self._next_thunk_or_error if self.keeps_errors else self._next_thunk
        with self.fetch.open_epoch() if self.fetch is not None else contextlib.nullcontext():
            while (thunk := next_thunk(batches)) is not None:
                drawn = [thunk]
                del thunk
                # This generator must not keep the batch during the training step.
                yield drawn.pop()

    def _next_thunk(self, batches: Iterator[Any]) -> BatchThunk | None:
        """Return the thunk of the next batch; None after the last one."""
        batch = self.next_batch(batches)
        return None if batch is END else self._thunk(batch)

    def _next_thunk_or_error(self, batches: Iterator[Any]) -> BatchThunk | None:
        """Return the thunk of the next batch, or of its error; None after the last one."""
        try:
            thunk = guarded(self._next_thunk, batches)
        except Exception as error:
            return functools.partial(failed_batch, error)
        return None if thunk is None else functools.partial(made_or_failed, thunk)


@dataclass(eq=False)
class LoaderBatches:
    """Iterator over the batches of an epoch, which reader threads request one at a time.

    Args:
        batches: The loader's own iterator.
        generators: Generators of the loader.
        memory: Memory of the last batches; None if it is not checked.
    """

    batches: Iterator[Any]
    generators: Sequence[GeneratorStates]
    memory: FilledMemory | None
    _is_waiting: bool = field(default=False, init=False)

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Any:
        for generator in self.generators:
            generator.begin_batch()
        self._is_waiting = True
        try:
            batch = next(self.batches)
        finally:
            self._is_waiting = False
            # The end of an epoch, and a batch that fails, may draw random numbers, too.
            for generator in self.generators:
                generator.end_batch()
        if self.memory is not None:
            self.memory.check(batch)
        return batch

    def close(self) -> None:
        """End the loop over the batches of a feeder."""
        close: Any = getattr(self.batches, "close", None)
        if close is not None:
            close()

    def wake(self) -> None:
        """Wake a reader thread that waits for a worker process which has died.

        Torch raises the error in the main thread. Its iterator would notice it after 5 s only.
        """
        running: Any = self.batches
        workers = () if getattr(running, "_shutdown", True) else running._workers
        if self._is_waiting and not all(worker.is_alive() for worker in workers):
            # The reader thread takes it for a batch, and fails.
            running._data_queue.put((None, None))


class _OwnPosition(EpochHooks):
    """Position of a loader that resumes by its own state, and may then have no batches left."""

    continues_after_end = False

    def resume(self, state: Mapping[str, Any], n_batches: float) -> tuple[int, bool]:
        batch, _ = super().resume(state, n_batches)
        return batch, False


class StatefulSource(LoaderSource):
    """The batches of a loader with ``state_dict``, each with the loader's state after the batch."""

    @property
    def epoch_hooks(self) -> EpochHooks:
        return _OwnPosition()

    def state(self) -> Any:
        """Return the loader's state, or the error of its ``state_dict``.

        The error is raised only if the user requests the state, because not every loop is resumed.
        """
        try:
            state = self.loader.state_dict()
            # A state from worker processes stays unchanged. A dataset in this process may change
            # its own state later.
            return state if getattr(self.loader, "num_workers", 0) else copy.deepcopy(state)
        except Exception as error:
            return error

    def _draws(self, batches: Iterator[Any]) -> BatchThunks:
        for thunk in super()._draws(batches):
            yield functools.partial(self._with_state, thunk, self.state())

    @staticmethod
    def _with_state(thunk: BatchThunk, state: Any) -> HostBatch:
        host_batch = thunk()
        host_batch.state = state
        return host_batch


END = object()
"""Marker for the end of an epoch, in place of a batch."""


def next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch of a loader; ``END`` after the last one."""
    try:
        return next(batches)
    except StopIteration as stop:
        if is_end(stop):
            return END
        # In a generator, this becomes a RuntimeError.
        raise


def is_end(stop: StopIteration) -> bool:
    """Return whether a StopIteration is the end of a loader.

    Otherwise the user's own code raised it, in this or a worker process, and DataLoader passed it
    on. Fewer batches than the loader's length prove nothing, because the length of some samplers is
    an upper bound.
    """
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    users = {_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__}
    return all(frame.f_code not in users for frame, _ in traceback.walk_tb(stop.__traceback__))
