"""LockSampler: the share of time in which threads hold the interpreter's lock.

Another process reads from the memory of this one which thread holds the lock, about 9,000 times a
second. So sampling never takes the lock itself, and it takes a tenth of a core. The other process
has real-time priority. Without it, it would run mostly while the sampled threads do not, and find
the lock free. On a machine that runs other programs, a thread may be interrupted while it holds the
lock. That time counts, too.

Sampling needs privileges for this, and CPython 3.11 or older: newer versions do not keep the holder
of the lock in ``_PyRuntime``. Otherwise nothing is sampled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_WORD = 8
_RUNTIME_WORDS = 4096
"""Words of ``_PyRuntime`` that are searched; it is larger."""


class LockSampler:
    """Samples of the lock's holder while a ``with`` block runs, which the calling thread begins.

    Attributes:
        seconds: Seconds of the block.
        training: Share of them in which the calling thread held the lock; None if not sampled.
        others: Share of them in which other threads held it; None if not sampled.
    """

    seconds = 0.0
    training: float | None = None
    others: float | None = None

    def __enter__(self) -> LockSampler:
        state = _thread_state()
        arguments = [str(number) for number in (os.getpid(), state, *_places_of(state))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lock_sampler", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
        )
        assert self._process.stdout is not None
        # The process writes a line when it begins. Until then this thread does not hold the lock.
        self._process.stdout.readline()
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds = time.perf_counter() - self._begin_s
        output, _ = self._process.communicate()
        if self._process.returncode == 0:
            n_training, n_others, n_samples = json.loads(output)
            self.training = n_training / n_samples
            self.others = n_others / n_samples


def _thread_state() -> int:
    """Return the address of the state of this thread."""
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    return int(get())


def _places_of(state: int) -> list[int]:
    """Return the addresses in ``_PyRuntime`` that hold ``state``, while this thread has the lock.

    One is the thread that holds the lock now, and one is the thread that held it last.
    """
    begin = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    words = (ctypes.c_uint64 * _RUNTIME_WORDS).from_address(begin)
    return [begin + _WORD * i for i in range(_RUNTIME_WORDS) if words[i] == state]


def sample(pid: int, training: int, places: list[int]) -> list[int]:
    """Sample the holder of the lock of another process until the standard input ends.

    Args:
        pid: The process, whose calling thread waits without the lock.
        training: Address of the state of that thread.
        places: Candidate addresses; one of them contains the holder.

    Returns:
        The samples in which that thread held the lock, those in which another one did, and all.

    Raises:
        ValueError: If no address, or more than one, says that no thread holds the lock.
        OSError: If this process may not read the memory, or may not have real-time priority.
    """
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    def holder(place: int) -> int:
        return int.from_bytes(os.pread(memory, _WORD, place), sys.byteorder)

    [place] = [place for place in places if holder(place) == 0]
    print("ready", flush=True)
    counts: Counter[int] = Counter()
    # Pauses of random length, so that no period of the loop is in step with them.
    while not select.select([sys.stdin], [], [], random.uniform(20e-6, 80e-6))[0]:
        counts[holder(place)] += 1
    n_samples = max(1, counts.total())
    return [counts[training], n_samples - counts[training] - counts[0], n_samples]


if __name__ == "__main__":
    process, state, *addresses = map(int, sys.argv[1:])
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps(sample(process, state, addresses)))
