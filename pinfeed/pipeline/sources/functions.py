"""ReaderSource: batches of samples that a user's functions read."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.pipeline.sources.ordered_map import OrderedMap, ThreadedMap
from pinfeed.pipeline.sources.sample_batches import batch_of_samples
from pinfeed.pipeline.sources.samples import SampleReader
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.epoch_hooks import EpochHooks
from pinfeed.rows.orders import Rows
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.threads.call import Workers


class ReaderSource:
    """Batches of inputs, which the user's functions read.

    Args:
        readers: One reader for each part of a batch.
        batches: Indices of the inputs, batch by batch.
        worker: Makes a pool of threads, given their name and number.
        n_threads: Number of inputs that are read at the same time. With 1, the loop's reader
            thread reads them.
    """

    def __init__(
        self,
        readers: Sequence[SampleReader],
        batches: OrderBatches | RankBatches,
        worker: Callable[[str, int], Workers],
        n_threads: int,
    ) -> None:
        self._readers = readers
        self._batches = batches
        self._worker = worker
        self._n_threads = n_threads

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        n_samples = self._readers[0].n_samples
        found = self._batches.fingerprint
        return {
            "identities": found.pop("n_rows"),
            **found,
            "one_read_count": n_samples,
            "batch_size": found["batch_size"] * n_samples,
        }

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches of an epoch from ``start`` on, one per thunk."""
        # The threads are joined when the generator is closed.
        with contextlib.ExitStack() as opened, self._threads() as each:
            for indices in self._batches.epoch(number, start, checksum):
                # This closes the generators of the previous batch.
                opened.close()
                yield functools.partial(self._read, indices.rows(), each, opened)

    def hint(self, source_share: float) -> str:
        """Return what to change if a loop stalls on the functions."""
        names = " and ".join(reader.function_name for reader in self._readers)
        n_inputs = self._batches.batch_size
        if self._n_threads == n_inputs:
            change = (
                f"Each of the {n_inputs} inputs of a batch has a thread already, so a larger "
                "n_readers has no effect. Give a smaller one_read_count or a larger batch_size"
            )
        elif self._n_threads >= (n_cores := len(os.sched_getaffinity(0))):
            change = (
                f"n_readers={self._n_threads} already uses all {n_cores} cores of this process. A "
                "larger one helps only if the functions wait for files or a network. Otherwise, "
                "run on more cores"
            )
        else:
            change = (
                f"Raise n_readers (now {self._n_threads}; this process may use {n_cores} cores) to "
                "read more inputs at the same time, if the functions are thread-safe"
            )
        return f"The loop waits for {names}. {change}, or make the functions cheaper."

    def depth_caution(self) -> str:
        """Return an empty text, because pinfeed draws the order itself."""
        return ""

    def _read(self, identities: Rows, each: OrderedMap, opened: contextlib.ExitStack) -> HostBatch:
        batches = [
            (reader.apply_name, reader.batch(identities, each, opened)) for reader in self._readers
        ]
        return batch_of_samples(batches, len(identities) * self._readers[0].n_samples)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[OrderedMap]:
        if self._n_threads == 1:
            yield map
            return
        pool = self._worker("pinfeed-identity", self._n_threads)
        try:
            yield ThreadedMap(pool, self._n_threads)
        finally:
            pool.shutdown(wait=True)
