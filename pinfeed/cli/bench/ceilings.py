"""Rates of the user's files without a loader, which bound every contestant."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from pinfeed.cli.measure.bandwidth import gather_rate, populate_rate, populated, sequential_rate
from pinfeed.cli.measure.page_cache import drop
from pinfeed.cli.measure.process_memory import touch_memory
from pinfeed.rows.batches import OrderBatches

# Bytes of the batches that are gathered.
_GATHERED_BYTES = 1 << 30
_REPEATS = 3
_MOST_THREADS = 4
# Limits of the memory that is touched before a read, and of the time for it.
_TOUCHED_BYTES = 4 << 30
_TOUCH_S = 5.0


def raw_gather_rate(paths: Sequence[str], order: Any, batch_size: int, seconds: float) -> float:
    """Return GB/s of gathering batches of the largest file from the page cache.

    A thread for each core, four at most, gathers from a memory map into reused buffers.
    """
    array = populated(_largest(paths))
    batches = OrderBatches(order, len(array), min(batch_size, len(array)), False)
    n_batches = max(1, _GATHERED_BYTES // (batches.batch_size * array[0].nbytes))
    rows = [indices.rows() for indices in itertools.islice(batches.epoch(0), n_batches)]
    n_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return max(gather_rate(array, rows, n_threads, seconds) for _ in range(_REPEATS))


def disk_rate(paths: Sequence[str], seconds: float) -> float:
    """Return GB/s of reading the largest file in sequence from disk, in the fastest of three ways.

    Args:
        paths: The files.
        seconds: Time for each way.
    """
    path = _largest(paths)
    touched = min(_TOUCHED_BYTES, os.path.getsize(path))
    rates = []
    for n_threads in (1, 4, 0):
        drop(paths)
        touch_memory(touched, _TOUCH_S)
        if n_threads:
            rates.append(sequential_rate(path, n_threads, seconds=seconds))
        else:
            # An older kernel cannot populate a memory map.
            with contextlib.suppress(OSError):
                rates.append(populate_rate(path, seconds=seconds))
    return max(rates)


def _largest(paths: Sequence[str]) -> str:
    return max(paths, key=os.path.getsize)
