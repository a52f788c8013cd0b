"""ThreadedLoaderSource: the batches of a DataLoader, with samples that threads make."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.host_leaves import host_batch_of
from pinfeed.pipeline.sources.loader_source import LoaderSource, next_batch
from pinfeed.pipeline.sources.sample_batch import NoSamples, SampleBatch
from pinfeed.pipeline.sources.sample_source import (
    SampleMaker,
    SampleThreads,
    with_sample_readers,
)
from pinfeed.pipeline.sources.skipped_samples import SkippedSamples
from pinfeed.pipeline.sources.source import BatchThunk, HostBatch
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.threads.pool import Turns


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

    def __init__(self, loader: Any, n_threads: int, skipped: SkippedSamples | None) -> None:
        super().__init__(loader)
        _check_loader(loader)
        self._n_threads = n_threads
        self.skipped = skipped
        # Makes a whole batch in one call; None if a call makes one sample.
        self._read_batch = loader.dataset.__getitem__
        if loader.batch_sampler is not None:
            self._read_batch = batch_reader(loader.dataset)
        self._seed = 0
        # Number of samples of the epoch so far.
        self._n_drawn = 0
        # Number of batches that ``host_transform`` and ``fetch`` have taken or will take.
        self._n_changed = 0
        self._turns = Turns(is_shared=True)

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
        self._seed = int(seed.item())
        self._n_drawn = 0
        self._n_changed = 0
        self._turns = Turns(is_shared=True)
        self._threads.start()

    def stop(self) -> None:
        self._threads.stop()

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the indices of the next batch; ``END`` after the last batch."""
        self._number += 1
        return next_batch(batches)

    def _may_fill_again(self) -> bool:
        # The loader's iterator returns indices.
        return False

    @property
    def _draw(self) -> Callable[[Any], BatchThunk]:
        # Thunks always call ``host_transform``.
        return self.draw

    def draw(self, batch: Any) -> BatchThunk:
        """Let threads begin to make the samples of a batch, given their indices."""
        from torch.utils.data import default_collate

        collate = self.loader.collate_fn
        read = self._read_batch or self.loader.dataset.__getitem__
        if self._read_batch is not None:
            indices = [batch]
            collate = functools.partial(_collate_only, collate)
        else:
            indices = list(batch)
            in_place = self.host_transform is None and self.fetch is None and indices
            if in_place and collate is default_collate:
                collate = None
        keys = range(self._n_drawn, self._n_drawn + len(indices))
        self._n_drawn += len(indices)
        maker = SampleMaker(read, None, self._seed, reproducible=True)
        if collate is not None:
            collate = maker.collating(collate, self._epoch, keys)
        samples = SampleBatch(
            functools.partial(maker.in_thread, self._epoch, indices, keys),
            len(indices),
            collate,
            None if self.skipped is None else self.skipped.of(self._epoch, indices),
        )
        self._threads.begin(samples, self._n_threads)
        if self.host_transform is None and self.fetch is None:
            return samples.host_batch
        turn = self._n_changed
        self._n_changed += 1
        return functools.partial(self._changed, samples, self._number - 1, turn)

    def _changed(self, samples: SampleBatch, number: int, turn: int) -> HostBatch:
        """Return a batch after ``host_transform``, with the rows of its ids (reader).

        The functions of the user take one batch at a time, in order.
        """
        try:
            batch = samples.batch()
        except BaseException:
            # The next batch waits for this turn, too.
            with self._turns.taken(turn):
                raise
        fetch = None if type(batch) is NoSamples else self.fetch
        with self._turns.taken(turn):
            if self.host_transform is not None and type(batch) is not NoSamples:
                batch = self.host_transform(batch, self._epoch, number)
            ids = () if fetch is None else fetch.ids(batch)
        if fetch is None:
            return samples.reporting(host_batch_of(batch))
        return samples.reporting(fetch.add(batch, ids))

    def loop_context(self) -> contextlib.AbstractContextManager[object]:
        return self._threads.running()

    def _draws(self, batches: Iterator[Any]) -> Generator[BatchThunk, None, None]:
        with self._threads.running():
            yield from super()._draws(batches)


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
