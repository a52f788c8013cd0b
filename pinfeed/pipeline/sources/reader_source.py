"""ReaderSource: batches of samples that a user's functions read."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.pipeline.sources.host_leaves import host_batch_of_samples
from pinfeed.pipeline.sources.sample_reader import OrderedMap, SampleReader
from pinfeed.pipeline.sources.source import BatchThunk, HostBatch, Source
from pinfeed.rows.batches import EpochHooks, OrderBatches
from pinfeed.rows.orders import Rows
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.threads.call import Pending, Workers


@dataclass(frozen=True)
class ReaderSource(Source):
    """Batches of inputs, which the user's functions read.

    Args:
        readers: One reader for each part of a batch.
        batches: Indices of the inputs, batch by batch.
        worker: Makes a pool of threads, given their name and number.
        n_threads: Number of inputs that are read at the same time. With 1, the loop's reader
            thread reads them.
    """

    readers: Sequence[SampleReader]
    batches: OrderBatches | RankBatches
    worker: Callable[[str, int], Workers]
    n_threads: int

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        n_samples = self.readers[0].n_samples
        found = self.batches.fingerprint
        return {
            "identities": found.pop("n_rows"),
            **found,
            "one_read_count": n_samples,
            "batch_size": found["batch_size"] * n_samples,
        }

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def n_batches(self, epoch: int) -> int:
        return self.batches.n_batches(epoch)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches of an epoch from ``start`` on, one per thunk."""
        # The threads are joined when the generator is closed.
        with contextlib.ExitStack() as opened, self._threads() as each:
            for indices in self.batches.epoch(number, start, checksum):
                # This closes the generators of the previous batch.
                opened.close()
                yield functools.partial(self._read, indices.rows(), each, opened)

    def _read(self, identities: Rows, each: OrderedMap, opened: contextlib.ExitStack) -> HostBatch:
        batches = [
            (reader.apply_name, reader.batch(identities, each, opened)) for reader in self.readers
        ]
        return host_batch_of_samples(batches, len(identities) * self.readers[0].n_samples)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[OrderedMap]:
        if self.n_threads == 1:
            yield map
            return
        pool = self.worker("pinfeed-identity", self.n_threads)
        try:
            yield functools.partial(_threaded_map, pool, self.n_threads)
        finally:
            pool.shutdown(wait=True)


def _threaded_map(
    pool: Workers, n_threads: int, fn: Callable[[int], Any], items: Iterable[int]
) -> Iterator[Any]:
    """Yield the results of ``fn`` in order; threads compute them early.

    At most ``n_threads`` items are begun and not yet taken. This bounds the memory, and the time
    that a loop waits for these items when it ends.
    """
    # If the loop ends before these calls, it joins the pool before their memory is reused.
    begun: deque[Pending[Any]] = deque()
    for item in items:
        begun.append(pool.submit(fn, item))
        if len(begun) == n_threads:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
