"""SampleSource: batches of the samples of a dataset, which threads make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.errors import ArgumentError, add_note
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.sample_batch import SampleBatch
from pinfeed.pipeline.sources.skipped_samples import SkippedSamples
from pinfeed.pipeline.sources.source import BatchThunk, OrderedSource, made_or_failed
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.rows.batches import RowIndices
from pinfeed.rows.order_batches import OrderBatches, RankBatches
from pinfeed.threads.call import Workers
from pinfeed.validation.arguments import takes_parameter

_OF_SAMPLES = 2
"""Number in the seeds of samples; 0 and 1 are in those of batch transforms."""
_OF_COLLATE = 3
"""Number in the seeds of ``collate_fn``."""
_OF_READ = 4
"""Number in the seeds of batches that a dataset reads in one call."""


@dataclass(frozen=True)
class SampleMaker:
    """Makes the samples of a dataset, each with random numbers of its own.

    Args:
        read: Returns the item of an index.
        transform: Function of an item; None for the items themselves.
        seed: Seed of the random numbers.
        reproducible: Whether torch's functions draw from the generator of the sample.
        read_batch: Returns the items of several indices, with random numbers of the batch; None to
            read one item at a time.
    """

    read: Callable[[Any], Any]
    transform: Callable[..., Any] | None
    seed: int
    reproducible: bool
    read_batch: Callable[[list[Any]], Sequence[Any]] | None = None

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
        from pinfeed.tensors.transform_calls import modes_of_a_new_thread

        random = SampleRandom()
        # Items that were read in one call, without those that are samples already.
        taken: list[Any] = []
        seed = self.seed % 2**64
        transform = self.transform
        takes_generator = transform is not None and takes_parameter(transform, "generator")
        takes_rng = transform is not None and takes_parameter(transform, "rng")

        def read_all(read_batch: Callable[[list[Any]], Sequence[Any]]) -> None:
            random.begin((seed, epoch, keys[0], _OF_READ))
            with random if self.reproducible else contextlib.nullcontext():
                try:
                    taken.extend(guarded(read_batch, list(items)))
                except Exception as error:
                    add_note(error, f"in dataset.__getitems__({list(items)}), epoch {epoch}")
                    raise
            if len(taken) != len(items):
                raise ArgumentError(
                    f"dataset.__getitems__ returned {len(taken)} items for {len(items)} indices; "
                    "expected one item for each index"
                )

        def make(position: int) -> Any:
            if self.read_batch is not None:
                if not taken:
                    read_all(self.read_batch)
                if transform is None:
                    return taken[position]
            random.begin((seed, epoch, keys[position], _OF_SAMPLES))
            with random if self.reproducible else contextlib.nullcontext():
                try:
                    if taken:
                        sample, taken[position] = taken[position], None
                    else:
                        sample = self.read(items[position])
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

        with modes_of_a_new_thread(), one_compute_thread():
            yield make

    def collating(
        self, collate: Callable[[Any], Any], epoch: int, keys: Sequence[int]
    ) -> Callable[[Any], Any]:
        """Return a function that collates a batch, with random numbers of the batch.

        Args:
            collate: Makes a batch from a list of samples.
            epoch: Number of the epoch.
            keys: Number of each sample of the batch in its seed.
        """
        entropy = (self.seed % 2**64, epoch, *keys[:1], _OF_COLLATE)
        return functools.partial(self._collate, collate, entropy)

    def _collate(self, collate: Callable[[Any], Any], entropy: Sequence[int], samples: Any) -> Any:
        from pinfeed.tensors.sample_random import SampleRandom
        from pinfeed.tensors.transform_calls import modes_of_a_new_thread

        random = SampleRandom()
        random.begin(entropy)
        try:
            if not self.reproducible:
                return guarded(collate, samples)
            with modes_of_a_new_thread(), random:
                return guarded(collate, samples)
        except Exception as error:
            add_note(error, f"in collate_fn of {len(samples)} samples")
            raise


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

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches of an epoch from ``start`` on, one per thunk."""
        self.threads.start()
        return self._draws(number, self.batches.epoch(number, start, checksum))

    def stop(self) -> None:
        self.threads.stop()

    @property
    def _n_threads(self) -> int:
        """Number of threads that make a batch."""
        return self.threads.n

    @abstractmethod
    def _batch(self, epoch: int, indices: list[int]) -> SampleBatch:
        """Return the batch of some samples, which threads have not begun."""

    def _thunk(self, batch: SampleBatch) -> BatchThunk:
        return batch.host_batch

    def _draws(
        self, epoch: int, batches: Iterator[RowIndices]
    ) -> Generator[BatchThunk, None, None]:
        with self.threads.running():
            for row_indices in batches:
                batch = self._batch(epoch, row_indices.rows().tolist())
                self.threads.begin(batch, self._n_threads)
                yield self._thunk(batch)


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

    @property
    def _n_threads(self) -> int:
        return self.threads.n if self.samples.maker.read_batch is None else 1

    def _batch(self, epoch: int, indices: list[int]) -> SampleBatch:
        maker, collate, skipped = self.samples.maker, self.samples.collate, self.samples.skipped
        if maker.read_batch is not None and collate is None:
            from pinfeed.tensors.sample_layout import collated

            # All samples exist at once, so there is no need to write each of them to its place.
            collate = collated
        return SampleBatch(
            functools.partial(maker.in_thread, epoch, indices, indices),
            len(indices),
            None if collate is None else maker.collating(collate, epoch, indices),
            None if skipped is None else skipped.of(epoch, indices),
        )

    def _thunk(self, batch: SampleBatch) -> BatchThunk:
        thunk = batch.host_batch
        return made_or_failed(thunk) if self.samples.keeps_errors else thunk


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
    """Threads that make samples while a loop over their source runs, and the batches they make.

    Args:
        worker: Makes a pool of threads, given their name and number.
        n: Number of threads; 0 if the loop's own thread makes the samples.
    """

    def __init__(self, worker: Callable[[str, int], Workers], n: int) -> None:
        self.n = n
        self._worker = worker
        self._pool: Workers | None = None
        self._batches: weakref.WeakSet[SampleBatch] = weakref.WeakSet()
        self._is_stopped = False
        # A reader may begin a batch while another thread, or a signal handler, ends the loop.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the threads, and join them at the end, unless an outer context has done so."""
        if not self.n or self._pool is not None:
            yield
            return
        self._pool = pool = self._worker("pinfeed-sample", self.n)
        try:
            yield
        finally:
            self._pool = None
            pool.shutdown(wait=True)

    def start(self) -> None:
        """Note that a loop begins."""
        self._is_stopped = False

    def begin(self, batch: SampleBatch, n_threads: int) -> None:
        """Let threads begin with a batch; without threads, its ``host_batch`` makes it."""
        with self._lock:
            self._batches.add(batch)
            if self._is_stopped:
                batch.stop()
        if self._pool is not None:
            batch.begin(self._pool, n_threads)

    def stop(self) -> None:
        """Make no more samples, because the loop has ended. Any thread may call this."""
        with self._lock:
            self._is_stopped = True
            for batch in self._batches:
                batch.stop()
