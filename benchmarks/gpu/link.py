"""Throughput of the link between host and device, and of a feeder's loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, as_rows, expected_rows, rate, wait, words
from benchmarks.gpu.recorder import Cell, Fields, Run, Skipped
from pinfeed import Feeder, PinnedStore
from pinfeed.devices.kernels import External
from pinfeed.stores.base import StoreRows

BLOCKS = (1, 2, 4, 8, 16, 32, 64)
DIRECTIONS = ("to the device", "to the host", "both")
_FEW_BLOCKS = (4, 8, 16, 32)
_ENOUGH = 0.97
_ROW_BYTES = 4096
_BATCH_BYTES = 16 << 20
_N_WARM = 8
_ROUTE_SIZES = (512, 4096, 128, 65_536, 64, 256, 1024, 16_384)
_PLAIN = r"""
extern "C" __global__ void copy(const uint4* from, uint4* to, unsigned n)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = from[i];
}
"""


def ceilings(run: Run) -> list[Cell]:
    """Return cells of the throughput of one large block, by the copy engine and by kernels."""
    made = functools.cache(
        lambda: Ceilings(Bench(run.device), (256 << 20) if run.cuda else (8 << 20))
    )
    ways: list[tuple[Fields, Callable[[str], float]]] = [
        ({"by": "copy engine"}, lambda direction: made().engine(direction)),
        ({"by": "plain kernel"}, lambda direction: made().plain(direction)),
    ]
    for n_blocks in (8, *(n for n in BLOCKS if n != 8)):
        by_blocks = functools.partial(lambda n, direction: made().kernel(n, direction), n_blocks)
        ways.append(({"by": "row kernel", "n_blocks": n_blocks}, by_blocks))
    return [
        Cell({**key, "direction": direction}, functools.partial(_gb_per_s, way, direction))
        for key, way in ways
        for direction in DIRECTIONS
    ]


def _gb_per_s(way: Callable[[str], float], direction: str) -> Fields:
    return {"gb_per_s": way(direction)}


class Ceilings:
    """Measures the link with contiguous blocks of ``nbytes``."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.bench = bench
        self._nbytes = nbytes
        device = bench.device
        self._host = [device.staging(nbytes) for _ in range(2)]
        memory = [device.empty(nbytes, device.current_stream()) for _ in range(2)]
        self._there = [device.tensor(buffer, (nbytes,), np.dtype("u1")) for buffer in memory]
        for block in self._host:
            block[...] = 1

    def engine(self, direction: str) -> float:
        """Return GB/s of the copy engine."""
        bench = self.bench
        device = bench.device
        return self._rate(
            direction,
            lambda: device.copy(self._host[0], self._there[0], bench.read),
            lambda: device.copy(self._there[1], self._host[1], bench.write),
        )

    def plain(self, direction: str) -> float:
        """Return GB/s of a kernel that uses the whole GPU to copy one block."""
        if not self.bench.cuda:
            raise Skipped("the plain kernel needs a GPU")
        host = [block.ctypes.data for block in self._host]
        there = [tensor.data_ptr() for tensor in self._there]
        return self._rate(
            direction,
            lambda: self._plain(self.bench.read, host[0], there[0], self._nbytes),
            lambda: self._plain(self.bench.write, there[1], host[1], self._nbytes),
        )

    def kernel(self, n_blocks: int, direction: str) -> float:
        """Return GB/s of the kernels that copy rows, with rows in sequence."""
        samples, into = self._rows
        self.bench.use_blocks(n_blocks)
        return self._rate(
            direction,
            lambda: self.bench.gather(samples[0], into[0]),
            lambda: self.bench.scatter(samples[1], into[1]),
        )

    def few(self) -> dict[str, float]:
        """Measure the ceilings of row throughput in GB/s, and the blocks that reach them."""
        reached = {n_blocks: self.kernel(n_blocks, "to the device") for n_blocks in _FEW_BLOCKS}
        best = max(reached.values())
        n_blocks = min(n for n, found in reached.items() if found >= _ENOUGH * best)
        write = self.kernel(n_blocks, "to the host")
        plain = [self.plain(direction) if self.bench.cuda else 0.0 for direction in DIRECTIONS[:2]]
        return {
            "n_blocks": n_blocks,
            "gather_copy_engine": self.engine("to the device"),
            "scatter_copy_engine": self.engine("to the host"),
            "gather_kernel": max(best, plain[0]),
            "scatter_kernel": max(write, plain[1]),
        }

    def _rate(self, direction: str, down: Callable[[], object], up: Callable[[], object]) -> float:
        if direction == "both":
            return rate(2 * self._nbytes, self.bench.queued_s(lambda: [down(), up()]))
        return rate(self._nbytes, self.bench.queued_s(down if direction == "to the device" else up))

    @functools.cached_property
    def _rows(self) -> tuple[list[StoreRows], list[Any]]:
        stores = [as_rows(self.bench.words(self._nbytes), _ROW_BYTES) for _ in range(2)]
        samples = [StoreRows(store, np.arange(store.n_rows)) for store in stores]
        return samples, [self.bench.room(sample) for sample in samples]

    @functools.cached_property
    def _plain(self) -> Callable[[Any, int, int, int], None]:
        import cupy

        kernel = cupy.RawKernel(_PLAIN, "copy", options=("-std=c++17",))
        n_blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count

        def launch(stream: Any, source: int, target: int, nbytes: int) -> None:
            with cupy.cuda.Stream.from_external(External(stream.raw.cuda_stream)):
                kernel(
                    (n_blocks,),
                    (256,),
                    (np.uint64(source), np.uint64(target), np.uint32(nbytes // 16)),
                )

        return launch


def routes(run: Run) -> list[Cell]:
    """Return cells of a feeder's loops without a step, with and without write-back."""
    memory = functools.cache(lambda: words((2 << 30) if run.cuda else (256 << 20), pin=run.cuda))
    seconds = 0.7 if run.cuda else 0.1

    def measured(row_nbytes: int, write: bool, route: str) -> Fields:
        return loop_rate(
            as_rows(memory(), row_nbytes),
            run.device,
            route if run.cuda else None,
            write=write,
            seconds=seconds,
        )

    sizes = _ROUTE_SIZES if run.cuda else (512, 4096)
    cells = []
    for row_nbytes, write, route in itertools.product(sizes, (False, True), ("direct", "staged")):
        key = {"row_nbytes": row_nbytes, "write": write, "route": route}
        cells.append(Cell(key, functools.partial(measured, row_nbytes, write, route)))
    return cells


def loop_rate(
    store: PinnedStore, device: str, route: str | None, *, write: bool, seconds: float
) -> Fields:
    """Return GB/s of shuffled rows in a loop without a step, in the steady state.

    Rows that are written back count in both directions.
    """
    row_nbytes = store.array.nbytes // store.n_rows
    batch_size = max(1, _BATCH_BYTES // row_nbytes)
    with Feeder(
        store, batch_size=batch_size, shuffle=True, drop_last=True, device=device, route=route
    ) as feeder:
        with contextlib.closing(feeder.batches()) as batches:
            for batch in itertools.islice(batches, 2):
                expected = torch.from_numpy(expected_rows(batch.rows, row_nbytes))
                if not torch.equal(batch.data.cpu(), expected):
                    raise AssertionError(
                        f"rows of {row_nbytes} bytes by the {feeder.plan.route} route are wrong"
                    )
        rates = [_epoch_rate(feeder, device, seconds, write=write)]
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            rates.append(_epoch_rate(feeder, device, seconds, write=write))
        epoch_nbytes = batch_size * row_nbytes * (1 + write)
        return {
            "gb_per_s": rate(epoch_nbytes, 1 / max(rates)),
            "epochs": len(rates),
            "batch_size": batch_size,
            "plan": feeder.plan.route,
        }


def _epoch_rate(feeder: Feeder, device: str, seconds: float, *, write: bool) -> float:
    """Return the batches per second of an epoch, after the first ones, for up to ``seconds``."""
    n_warm = min(_N_WARM, len(feeder) // 2)
    begin = 0.0
    i = 0
    with contextlib.closing(feeder.batches()) as batches:
        for i, batch in enumerate(batches):
            if i == n_warm:
                wait(device)
                begin = time.perf_counter()
            if write:
                batch.write_back(batch.data)
            if i > n_warm and time.perf_counter() - begin > seconds:
                break
        wait(device)
        # The batch after which the time begins does not count.
        return (i - n_warm) / (time.perf_counter() - begin)
