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
from pinfeed.stores.base import StoreRows, part_nbytes

_FACTORS = (1, 2, 0.5, 4, 0.25)
_ROW_BYTES = 4096
# Many batches, because the first transfer of an epoch cannot be hidden.
_N_BATCHES = 128
_BESIDE_ROW_BYTES = 512
_BESIDE_ROWS = 65_536
_N_REPEATS = 2
_IMAGE = (3, 224, 224)

Step = Callable[[Any], object]


class Products:
    """Matrix products of random numbers; zeros would draw less power and run faster.

    Args:
        device: ``cuda`` or ``cpu``.
        n: Rows and columns of the matrices on a GPU.
    """

    def __init__(self, device: str, n: int) -> None:
        self.n = n if device == "cuda" else 256
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._a, self._b = (torch.randn(self.n, self.n, device=device).to(dtype) for _ in range(2))
        self._c = torch.empty_like(self._a)

    def __call__(self, n_times: int = 1) -> None:
        for _ in range(n_times):
            torch.mm(self._a, self._b, out=self._c)


def overlaps(run: Run) -> list[Cell]:
    """Return cells of loops whose step is products or a model, and of products during transfers."""
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
) -> Fields:
    """Return milliseconds of a batch: the transfer alone, the step alone, and both together.

    Args:
        store: Store of the rows.
        batch_size: Rows of a batch.
        device: Device that the rows are copied to.
        route: Route of the feeder.
        step_of: Function that returns the step, given the seconds of a transfer.
        write: Whether the rows are written back.
    """
    with Feeder(
        store, batch_size=batch_size, shuffle=True, drop_last=True, device=device, route=route
    ) as feeder:
        loop = Loop(feeder, device, write)
        transfer = fastest(loop.epoch_s, lambda _: None)
        step = step_of(transfer)
        compute = fastest(loop.step_alone_s, step)
        both = min(loop.epoch_s(step) for _ in range(_N_REPEATS))
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


class Loop:
    """A loop over a feeder, timed with a step.

    Args:
        feeder: The feeder.
        device: Device of the batches.
        write: Whether the loop writes batches back.
    """

    def __init__(self, feeder: Feeder, device: str, write: bool) -> None:
        self._feeder = feeder
        self._device = device
        self._write = write
        self._n = len(feeder)
        with contextlib.closing(iter(feeder)) as batches:  # type: ignore[type-var]  # a generator
            self._resident = next(batches).clone()

    def epoch_s(self, step: Step) -> float:
        """Return the seconds of a batch in an epoch with a step."""
        wait(self._device)
        begin = time.perf_counter()
        for batch in self._feeder.batches():
            step(batch.data)
            if self._write:
                batch.write_back(batch.data)
        wait(self._device)
        return (time.perf_counter() - begin) / self._n

    def step_alone_s(self, step: Step) -> float:
        """Return the seconds of a step on a batch that is on the device already."""
        wait(self._device)
        begin = time.perf_counter()
        for _ in range(self._n):
            step(self._resident)
        wait(self._device)
        return (time.perf_counter() - begin) / self._n


def fastest(time_it: Callable[[Step], float], step: Step) -> float:
    """Return the fastest of several epochs; the first one warms up and does not count."""
    return min([time_it(step) for _ in range(1 + _N_REPEATS)][1:])


def best_s(products: Products, device: str, n: int = 20) -> float:
    """Return the mean seconds of one product in a sequence of ``n``."""
    products(n)
    wait(device)
    begin = time.perf_counter()
    products(n)
    wait(device)
    return (time.perf_counter() - begin) / n


def random_images(n: int, *, pin: bool) -> PinnedStore:
    """Create images of random bytes."""
    store = PinnedStore.empty((n, *_IMAGE), "uint8", pin=pin)
    some = np.random.default_rng(0).integers(256, size=(min(n, 128), *_IMAGE), dtype=np.uint8)
    for start in range(0, n, len(some)):
        store.array[start : start + len(some)] = some[: n - start]
    return store


def training_step(device: str, batch_size: int) -> Step:
    """Return a training step of ResNet-18 on a batch of images, with bfloat16 autocast."""
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
    """Return cells of the slowdown of large products while rows are copied."""
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
    """Large products, and rows that are copied at the same time."""

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
        """Measure with a kernel of ``n_blocks``, or with the copy engine for None."""
        bench = self.bench
        if n_blocks is None:
            move = functools.partial(bench.device.copy, self._staged, self._into, bench.read)
        else:
            bench.use_blocks(n_blocks)
            move = functools.partial(bench.gather, self._sample, self._into)
        move_s = bench.latency_s(move)
        n_moves = int(3 * self._alone_s / move_s) + 1
        # The first round is not timed, because it allocates page-locked memory for row indices.
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
        # This waits for one stream only, because the transfers must continue.
        current = self.bench.device.current_stream()
        current.record().sync()
        begin = time.perf_counter()
        self._products(self._n)
        current.record().sync()
        return time.perf_counter() - begin
