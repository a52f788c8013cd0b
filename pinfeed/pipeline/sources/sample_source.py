"""Sources of samples that threads make: of a dataset, and of the dataset of a DataLoader."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.loader_source import LoaderSource, next_batch
from pinfeed.pipeline.sources.sample_batch import NoSamples, SampleBatch, SkippedSamples
from pinfeed.pipeline.sources.sample_maker import SampleMaker, SampleThreads
from pinfeed.pipeline.sources.source import (
    BatchThunk,
    BatchThunks,
    HostBatch,
    OrderedSource,
    host_batch_of,
    made_or_failed,
)
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.rows.order_batches import OrderBatches, RankBatches, RowIndices
from pinfeed.threads.pool import Turns


@dataclass(frozen=True)
class Samples:
    """The samples of a dataset, and how batches are made of them.

    Args:
        maker: Makes the samples.
        n: Number of samples.
        n_threads: Number of threads that make samples; 0 if the loop's own thread makes them.
        collate: Makes a batch from a list of samples; None is torch's ``default_collate``.
        skipped: Notes the samples that are left out; None if none is left out.
        keeps_errors: Whether the loop continues after the error of a batch.
    """

    maker: SampleMaker
    n: int
    n_threads: int
    collate: Callable[[list[Any]], Any] | None = None
    skipped: SkippedSamples | None = None
    keeps_errors: bool = False

    @property
    def may_fail(self) -> bool:
        """Whether the loop continues after the error of a sample."""
        return self.keeps_errors or self.skipped is not None

    def schedule(self, schedule: PrefetchSchedule, batch_size: int) -> PrefetchSchedule:
        """Return a schedule with enough reader threads to keep the threads busy."""
        n_per_batch = batch_size if self.maker.read_batch is None else 1
        return with_sample_readers(schedule, self.n_threads, n_per_batch)

    def n_alive(self, schedule: PrefetchSchedule, batch_size: int, *, stacks: bool) -> int:
        """Return how many samples are in memory at a time, outside of batches.

        Each thread makes one. Until a reader thread provides the memory of a batch, each keeps
        another one. A batch that is made of a list keeps all its samples.

        Args:
            schedule: Schedule of the loop, without reader threads for the samples.
            batch_size: Samples of a batch.
            stacks: Whether ``default_collate`` would stack the samples.
        """
        is_whole = self.collate is not None or not stacks or self.maker.read_batch is not None
        if not self.n_threads:
            return batch_size if is_whole else 1
        n_kept = batch_size if is_whole else min(batch_size, self.n_threads)
        return self.schedule(schedule, batch_size).n_readers * n_kept + self.n_threads


@dataclass(frozen=True)
class BatchesOfSamples(OrderedSource):
    """Batches of samples that threads make, in an order.

    Args:
        batches: Indices of the samples, batch by batch.
        threads: Threads that make the samples.
    """

    batches: OrderBatches | RankBatches
    threads: SampleThreads

    def loop_context(self) -> contextlib.AbstractContextManager[object]:
        return self.threads.running()

    def epoch(self, number: int, start: int, checksum: int, batches_per_slot: int) -> BatchThunks:
        """Yield the batches of an epoch from ``start`` on, one per thunk."""
        batches = self.batches.epoch(number, start, checksum)
        return (self._thunk(number, row_indices) for row_indices in batches)

    def stop(self) -> None:
        self.threads.stop()

    @abstractmethod
    def _batch(self, epoch: int, indices: list[int]) -> SampleBatch:
        """Return the batch of some samples, which no thread has begun to make."""

    def _thunk(self, epoch: int, row_indices: RowIndices) -> BatchThunk:
        """Let threads begin to make the samples of a batch."""
        batch = self._batch(epoch, row_indices.rows().tolist())
        self.threads.begin(batch)
        return batch.host_batch


@dataclass(frozen=True)
class SampleSource(BatchesOfSamples):
    """Batches of the samples of a dataset, in an order.

    Args:
        samples: The samples.
    """

    samples: Samples

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        found = dict(self.batches.fingerprint)
        found["n_samples"] = found.pop("n_rows")
        maker = self.samples.maker
        if maker.reproducible:
            found["seed of samples"] = maker.seed
        return found

    def _batch(self, epoch: int, indices: list[int]) -> SampleBatch:
        samples = self.samples
        collate = samples.collate
        if samples.maker.read_batch is not None and collate is None:
            from pinfeed.tensors.sample_layout import collated

            # All samples exist at once, so there is no need to write each of them to its place.
            collate = collated
        return samples.maker.batch(epoch, indices, indices, collate, samples.skipped)

    def _thunk(self, epoch: int, row_indices: RowIndices) -> BatchThunk:
        thunk = super()._thunk(epoch, row_indices)
        return functools.partial(made_or_failed, thunk) if self.samples.keeps_errors else thunk


class ThreadedLoaderSource(LoaderSource):
    """The batches of a DataLoader, whose dataset threads of this process read.

    Seeds and indices are drawn from the loader's generators as the loader itself draws them.

    Args:
        loader: The DataLoader.
        n_threads: Number of threads that make samples; 0 if the loop's own thread makes them.
        skipped: Notes the samples that are left out; None if none is left out.

    Raises:
        ArgumentError: If ``loader`` is no DataLoader of a dataset with items by index, or has a
            state of its own.
    """

    _maker: SampleMaker
    """Makes the samples of the epoch that was begun last."""
    _keys: Iterator[int]
    """Numbers of the samples of this epoch in their seeds."""
    _turns: Turns
    """Order in which ``host_transform`` and ``fetch`` take the batches of this epoch."""
    _next_turns: Iterator[int]
    """Turns of the batches that are not drawn yet."""

    def __init__(self, loader: Any, n_threads: int, skipped: SkippedSamples | None) -> None:
        super().__init__(loader)
        _check_loader(loader)
        self._n_threads = n_threads
        self.skipped = skipped
        # Makes a whole batch in one call; None if a call makes one sample.
        self._read_batch = loader.dataset.__getitem__
        if loader.batch_sampler is not None:
            self._read_batch = batch_reader(loader.dataset)

    def open(self, device: Device) -> None:
        self._threads = SampleThreads(device.worker, self._n_threads)

    def schedule(self, schedule: PrefetchSchedule) -> PrefetchSchedule:
        """Return a schedule with enough reader threads to keep all threads busy."""
        size = (self.loader.batch_size or 1) if self._read_batch is None else 1
        return with_sample_readers(schedule, self._n_threads, size)

    def begin(self) -> None:
        import torch

        loader = self.loader
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._begun = guarded(iter, indices)
        seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        read = self._read_batch or loader.dataset.__getitem__
        self._maker = SampleMaker(read, None, int(seed.item()), reproducible=True)
        self._keys = itertools.count()
        self._turns = Turns(is_shared=True)
        self._next_turns = itertools.count()

    def stop(self) -> None:
        self._threads.stop()

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the indices of the next batch; ``END`` after the last batch."""
        self._number += 1
        return next_batch(batches)

    def _may_fill_again(self) -> bool:
        # The loader's iterator returns indices.
        return False

    def _thunk(self, batch: Any) -> BatchThunk:
        # Thunks always call ``host_transform``.
        return self.draw(batch)

    def draw(self, batch: Any) -> BatchThunk:
        """Let threads begin to make the samples of a batch, given their indices."""
        from torch.utils.data import default_collate

        is_changed = self.host_transform is not None or self.fetch is not None
        collate = self.loader.collate_fn
        if self._read_batch is not None:
            indices = [batch]
            collate = functools.partial(_collate_only, collate)
        else:
            indices = list(batch)
            if collate is default_collate and indices and not is_changed:
                collate = None
        keys = list(itertools.islice(self._keys, len(indices)))
        samples = self._maker.batch(self._epoch, indices, keys, collate, self.skipped)
        self._threads.begin(samples)
        if not is_changed:
            return samples.host_batch
        turn = next(self._next_turns)
        return functools.partial(self._changed, samples, self._epoch, self._number - 1, turn)

    def _changed(self, samples: SampleBatch, epoch: int, number: int, turn: int) -> HostBatch:
        """Return a batch after ``host_transform``, with the rows of its ids (reader).

        The functions of the user take one batch at a time, in order.
        """
        try:
            batch = samples.batch()
        except BaseException:
            # The next batch waits for this turn, too.
            with self._turns.taken(turn):
                raise
        with self._turns.taken(turn):
            if type(batch) is NoSamples:
                thunk: BatchThunk = functools.partial(host_batch_of, batch)
            else:
                if self.host_transform is not None:
                    batch = self.host_transform(batch, epoch, number)
                thunk = super().draw(batch)
        return samples.reporting(thunk())

    def loop_context(self) -> contextlib.AbstractContextManager[object]:
        return self._threads.running()


def with_sample_readers(
    schedule: PrefetchSchedule, n_threads: int, batch_size: int
) -> PrefetchSchedule:
    """Return a schedule with enough reader threads to keep the threads of the samples busy.

    A reader thread waits for the samples of one batch. While threads make its last samples, others
    make the first ones of the next batch.

    Args:
        schedule: Schedule of the loop.
        n_threads: Number of threads that make samples.
        batch_size: Samples of a batch.
    """
    n_readers = min(schedule.depth + 1, 1 + -(-n_threads // batch_size))
    return dataclasses.replace(schedule, n_readers=max(schedule.n_readers, n_readers))


def batch_reader(dataset: Any) -> Callable[[list[Any]], Sequence[Any]] | None:
    """Return the ``__getitems__`` of a dataset; None if it reads one item at a time."""
    from torch.utils.data import Subset

    # A Subset passes the indices on, and otherwise reads one item after the other.
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return dataset.__getitems__ if getattr(inner, "__getitems__", None) else None


def _collate_only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Make a batch from the only element of a list."""
    return collate(samples[0])


def _check_loader(loader: Any) -> None:
    """Raise ArgumentError unless threads can make the samples of a loader."""
    from torch.utils.data import DataLoader, IterableDataset

    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            f"threads was given with a {kind}; expected a torch DataLoader, whose dataset has "
            "items by index; leave out threads, or use pinfeed.wrap_dataset(dataset, threads=...)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"threads was given with a DataLoader of a {type(loader.dataset).__name__}, which is "
            "iterable and has no items by index; leave out threads, or give a map-style dataset"
        )
    if hasattr(loader, "state_dict"):
        raise ArgumentError(
            f"threads was given with a {kind}, whose state covers only batches that it makes "
            "itself; use pinfeed.wrap_dataset(dataset, threads=...), which can be resumed too"
        )
