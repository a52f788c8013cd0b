"""Overlap of transfers with a step: the share that is hidden, and the slowdown of the step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu.bench import Bench, as_rows, wait, words
from benchmarks.gpu.link import BLOCKS
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.zoo import resnet
from pinfeed import Feeder, PinnedStore
from pinfeed.pipeline.sources.base import part_nbytes
from pinfeed.readahead.base import StoreRows

_FACTORS = (1, 2, 0.5, 4, 0.25)
_ROW_BYTES = 4096
# The first transfer of an epoch hides behind nothing.
_N_BATCHES = 128
_BESIDE_ROW_BYTES, _BESIDE_ROWS = 512, 65_536
_IMAGE = (3, 224, 224)

Step = Callable[[Any], object]


class Products:
    """Matrix products of random numbers: zeros would draw less power, and so run faster.

    Args:
        device: ``cuda`` or ``cpu``.
        n: Rows and columns of the matrices on a GPU.
    """

    def __init__(self, device: str, n: int) -> None:
        self.n, dtype = (n, torch.bfloat16) if device == "cuda" else (256, torch.float32)
        self._a, self._b = (torch.randn(self.n, self.n, device=device).to(dtype) for _ in range(2))
        self._c = torch.empty_like(self._a)

    def __call__(self, n_times: int = 1) -> None:
        for _ in range(n_times):
            torch.mm(self._a, self._b, out=self._c)


def overlaps(run: Run) -> list[Cell]:
    """Loops whose step is matrix products or a model; and products beside transfers."""
    nbytes = (32 << 20) * _N_BATCHES if run.cuda else 64 << 20
    memory = functools.cache(lambda: words(nbytes, pin=run.cuda))
    products = functools.cache(lambda: Products(run.device, 4096))
    images = functools.cache(
        lambda: random_images(64 * 128, pin=True) if run.cuda else random_images(16, pin=False)
    )

    def gemms(factor: float, write: bool, route: str) -> Fields:
        def step_of(transfer_s: float) -> Step:
            one_s = best_s(products(), run.device)
            n_times = max(1, round(factor * transfer_s / one_s))
            return lambda _: products()(n_times)

        store = as_rows(memory(), _ROW_BYTES)
        batch_size = store.n_rows // (_N_BATCHES if run.cuda else 16)
        return overlapped(
            store, batch_size, run.device, route if run.cuda else None, step_of, write=write
        )

    def model(route: str) -> Fields:
        batch_size = 128 if run.cuda else 4
        step = training_step(run.device, batch_size)
        return overlapped(
            images(),
            batch_size,
            run.device,
            route if run.cuda else None,
            lambda _: step,
            write=False,
        )

    factors = _FACTORS if run.cuda else (1,)
    gemm_cells: dict[str, list[Cell]] = {"direct": [], "staged": []}
    for route, factor, write in itertools.product(gemm_cells, factors, (False, True)):
        key = {"what": "products as the step", "factor": factor, "write": write, "route": route}
        gemm_cells[route].append(Cell(key, functools.partial(gemms, factor, write, route)))
    model_cells = [
        Cell({"what": "ResNet-18 as the step", "route": route}, functools.partial(model, route))
        for route in gemm_cells
    ]
    return [*gemm_cells["direct"], *model_cells, *beside_products(run), *gemm_cells["staged"]]


def overlapped(
    store: PinnedStore,
    batch_size: int,
    device: str,
    route: str | None,
    step_of: Callable[[float], Step],
    *,
    write: bool,
    n_repeats: int = 2,
) -> Fields:
    """Milliseconds of a batch: transfer alone, step alone on a batch that is there, and both.

    Args:
        store: Whose rows come.
        batch_size: Rows of a batch.
        device: Where to.
        route: Of the feeder.
        step_of: Given the seconds of a transfer, returns the step.
        write: Whether the rows go back as well.
        n_repeats: The fastest epoch of so many counts.
    """
    with Feeder(
        store, batch_size=batch_size, shuffle=True, drop_last=True, device=device, route=route
    ) as feeder:
        n = len(feeder)
        with contextlib.closing(iter(feeder)) as batches:  # type: ignore[type-var]  # a generator
            resident = next(batches).clone()

        def epoch(step: Step) -> float:
            wait(device)
            begin = time.perf_counter()
            for batch in feeder.batches():
                step(batch.data)
                if write:
                    batch.write_back(batch.data)
            wait(device)
            return (time.perf_counter() - begin) / n

        def alone(step: Step) -> float:
            wait(device)
            begin = time.perf_counter()
            for _ in range(n):
                step(resident)
            wait(device)
            return (time.perf_counter() - begin) / n

        def fastest(time_it: Callable[[Step], float], step: Step) -> float:
            # The first epoch warms up.
            return min([time_it(step) for _ in range(1 + n_repeats)][1:])

        transfer = fastest(epoch, lambda _: None)
        step = step_of(transfer)
        compute = fastest(alone, step)
        both = min(epoch(step) for _ in range(n_repeats))
        nbytes = batch_size * (store.array.nbytes // store.n_rows)
        return {
            "plan": feeder.plan.route,
            "batch_nbytes": nbytes,
            "compute_to_transfer": round(compute / transfer, 3),
            "transfer_gb_per_s": round((1 + write) * nbytes / transfer / 1e9, 2),
            "transfer_ms": round(transfer * 1e3, 4),
            "compute_ms": round(compute * 1e3, 4),
            "both_ms": round(both * 1e3, 4),
            "both_to_longer": round(both / max(transfer, compute), 4),
        }


def best_s(products: Products, device: str, n: int = 20) -> float:
    """Seconds of one product: the mean of several that run one after the other."""
    products(n)
    wait(device)
    begin = time.perf_counter()
    products(n)
    wait(device)
    return (time.perf_counter() - begin) / n


def random_images(n: int, *, pin: bool) -> PinnedStore:
    """Images of random bytes."""
    store = PinnedStore.empty((n, *_IMAGE), "uint8", pin=pin)
    some = np.random.default_rng(0).integers(256, size=(min(n, 128), *_IMAGE), dtype=np.uint8)
    for start in range(0, n, len(some)):
        store.array[start : start + len(some)] = some[: n - start]
    return store


def training_step(device: str, batch_size: int) -> Step:
    """A training step of ResNet-18 on a batch of images, in bfloat16 where autocast chooses it."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = resnet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    labels = torch.randint(1000, (batch_size,), device=device)

    def step(images: torch.Tensor) -> None:
        x = images.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def beside_products(run: Run) -> list[Cell]:
    """Time of large products while rows come, to their time alone."""
    shared = functools.cache(lambda: Beside(run.device))
    cells = []
    for n_blocks in (8, None, *(n for n in BLOCKS if n != 8)):
        key = {
            "what": "products beside a transfer",
            "by": "copy engine" if n_blocks is None else "row kernel",
            "n_blocks": n_blocks,
        }
        cells.append(Cell(key, functools.partial(lambda n: shared().measure(n), n_blocks)))
    return cells


class Beside:
    """Large products, and rows that come beside them."""

    def __init__(self, device: str) -> None:
        self.bench = bench = Bench(device)
        store = as_rows(bench.words((1 << 30) if bench.cuda else (64 << 20)), _BESIDE_ROW_BYTES)
        self._sample = StoreRows(
            store, np.random.default_rng(0).permutation(store.n_rows)[:_BESIDE_ROWS]
        )
        self._into = bench.room(self._sample)
        staged = bench.device.staging(part_nbytes(self._sample))
        self._staged = staged.view(np.int64).reshape(self._sample.shape)
        self._products = Products(device, 8192)
        self._n = max(3, round((0.05 if bench.cuda else 0.01) / best_s(self._products, device, 5)))
        self._alone_s = statistics.median(self._products_s() for _ in range(9))

    def measure(self, n_blocks: int | None) -> Fields:
        """Measure with rows that come by so many blocks; or by the copy engine in one block."""
        bench = self.bench
        if n_blocks is None:
            move = functools.partial(bench.device.copy, self._staged, self._into, bench.read)
        else:
            bench.use_blocks(n_blocks)
            move = functools.partial(bench.gather, self._sample, self._into)
        move_s = bench.latency_s(move)
        n_moves = int(3 * self._alone_s / move_s) + 1
        # The first round is not timed: page-locked memory for so many row numbers is made in it.
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
                    "nothing was beside the last ones"
                )
            done.sync()
        return {
            "alone_ms": round(self._alone_s * 1e3, 3),
            "transfer_gb_per_s": round(part_nbytes(self._sample) / move_s / 1e9, 2),
            "beside_to_alone": round(statistics.median(ratios), 4),
        }

    def _products_s(self) -> float:
        # Not all of the device is waited for: the transfers go on.
        current = self.bench.device.current_stream()
        current.record().sync()
        begin = time.perf_counter()
        self._products(self._n)
        current.record().sync()
        return time.perf_counter() - begin
