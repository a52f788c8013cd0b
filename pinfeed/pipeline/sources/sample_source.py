"""SampleSource: batches of the samples of a dataset, which threads make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pinfeed.errors import add_note
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.sample_batch import SampleBatch
from pinfeed.pipeline.sources.skipped_samples import SkippedSamples
from pinfeed.pipeline.sources.source import BatchThunk, Source, made_or_failed
from pinfeed.rows.batches import EpochHooks, OrderBatches
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.threads.call import Workers
from pinfeed.validation.arguments import takes_parameter

_OF_SAMPLES = 2
"""Number in the seeds of samples; 0 and 1 are in those of batch transforms."""


@dataclass(frozen=True)
class SampleMaker:
    """Makes the samples of a dataset, each with random numbers of its own.

    Args:
        read: Returns the item of an index.
        transform: Function of an item; None for the items themselves.
        seed: Seed of the random numbers.
        reproducible: Whether torch's functions draw from the generator of the sample.
    """

    read: Callable[[Any], Any]
    transform: Callable[..., Any] | None
    seed: int
    reproducible: bool

    @contextlib.contextmanager
    def in_thread(
        self, epoch: int, items: Sequence[Any], keys: Sequence[int]
    ) -> Iterator[Callable[[int], Any]]:
        """Make samples in the calling thread.

        Args:
            epoch: Number of the epoch.
            items: Index of each sample in the dataset.
            keys: Number of each sample in its seed.

        Yields:
            A function that makes the sample at a position of ``items``.
        """
        from pinfeed.tensors.sample_random import SampleRandom, one_compute_thread

        random = SampleRandom()
        read = self.read
        seed = self.seed % 2**64
        transform = self.transform
        takes_generator = transform is not None and takes_parameter(transform, "generator")
        takes_rng = transform is not None and takes_parameter(transform, "rng")

        def make(position: int) -> Any:
            random.begin((seed, epoch, keys[position], _OF_SAMPLES))
            with random if self.reproducible else contextlib.nullcontext():
                try:
                    sample = read(items[position])
                    if transform is None:
                        return sample
                    given: dict[str, Any] = {}
                    if takes_generator:
                        given["generator"] = random.generator()
                    if takes_rng:
                        given["rng"] = random.rng()
                    return transform(sample, **given)
                except Exception as error:
                    add_note(error, f"in the sample of dataset[{items[position]!r}], epoch {epoch}")
                    raise

        with one_compute_thread():
            yield make


class BegunBatches:
    """The batches of a source that threads make at present."""

    def __init__(self) -> None:
        self._batches: weakref.WeakSet[SampleBatch] = weakref.WeakSet()

    def begin(self, batch: SampleBatch, workers: Workers | None, n_threads: int) -> None:
        """Let threads begin with a batch; without ``workers``, its ``host_batch`` makes it."""
        self._batches.add(batch)
        batch.begin(workers, n_threads)

    def stop(self) -> None:
        """Make no more samples, because the loop has ended. Any thread may call this."""
        for batch in list(self._batches):
            batch.stop()


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


@dataclass(frozen=True)
class SampleSource(Source):
    """Batches of the samples of a dataset, in an order.

    Args:
        samples: The samples.
        batches: Indices of the samples, batch by batch.
        threads: Threads that make the samples.
    """

    samples: Samples
    batches: OrderBatches | RankBatches
    threads: SampleThreads
    _begun: BegunBatches = field(default_factory=BegunBatches, init=False)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        found = dict(self.batches.fingerprint)
        found["n_samples"] = found.pop("n_rows")
        maker = self.samples.maker
        if maker.reproducible:
            found["seed of samples"] = maker.seed
        return found

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def n_batches(self, epoch: int) -> int:
        return self.batches.n_batches(epoch)

    def several_epochs(self) -> contextlib.AbstractContextManager[object]:
        return self.threads.running()

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches of an epoch from ``start`` on, one per thunk."""
        samples = self.samples
        skipped = samples.skipped
        with self.threads.running() as workers:
            for row_indices in self.batches.epoch(number, start, checksum):
                indices = row_indices.rows().tolist()
                batch = SampleBatch(
                    functools.partial(samples.maker.in_thread, number, indices, indices),
                    len(indices),
                    samples.collate,
                    None if skipped is None else skipped.of(number, indices),
                )
                self._begun.begin(batch, workers, samples.n_threads)
                yield made_or_failed(batch.host_batch) if samples.keeps_errors else batch.host_batch

    def stop(self) -> None:
        self._begun.stop()

    def hint(self, source_share: float) -> str:
        return sample_hint(self.samples.n_threads)


def sample_hint(n_threads: int) -> str:
    """Return what to change if a loop stalls on samples that threads make."""
    n_cores = len(os.sched_getaffinity(0))
    if n_threads < n_cores:
        change = (
            f"Raise threads (now {n_threads}; this process may use {n_cores} cores), if the "
            "functions release the interpreter's lock, as decoders do"
        )
    else:
        change = (
            f"threads={n_threads} already uses all {n_cores} cores of this process. More threads "
            "help only if the samples wait for files or a network"
        )
    return f"The loop waits for the samples. {change}, or make the samples cheaper."


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


class SampleThreads:
    """Threads that make samples, while epochs of their source are open.

    Args:
        worker: Makes a pool of threads, given their name and number.
        n: Number of threads; 0 if the loop's own thread makes the samples.
    """

    def __init__(self, worker: Callable[[str, int], Workers], n: int) -> None:
        self._worker = worker
        self._n = n
        self._pool: Workers | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Workers | None]:
        """Start the threads, and join them at the end, unless an outer context has done so."""
        if not self._n or self._pool is not None:
            yield self._pool
            return
        self._pool = pool = self._worker("pinfeed-sample", self._n)
        try:
            yield pool
        finally:
            self._pool = None
            pool.shutdown(wait=True)
