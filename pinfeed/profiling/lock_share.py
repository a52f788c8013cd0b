"""LockSampler: measures the share of time in which threads hold the interpreter's lock.

A sampler thread sleeps for random times. When it wakes up, it needs the lock. If another thread
holds the lock, the operating system counts one more voluntary context switch of the sampler,
because it waits. This count does not depend on how long the machine takes to wake the sampler.

A sample costs the other threads some microseconds, and at most two hundred are taken in a second.
More of them would change what they measure, because a thread that is asked for the lock may have to
wait for a core before it holds the lock again.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import threading
import time

from pinfeed.threads.pool import ThreadPool

_LEAST_SLEEP_S = 0.5e-3
_MOST_SLEEP_S = 9.5e-3
# A shorter time gives no share within a tenth.
_LEAST_S = 0.3
# With a share of 0.6, a second thread gains a little.
_ROUNDING = 0.5
SAMPLED_S = 0.8
"""Seconds for which a sampler runs, unless it is stopped before."""


class LockSampler:
    """Samples whether threads hold the interpreter's lock, in a thread of its own.

    Args:
        seconds: Time after which sampling ends.
    """

    def __init__(self, seconds: float = SAMPLED_S) -> None:
        self._seconds = seconds
        self._is_over = False
        self._ident = 0
        self._pool = ThreadPool(1, "pinfeed-lock-sampler")
        self._share = self._pool.submit(self._sample)

    def stop(self) -> float | None:
        """End the thread, and return the share of time in which another thread held the lock.

        The share is None if the time was too short.
        """
        self._is_over = True
        if threading.get_ident() == self._ident:
            # The garbage collector ends the loop in this thread, which cannot wait for itself.
            self._pool.shutdown(wait=False)
            return None
        self._pool.shutdown()
        return self._share.result()

    def _sample(self) -> float | None:
        self._ident = threading.get_ident()
        if not has_lock():
            return 0.0
        seconds = 0.0
        held_s = 0.0
        end = time.perf_counter()
        begin = end
        while not self._is_over and end - begin < self._seconds:
            start = end
            n_waits = _n_waits()
            time.sleep(random.uniform(_LEAST_SLEEP_S, _MOST_SLEEP_S))
            n_waits = _n_waits() - n_waits
            end = time.perf_counter()
            seconds += end - start
            # The sleep itself is one wait. The time of a cycle is its weight, because a sampler
            # that waits for the lock samples less often.
            if n_waits > 1:
                held_s += end - start
        return held_s / seconds if seconds >= _LEAST_S else None


def most_threads(n_threads: int, lock_share: float, n_cores: int) -> int:
    """Return the number of threads that may run a function faster, and no more.

    Args:
        n_threads: Number of threads that call the function now.
        lock_share: Share of the time in which they hold the interpreter's lock.
        n_cores: Number of cores.
    """
    allowed = n_threads / lock_share if lock_share else math.inf
    return max(n_threads, int(min(n_cores, allowed + _ROUNDING)))


def more_threads_in_words(n_threads: int, lock_share: float | None) -> str:
    """Say whether more ``transform_threads`` would help, in sentences.

    Args:
        n_threads: Number of threads that call ``host_transform`` now.
        lock_share: Share of the time in which threads hold the interpreter's lock; None if unknown.
    """
    n_cores = len(os.sched_getaffinity(0))
    cores = f"this process may use {n_cores} core{'s' * (n_cores > 1)}"
    if n_threads >= n_cores:
        return f"More transform_threads would not help, because {cores}."
    if lock_share is None:
        return (
            f"transform_threads={n_cores} calls it for several batches at a time ({cores}), which "
            "helps if it releases the interpreter's lock."
        )
    held = f"Threads hold the interpreter's lock for {lock_share:.0%} of the time"
    most = most_threads(n_threads, lock_share, n_cores)
    if most == n_threads:
        return f"{held}, so more transform_threads would help little."
    return f"{held}, so transform_threads={most} can help ({cores})."


def has_lock() -> bool:
    """Return whether only one thread at a time runs Python code."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _n_waits() -> int:
    """Return the number of times that this thread has waited for anything."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
