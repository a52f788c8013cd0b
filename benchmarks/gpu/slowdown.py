"""Launch geometry of the row kernels: the slowdown of large products while rows are copied."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Samples, as_rows
from benchmarks.gpu.ceilings import BLOCKS
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.steps import Products, best_s
from pinfeed.devices.kernels import THICK, THIN
from pinfeed.stores.host_rows import StoreRows

_ROW_BYTES = 512
_N_ROWS = 65_536
# Thin blocks for each multiprocessor.
_THIN_BLOCKS = (1, 2, 4)


def products_during_transfers(run: Run) -> list[Cell]:
    """Return cells of the slowdown by a few thick blocks, many thin ones, and the copy engine."""
    shared = functools.cache(lambda: Slowdown(Bench(run.device)))
    first, *others = ((f"{n} thick blocks", n, THICK) for n in (8, *(n for n in BLOCKS if n != 8)))
    ways: list[tuple[str, int, int]] = [
        first,
        *((f"thin blocks, {n} per multiprocessor", n, THIN) for n in _THIN_BLOCKS),
        ("copy engine", 0, 0),
        *others,
    ]
    return [
        Cell(
            {"what": "products during a transfer", "by": by},
            functools.partial(lambda *way: shared().rows(*way), n_blocks, n_threads),
        )
        for by, n_blocks, n_threads in ways
    ]


class Slowdown:
    """Large products, and transfers at the same time."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._products = Products("cuda" if bench.cuda else "cpu", 8192)
        one_s = best_s(self._products, bench.device.name, 5)
        self._n = max(3, round((0.05 if bench.cuda else 0.01) / one_s))
        self._alone_s = statistics.median(self._products_s() for _ in range(9))

    @functools.cached_property
    def _samples(self) -> Samples:
        bench = self._bench
        store = as_rows(bench.words((1 << 30) if bench.cuda else (64 << 20)), _ROW_BYTES)
        rng = np.random.default_rng(0)
        return Samples(
            bench, [StoreRows(store, rng.permutation(store.n_rows)[:_N_ROWS]) for _ in range(2)]
        )

    @functools.cached_property
    def _staged(self) -> np.ndarray:
        sample, _ = self._samples.pairs[0]
        staged = self._bench.device.staging(self._samples.nbytes)
        block: np.ndarray = staged.view(np.int64).reshape(sample.shape)
        return block

    def rows(self, n_blocks: int, n_threads: int) -> Fields:
        """Measure with blocks of a kernel, or with the copy engine.

        Args:
            n_blocks: Number of thick blocks, or of thin blocks on each multiprocessor.
            n_threads: Threads of a block; 0 for the copy engine.
        """
        if n_threads:
            if n_threads == THIN and self._bench.cuda:
                n_blocks *= torch.cuda.get_device_properties(0).multi_processor_count
            self._bench.use_route(n_blocks, n_threads=n_threads)
            found = self.measure(self._samples.gather, self._samples.nbytes)
            return {"n_blocks": n_blocks, "n_threads": n_threads, **found}
        _, into = self._samples.pairs[0]
        move = functools.partial(self._bench.device.copy, self._staged, into, self._bench.read)
        return self.measure(move, self._samples.nbytes)

    def measure(self, move: Callable[[], object], nbytes: int) -> Fields:
        """Time the products during transfers of ``nbytes`` in the read stream."""
        bench = self._bench
        move_s = bench.latency_s(move)
        n_moves = int(3 * self._alone_s / move_s) + 1
        # The first round is not timed, because it loads code.
        for _ in range(n_moves):
            move()
        bench.read.record().sync()
        ratios = []
        for _ in range(5):
            for _ in range(n_moves):
                move()
            done = bench.read.record()
            ratios.append(self._products_s() / self._alone_s)
            if bench.cuda and done.is_done():
                raise RuntimeError(
                    f"{n_moves} transfers ended before {self._n} products did: "
                    "the last products ran alone"
                )
            done.sync()
        return {
            "alone_ms": round(self._alone_s * 1e3, 3),
            "transfer_gb_per_s": round(nbytes / move_s / 1e9, 2),
            "during_to_alone": round(statistics.median(ratios), 4),
        }

    def _products_s(self) -> float:
        # This waits for one stream only, because the transfers must continue.
        current = self._bench.device.current_stream()
        current.record().sync()
        begin = time.perf_counter()
        self._products(self._n)
        current.record().sync()
        return time.perf_counter() - begin
