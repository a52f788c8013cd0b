"""Batches of samples that a user's functions read, as a source."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pinfeed.pipeline.sources.base import BatchThunk, HostBatch
from pinfeed.pipeline.sources.samples import OrderedMap, SampleReader, ThreadedMap, load_of
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.epoch_hooks import EpochHooks
from pinfeed.rows.orders import Rows
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.threads.pool import Workers


class ReaderSource:
    """Batches of identities, read when they are wanted.

    Args:
        readers: What reads each part of a batch.
        batches: Which identities, in which order.
        worker: Makes so many threads, given what they are called.
        n_threads: Identities read at the same time; one is read in the thread that asks.
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
        n, found = self._readers[0].n_samples, self._batches.fingerprint
        return {
            "identities": found.pop("n_rows"),
            **found,
            "one_read_count": n,
            "batch_size": found["batch_size"] * n,
        }

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """The batches of epoch ``number`` from batch ``start`` on, one in a load."""
        with contextlib.ExitStack() as opened, self._threads() as each:
            # Closed when nobody reads it any more.
            for indices in self._batches.epoch(number, start, checksum):
                # What was opened for the batch before.
                opened.close()
                yield functools.partial(self._load, indices.rows(), each, opened)

    def hint(self, draw_share: float) -> str:
        """What to change where a loop waits for the functions."""
        names = " and ".join(reader.function_name for reader in self._readers)
        return (
            f"It is {names} that are waited for: raise n_readers (is {self._n_threads}; this process may use "
            f"{len(os.sched_getaffinity(0))} cores) to read more identities at a time, if they may be called so; or make them cheaper."
        )

    def _load(self, identities: Rows, each: OrderedMap, opened: contextlib.ExitStack) -> HostBatch:
        batches = [
            (reader.apply_name, reader.batch(identities, each, opened)) for reader in self._readers
        ]
        return load_of(batches, len(identities) * self._readers[0].n_samples)

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
