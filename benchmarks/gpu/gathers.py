"""Gathers by threads of the host into page-locked memory, while the copy engine reads."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench, as_rows, expected_rows, rate, some_of, wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import PinnedStore

_ROW_BYTES = (512, 4096)
_N_THREADS = (1, 2, 4, 8, 14)
_BATCH_BYTES = 16 << 20
_PIECE_BYTES = 256 << 10
_SECONDS = 0.4


def gathers(run: Run) -> list[Cell]:
    """Return cells of gathers by some threads, alone and while the copy engine reads.

    The staged route of a loop is at most as fast as these gathers, and as the copies beside them.
    """
    made = functools.cache(lambda: Gathers(run))
    n_cores = len(os.sched_getaffinity(0))
    counts = [n for n in _N_THREADS if n <= max(2, n_cores)]
    return [
        Cell(
            {"row_nbytes": row_nbytes, "threads": n},
            functools.partial(lambda *arguments: made().measure(*arguments), row_nbytes, n),
        )
        for row_nbytes, n in itertools.product(_ROW_BYTES, counts)
    ]


class Gathers:
    """A table, page-locked buffers, and copies of one of them."""

    def __init__(self, run: Run) -> None:
        self._bench = bench = Bench(run.device)
        self._memory = bench.words((2 << 30) if run.cuda else (4 << 20))
        self._nbytes = _BATCH_BYTES if run.cuda else (1 << 20)
        self._seconds = _SECONDS if run.cuda else 0.02
        # The gathers fill one buffer, and the copy engine reads the other one.
        self._filled, self._read = (bench.words(self._nbytes).array for _ in range(2))
        memory = bench.device.empty(self._nbytes, bench.device.current_stream())
        self._there = bench.device.tensor(memory, self._read.shape, self._read.dtype)

    def measure(self, row_nbytes: int, n_threads: int) -> Fields:
        """Compare gathered rows, and return GB/s of gathers and copies, alone and together."""
        store = as_rows(self._memory, row_nbytes)
        count = self._nbytes // row_nbytes
        numbers = np.random.default_rng(0).choice(store.n_rows, count, replace=False)
        out = self._filled.reshape(count, -1)
        store.gather(numbers, out)
        some = some_of(numbers)
        if not np.array_equal(out[some], expected_rows(numbers[some], row_nbytes)):
            raise AssertionError(f"gathered rows of {row_nbytes} bytes are wrong")
        gather = functools.partial(self._gather, store, numbers, out, n_threads)
        copied_alone = self._copies(lambda: time.sleep(self._seconds))
        alone = gather()
        together: list[float] = []
        copied = self._copies(lambda: together.append(gather()))
        return {
            "gather_gb_per_s": alone,
            "gather_during_copies": together[0],
            "copy_gb_per_s": copied_alone,
            "copy_during_gathers": copied,
        }

    def _gather(
        self, store: PinnedStore, numbers: np.ndarray, out: np.ndarray, n_threads: int
    ) -> float:
        """Return GB/s of threads that gather pieces of batches for some time."""
        n_rows = max(1, _PIECE_BYTES * len(out) // out.nbytes)
        end_s = time.perf_counter() + self._seconds
        nbytes = [0] * n_threads

        def work(thread: int) -> None:
            pieces = range(thread * n_rows, len(out), n_threads * n_rows)
            while time.perf_counter() < end_s:
                for a in pieces:
                    store.gather(numbers[a : a + n_rows], out[a : a + n_rows])
                    nbytes[thread] += out[a : a + n_rows].nbytes

        threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
        begin = time.perf_counter()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return rate(sum(nbytes), time.perf_counter() - begin)

    def _copies(self, work: Any) -> float:
        """Return GB/s of copies that follow each other while ``work`` runs in this thread."""
        bench = self._bench
        ended = threading.Event()
        found: list[float] = []

        def copy() -> None:
            n = 0
            begin = time.perf_counter()
            while not ended.is_set():
                for _ in range(4):
                    bench.device.copy(self._read, self._there, bench.read)
                bench.read.record().sync()
                n += 4
            found.append(rate(n * self._nbytes, time.perf_counter() - begin))

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            work()
        finally:
            ended.set()
            thread.join()
        wait(bench.device.name)
        return found[0]
