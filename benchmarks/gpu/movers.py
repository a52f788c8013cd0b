"""Ways to move rows of 32 KiB and more: kernels, one copy, and the CPU."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench, Samples, as_rows, expected_rows, wait
from benchmarks.gpu.conditions import gpu_state
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.rows import check
from benchmarks.gpu.steps import Products, best_s
from pinfeed import PinnedStore
from pinfeed.stores.host_rows import StoreRows
from pinfeed.threads.pool import ThreadPool

_ROW_BYTES = (65_536, 32_768, 1 << 20)
_BATCH_BYTES = 64 << 20
_N_SAMPLES = 4
_N_MOVES = 8
_N_REPEATS = 5
_N_BLOCKS = 8
_BLOCKS = (4, 8, 16, 32)

Move = Callable[[], object]


def movers(run: Run) -> list[Cell]:
    """Return cells of the ways to move long rows, alone and together with matrix products."""
    first, *others = _BLOCKS if run.cuda else _BLOCKS[:1]
    ways: list[tuple[str, int | None]] = [
        *(("kernel", n_blocks) for n_blocks in (_N_BLOCKS, first)),
        ("one copy of consecutive rows", None),
        ("gathered by the CPU", None),
        *(("kernel", n_blocks) for n_blocks in others if n_blocks != _N_BLOCKS),
    ]
    shared = functools.cache(lambda: Movers(run))
    cells = []
    for row_nbytes in _ROW_BYTES if run.cuda else _ROW_BYTES[:2]:
        for way, n_blocks in ways:
            key = {"by": way, "n_blocks": n_blocks, "row_nbytes": row_nbytes}
            measure = functools.partial(
                lambda *arguments: shared().measure(*arguments), row_nbytes, way, n_blocks
            )
            cells.append(Cell(key, measure))
    return cells


class Movers:
    """Long rows of a table, and products that are computed while they are moved."""

    def __init__(self, run: Run) -> None:
        self.bench = bench = Bench(run.device)
        self._memory = bench.words((4 << 30) if run.cuda else (64 << 20))
        self._batch_nbytes = _BATCH_BYTES if run.cuda else (1 << 20)
        self._products = Products(run.device, 8192)
        self._product_s = best_s(self._products, run.device, 5)

    def measure(self, row_nbytes: int, way: str, n_blocks: int | None) -> Fields:
        """Compare the rows that one way moves, and time it."""
        bench = self.bench
        store = as_rows(self._memory, row_nbytes)
        bench.use_route(n_blocks or _N_BLOCKS)
        samples = Samples(bench, self._samples(store, consecutive=way.startswith("one copy")))
        if way == "gathered by the CPU":
            with Staging(bench, samples) as staging:
                staging.compare()
                return self._times(samples.nbytes, staging.gather)
        check(bench, samples.pairs[0][0])
        return self._times(samples.nbytes, samples.gather, samples.scatter)

    def _samples(self, store: PinnedStore, *, consecutive: bool) -> list[StoreRows]:
        n = self._batch_nbytes // (store.array.nbytes // store.n_rows)
        rng = np.random.default_rng(0)
        if not consecutive:
            order = rng.permutation(store.n_rows)
            return [StoreRows(store, order[i * n : (i + 1) * n]) for i in range(_N_SAMPLES)]
        places = rng.permutation(store.n_rows // n)[:_N_SAMPLES]
        return [StoreRows(store, np.arange(place * n, (place + 1) * n)) for place in places]

    def _times(self, nbytes: int, gather: Move, scatter: Move | None = None) -> Fields:
        gather_s = self._seconds(gather)
        n_products = max(1, round(_N_MOVES * gather_s / self._product_s))
        products_s = self._seconds(lambda: None, n_products)
        joint_s = self._seconds(gather, n_products)
        found: Fields = {
            "batch_nbytes": nbytes,
            "gather_gb_per_s": round(nbytes / gather_s / 1e9, 2),
            "gather_ms": round(gather_s * 1e3, 4),
            "products_ms": round(products_s * 1e3, 4),
            "joint_ms": round(joint_s * 1e3, 4),
            "joint_to_longer": round(joint_s / max(gather_s, products_s), 4),
        }
        if scatter is not None:
            scatter_s = self._seconds(scatter)
            both_s = self._seconds(lambda: [gather(), scatter()])
            found["scatter_gb_per_s"] = round(nbytes / scatter_s / 1e9, 2)
            found["both_gb_per_s"] = round(2 * nbytes / both_s / 1e9, 2)
        return {**found, "conditions": gpu_state(lambda: self._seconds(gather, n_products))}

    def _seconds(self, move: Move, n_products: int = 0) -> float:
        """Return the seconds of a move: the mean of several that begin together with products."""
        times = []
        for _ in range(1 + _N_REPEATS):
            wait(self.bench.device.name)
            begin = time.perf_counter()
            self._products(n_products)
            for _ in range(_N_MOVES):
                move()
            wait(self.bench.device.name)
            times.append((time.perf_counter() - begin) / _N_MOVES)
        # The first time may load code.
        return min(times[1:])


class Staging:
    """Rows that threads gather into page-locked buffers, which are copied."""

    def __init__(self, bench: Bench, samples: Samples) -> None:
        self._bench = bench
        self._n_threads = min(3, len(os.sched_getaffinity(0)))
        self._threads = ThreadPool(self._n_threads, "gather")
        self._batches: list[tuple[StoreRows, np.ndarray, Any]] = [
            (sample, bench.words(samples.nbytes).array.reshape(sample.shape), into)
            for sample, into in samples.pairs
        ]
        self._copied = [bench.read.record() for _ in self._batches]
        self._next = itertools.cycle(range(len(self._batches)))

    def __enter__(self) -> Staging:
        self._threads.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bench.read.record().sync()
        self._threads.__exit__(*error)

    def gather(self) -> None:
        """Gather the next sample, and queue the copies."""
        bench, i = self._bench, next(self._next)
        sample, host, into = self._batches[i]
        # The last copies may still read the buffer.
        self._copied[i].sync()
        edges = np.linspace(0, len(host), min(len(host), 4 * self._n_threads) + 1).astype(int)

        def gathered(edge: tuple[int, int]) -> tuple[int, int]:
            a, b = edge
            sample.store.gather(sample.rows[a:b], host[a:b])
            return edge

        for a, b in self._threads.map(gathered, list(itertools.pairwise(edges.tolist()))):
            bench.device.copy(host[a:b], bench.device.cut(into, a, b), bench.read)
        self._copied[i] = bench.read.record()

    def compare(self) -> None:
        """Gather every sample once.

        Raises:
            AssertionError: If rows are wrong on the device.
        """
        for sample, host, into in self._batches:
            into.zero_()
            wait(self._bench.device.name)
            self.gather()
            self._bench.read.record().sync()
            expected = expected_rows(sample.rows, host[0].nbytes)
            if not np.array_equal(into.cpu().numpy(), expected):
                raise AssertionError(f"{len(host)} rows gathered by the CPU are wrong")
