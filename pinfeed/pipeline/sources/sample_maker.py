"""SampleMaker: makes samples, each with random numbers of its own; SampleThreads: their threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.errors import ArgumentError, add_note
from pinfeed.pipeline.sources.sample_batch import SampleBatch, SkippedSamples
from pinfeed.pipeline.sources.source import Cancelled
from pinfeed.pipeline.sources.user_calls import guarded
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

    def batch(
        self,
        epoch: int,
        items: Sequence[Any],
        keys: Sequence[int],
        collate: Callable[[list[Any]], Any] | None,
        skipped: SkippedSamples | None,
    ) -> SampleBatch:
        """Return the batch of some samples, which no thread has begun to make.

        Args:
            epoch: Number of the epoch.
            items: Index of each sample in the dataset.
            keys: Number of each sample in its seed.
            collate: Makes a batch from a list of samples; None is ``default_collate``.
            skipped: Notes the samples that are left out; None if none is left out.
        """
        if collate is not None:
            collate = self._collating(collate, epoch, keys)
        return SampleBatch(
            lambda: self.in_thread(epoch, items, keys),
            len(items),
            collate,
            None if skipped is None else skipped.of(epoch, items),
            in_one_thread=self.read_batch is not None,
        )

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
        draws = {"generator": random.generator, "rng": random.rng}
        given = [
            name for name in draws if transform is not None and takes_parameter(transform, name)
        ]

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
                    return transform(sample, **{name: draws[name]() for name in given})
                except Exception as error:
                    add_note(error, f"in the sample of dataset[{items[position]!r}], epoch {epoch}")
                    raise

        with modes_of_a_new_thread(), one_compute_thread():
            yield make

    def _collating(
        self, collate: Callable[[Any], Any], epoch: int, keys: Sequence[int]
    ) -> Callable[[Any], Any]:
        """Return a function that collates a batch, with random numbers of the batch."""
        from pinfeed.tensors.sample_random import SampleRandom
        from pinfeed.tensors.transform_calls import modes_of_a_new_thread

        def collated(samples: Any) -> Any:
            random = SampleRandom()
            random.begin((self.seed % 2**64, epoch, *keys[:1], _OF_COLLATE))
            context = random if self.reproducible else contextlib.nullcontext()
            try:
                with modes_of_a_new_thread(), context:
                    return guarded(collate, samples)
            except Exception as error:
                add_note(error, f"in collate_fn of {len(samples)} samples")
                raise

        return collated


class _LoopStop:
    """Whether a loop has ended, so that its samples are not needed any more."""

    is_set = False

    def check(self) -> None:
        """Raise Cancelled if the loop has ended."""
        if self.is_set:
            raise Cancelled


class SampleThreads:
    """Threads that make samples while a loop over their source runs.

    Args:
        worker: Makes a pool of threads, given their name and number.
        n: Number of threads; 0 if the loop's own thread makes the samples.
    """

    def __init__(self, worker: Callable[[str, int], Workers], n: int) -> None:
        self.n = n
        self._worker = worker
        self._pool: Workers | None = None
        self._stop = _LoopStop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the threads of a loop, if there are any, and join them at the end."""
        # Batches of an earlier loop remain stopped.
        self._stop = _LoopStop()
        if not self.n:
            yield
            return
        self._pool = pool = self._worker("pinfeed-sample", self.n)
        try:
            yield
        finally:
            self._pool = None
            pool.shutdown(wait=True)

    def begin(self, batch: SampleBatch) -> None:
        """Let threads begin with a batch; without threads, its ``host_batch`` makes it."""
        batch.begin(self._pool, self.n, self._stop.check)

    def stop(self) -> None:
        """Make no more samples, because the loop has ended. Any thread may call this."""
        self._stop.is_set = True
