"""Advice on transform_threads: times a host_transform in one thread and in several."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from pinfeed.cli.report import saying
from pinfeed.cli.sources import open_rows, sparse_rows, usual_batch
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.units import duration
from pinfeed.pipeline.sources.batch_transform import BatchTransform, Seed
from pinfeed.profiling.lock_share import LockSampler, most_threads
from pinfeed.threads.pool import ThreadPool
from pinfeed.validation.wrapping import wrapped

_SECONDS = 2.0
# A smaller gain may be noise, and is not worth the memory of more batches.
_WORTHWHILE = 1.2


@dataclass(frozen=True)
class ThreadAdvice:
    """The measured times of a ``host_transform``.

    Attributes:
        function: The function, as the user named it.
        n_rows: Rows of the batch that it takes.
        seconds: Median time of a call in one thread.
        lock_share: Share of the time in which one thread holds the interpreter's lock.
        n_cores: Cores of this process.
        n_threads: Number of threads that were timed; 1 if more cannot be faster.
        gain: Calls per second of these threads, as a multiple of those of one thread.
    """

    function: str
    n_rows: int
    seconds: float
    lock_share: float
    n_cores: int
    n_threads: int = 1
    gain: float = 1.0

    @property
    def helps(self) -> str:
        """``yes`` or ``no``."""
        return "yes" if self.gain >= _WORTHWHILE else "no"

    @property
    def text(self) -> str:
        """The times and the advice, for people."""
        cores = f"{self.n_cores} core{'s' * (self.n_cores > 1)}"
        found = (
            f"{self.function} takes {duration(self.seconds)} for a batch of {self.n_rows:,} rows, "
            f"and holds the interpreter's lock for {self.lock_share:.0%} of this time. This "
            f"process may use {cores}."
        )
        if self.n_threads == 1:
            why = "there is one core" if self.n_cores == 1 else "only one thread can hold the lock"
            advice = f"More threads would not be faster, because {why}."
        else:
            advice = (
                f"{self.n_threads} threads make {self.gain:.1f} times as many calls per second as "
                "one thread."
            )
            if self.helps == "yes":
                advice += f" Use transform_threads={self.n_threads} if a loop waits for it."
        return "\n".join(wrapped(text, "  ", "  ") for text in (found, advice))


def advise_on_threads(name: str, files: Sequence[str], batch_size: int | None) -> ThreadAdvice:
    """Time a function on the first batch of a file, in one thread and in several.

    Args:
        name: Module and name of the function, such as ``train:augment``.
        files: The file, or its shards.
        batch_size: Rows of the batch; None for the usual number.

    Raises:
        click.UsageError: If the function cannot be imported.
        Exception: If the function raised it.
    """
    call, n_rows = _call_on_first_batch(_imported(name), files, batch_size)
    n_cores = len(os.sched_getaffinity(0))
    with saying(f"timing {name}"):
        # The first calls may import modules and take memory.
        call()
        sampler = LockSampler(_SECONDS)
        times = _times(call, 1)
        # A call that is longer than the sampler's time holds the lock or not, as a whole.
        lock_share = sampler.stop() or 0.0
        found = ThreadAdvice(name, n_rows, float(np.median(times)), lock_share, n_cores)
        n_threads = most_threads(1, lock_share, n_cores)
        if n_threads == 1:
            return found
        several = _times(call, n_threads)
    gain = n_threads * float(np.mean(times)) / float(np.mean(several))
    return ThreadAdvice(
        name, n_rows, found.seconds, lock_share, n_cores, n_threads=n_threads, gain=gain
    )


def _imported(name: str) -> Callable[..., Any]:
    """Import a function, as Python finds modules that run in this folder."""
    module, _, attribute = name.partition(":")
    expected = "expected MODULE:FUNCTION, such as train:augment for augment in train.py"
    if not module or not attribute:
        raise click.UsageError(f"--host-transform {name}: {expected}")
    sys.path.insert(0, os.getcwd())
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"--host-transform {name}: {error}; {expected}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise click.UsageError(f"--host-transform {name}: it is no function; {expected}")
    return found


def _call_on_first_batch(
    function: Callable[..., Any], files: Sequence[str], batch_size: int | None
) -> tuple[Callable[[], object], int]:
    """Return a call of a function on the first rows of a file, and their number."""
    from pinfeed.tensors.numpy_torch import to_torch

    if (matrix := sparse_rows(files)) is not None:
        with closing(matrix):
            usual = usual_batch(round(matrix.mean_row_nbytes))
            n_rows = min(batch_size or usual, matrix.n_rows)
            with Feeder(matrix, batch_size=n_rows, depth=0, device="cpu") as feeder:
                batch = next(iter(feeder))
    else:
        with closing(open_rows(files)) as store:
            n_rows = min(batch_size or usual_batch(store.row_nbytes), store.n_rows)
            rows = np.empty((n_rows, *store.row_shape), store.dtype)
            store.gather(np.arange(n_rows), rows)
        batch = to_torch(rows)
    transform = BatchTransform("host_transform", function, Seed(0, 0, None), "cpu")
    numbers = itertools.count()
    # The function may change its batch.
    return lambda: transform(batch.clone(), 0, next(numbers)), n_rows


def _times(call: Callable[[], object], n_threads: int) -> list[float]:
    """Return the seconds of each call in threads that make calls for about two seconds."""
    end = time.perf_counter() + _SECONDS

    def calls() -> list[float]:
        found = []
        start = time.perf_counter()
        while start < end:
            call()
            now = time.perf_counter()
            found.append(now - start)
            start = now
        return found

    with ThreadPool(n_threads, "pinfeed-transform") as pool:
        pending = [pool.submit(calls) for _ in range(n_threads)]
        return list(itertools.chain.from_iterable(one.result() for one in pending))
