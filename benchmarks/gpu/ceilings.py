"""Ceilings: the throughput of the link for blocks and rows at random places of a table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Samples, as_rows, rate, wait
from benchmarks.gpu.conditions import gpu_state, host_state, memory_state
from benchmarks.gpu.recorder import Fields, Skipped
from benchmarks.rowcupy import External
from pinfeed import PinnedStore
from pinfeed.stores.host_rows import StoreRows

BLOCKS = (1, 2, 4, 8, 16, 32, 64)
DIRECTIONS = ("to the device", "to the host", "both")
_FEW_BLOCKS = (4, 8, 16, 32)
_ENOUGH = 0.97
_ROW_BYTES = 4096
# Eight blocks are more than the caches of most hosts hold.
_BLOCK_BYTES = 32 << 20
_SMALL_BLOCK_BYTES = 1 << 20
_N_PLACES = 8
_PLAIN = r"""
extern "C" __global__ void copy(const uint4* from, uint4* to, unsigned n)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = from[i];
}
"""

Queue = Callable[[], object]
Pairs = Iterator[tuple[np.ndarray, Any]]


class Ceilings:
    """Measures the link with contiguous blocks, and with random rows, of a whole table.

    The throughput of some links falls with the size of the memory that is read. So the blocks and
    rows are at random places of the table, and each call copies other ones.

    Args:
        bench: The bench.
        memory: Words of the table, which stay as they are.
    """

    def __init__(self, bench: Bench, memory: PinnedStore) -> None:
        self.bench = bench
        self._memory = memory
        nbytes = _BLOCK_BYTES if bench.cuda else _SMALL_BLOCK_BYTES
        self._table = as_rows(memory, _ROW_BYTES)
        self._n_rows = nbytes // _ROW_BYTES
        rng = np.random.default_rng(0)
        places = rng.permutation(self._table.n_rows // self._n_rows)[:_N_PLACES]
        block = np.arange(self._n_rows)
        # Rows that are consecutive as a whole may be copied by the copy engine.
        rotated = np.roll(block, 1)
        self._blocks = Samples(
            bench, [StoreRows(self._table, place * self._n_rows + rotated) for place in places]
        )
        self._random = Samples(
            bench,
            [
                StoreRows(self._table, rng.choice(self._table.n_rows, self._n_rows, replace=False))
                for _ in places
            ],
        )
        # The kernels left the rows of each block in the order of its row indices.
        self._pairs = [
            (self._table.array[start : start + self._n_rows], room.roll(-1, 0))
            for start, (_, room) in zip(places * self._n_rows, self._blocks.pairs, strict=True)
        ]
        # Both streams use the rolled blocks.
        wait(bench.device.name)

    def engine(self, direction: str) -> float:
        """Return GB/s of the copy engine."""
        bench = self.bench
        down, up = self._in_turn()
        return self._rate(
            direction,
            lambda: bench.device.copy(*next(down), bench.read),
            lambda: bench.device.copy(*reversed(next(up)), bench.write),
        )

    def plain(self, direction: str) -> float:
        """Return GB/s of a kernel that uses the whole GPU to copy one block."""
        if not self.bench.cuda:
            raise Skipped("the plain kernel needs a GPU")
        down, up = self._in_turn()

        def gather() -> None:
            host, there = next(down)
            self._plain(self.bench.read, host.ctypes.data, there.data_ptr(), host.nbytes)

        def scatter() -> None:
            host, there = next(up)
            self._plain(self.bench.write, there.data_ptr(), host.ctypes.data, host.nbytes)

        return self._rate(direction, gather, scatter)

    def kernel(self, n_blocks: int, direction: str, *, random: bool = False) -> float:
        """Return GB/s of the kernels that copy rows, of random rows or of whole blocks."""
        self.bench.use_route(n_blocks)
        samples = self._random if random else self._blocks
        return self._rate(direction, samples.gather, samples.scatter)

    def few(self) -> dict[str, float]:
        """Measure the ceilings of row throughput in GB/s, and the blocks that reach them."""
        down, up = DIRECTIONS[:2]
        reached = {n_blocks: self.kernel(n_blocks, down) for n_blocks in _FEW_BLOCKS}
        best = max(reached.values())
        n_blocks = min(n for n, found in reached.items() if found >= _ENOUGH * best)
        write = self.kernel(n_blocks, up)
        plain = [self.plain(direction) if self.bench.cuda else 0.0 for direction in (down, up)]
        return {
            "n_blocks": n_blocks,
            "gather_copy_engine": self.engine(down),
            "scatter_copy_engine": self.engine(up),
            "gather_kernel": max(best, plain[0]),
            "scatter_kernel": max(write, plain[1]),
            "gather_random_rows": self.kernel(n_blocks, down, random=True),
            "scatter_random_rows": self.kernel(n_blocks, up, random=True),
        }

    def conditions(self) -> Fields:
        """Return the conditions under which the table is read by the copy engine."""
        down, _ = self._in_turn()

        def load() -> None:
            for _ in range(_N_PLACES):
                self.bench.device.copy(*next(down), self.bench.read)
            self.bench.read.record().sync()

        return {**host_state(), **memory_state(self._memory.array), **gpu_state(load)}

    def _in_turn(self) -> tuple[Pairs, Pairs]:
        """Return blocks to gather and blocks to scatter, which differ at any time."""
        half = len(self._pairs) // 2
        return itertools.cycle(self._pairs), itertools.cycle(
            self._pairs[half:] + self._pairs[:half]
        )

    def _rate(self, direction: str, down: Queue, up: Queue) -> float:
        nbytes = self._n_rows * _ROW_BYTES
        if direction == "both":
            return rate(2 * nbytes, self.bench.queued_s(lambda: [down(), up()], _N_PLACES))
        one = down if direction == "to the device" else up
        return rate(nbytes, self.bench.queued_s(one, _N_PLACES))

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
