"""Measurement of the routes between page-locked stores and a GPU."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.devices.kernels import THIN, Grid
from pinfeed.devices.route import STAGED, Rates, Route, Timing, fastest_grid
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import Gatherable, StoreRows, part_nbytes
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import row_nbytes
from pinfeed.threads.pool import ThreadPool

# Numbers of thick blocks, and of thin blocks for each multiprocessor, that are timed.
_THICK_BLOCKS = (4, 8, 16, 32)
_THIN_BLOCKS = (1, 2)
_SAMPLE_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10
_REPEATS = 3
# Products that are timed at once, and most of them that are timed together with a route.
_N_PRODUCTS = 4
_MOST_PRODUCTS = 64
_MoveBatch = Callable[[Sequence[StoreRows]], object]
# Reader threads of a loop with the default depth.
_N_READERS = min(3, len(os.sched_getaffinity(0)))


def grids_of(n_multiprocessors: int) -> Sequence[Grid]:
    """Return the grids that are timed: few thick blocks, and thin blocks on every multiprocessor.

    Args:
        n_multiprocessors: Number of multiprocessors of the GPU.
    """
    return (
        *map(Grid, _THICK_BLOCKS),
        *(Grid(n * n_multiprocessors, THIN) for n in _THIN_BLOCKS),
    )


def measure(
    device: Any,
    stores: Sequence[ArrayStore],
    n_rows: int,
    queue_products: Callable[[int], None],
) -> Rates:
    """Time each route alone and together with matrix products, in about 100 ms in all.

    Blocks of a kernel that moves rows use registers and bandwidth that the model's kernels need, so
    the fastest route on an idle GPU is not always the fastest for a training loop. The products
    take about as long as the fastest route, but at least one product runs. The times then show
    whether a route slows the products down.

    The function only reads the stores; it writes to memory that it allocates.

    Args:
        device: A CudaDevice that is not used for anything else.
        stores: Page-locked stores.
        n_rows: Rows of a batch.
        queue_products: Queues a number of matrix products in the current stream.
    """
    with ThreadPool(_N_READERS, "pinfeed-tuning") as readers:
        trial = _Trial(device, stores, n_rows, queue_products)
        stage = functools.partial(trial.stage, readers)
        ways: list[tuple[Route, _MoveBatch]] = [(STAGED, stage)]
        ways += [(Route(grid, True, ""), trial.gather) for grid in device.grids]
        alone = [trial.seconds(*way) for way in ways]
        trial.set_products(min(alone))
        staged, *timings = [
            trial.timing(*way, alone_s) for way, alone_s in zip(ways, alone, strict=True)
        ]
        kernel = dict(zip(device.grids, timings, strict=True))
        route = Route(fastest_grid(kernel), True, "")
        both, in_turn = (
            2 * trial.gb / trial.seconds(route, functools.partial(trial.gather_and_scatter, stream))
            for stream in (trial.write_stream, trial.read_stream)
        )
    return Rates(kernel, staged, trial.products_s, both, in_turn)


class _Trial:
    """Batches whose transfer is timed; each has different rows, which no cache holds yet."""

    def __init__(
        self,
        device: Any,
        stores: Sequence[ArrayStore],
        n_rows: int,
        queue_products: Callable[[int], None],
    ) -> None:
        self._device = device
        self._queue_products = queue_products
        self._n_products = 0
        self.products_s = 0.0
        """Seconds of the products alone."""
        rng = np.random.default_rng(0)
        # A single row would always be one copy.
        n = min(n_rows, max(2, _SAMPLE_BYTES // sum(map(row_nbytes, stores))))
        self._batches = []
        for _ in range(1 + _REPEATS):
            chosen = {
                n_all: rng.integers(n_all, size=n) for n_all in {store.n_rows for store in stores}
            }
            self._batches.append([StoreRows(store, chosen[store.n_rows]) for store in stores])
        first = self._batches[0]
        self._current = device.current_stream()
        self.gb = sum(map(part_nbytes, first)) / 1e9
        """Size of a batch in GB."""
        self._tensors = [
            device.tensor(
                device.empty(part_nbytes(sample), self._current), sample.shape, sample.dtype
            )
            for sample in first
        ]
        self._host = [PinnedStore.empty(sample.shape, sample.dtype) for sample in first]
        # Consecutive rows would be one copy.
        self._order = rng.permutation(n)
        self.read_stream = device.stream("read")
        self.write_stream = device.stream("write")
        # Work of the current stream may still use the memory.
        self.read_stream.wait(self._current.record())
        self.write_stream.wait(self._current.record())

    def seconds(self, route: Route, move: _MoveBatch, n_products: int = 0) -> float:
        """Return the seconds of the fastest batch, and of products that begin with it.

        The first batch is not timed, because it includes loading code.
        """
        self._device.route = route
        times = []
        for batch in self._batches:
            begin = time.perf_counter()
            self._queue_products(n_products)
            move(batch)
            self.read_stream.record().sync()  # the rows may not have arrived yet: they are timed
            self.write_stream.record().sync()  # as above, for rows that are written
            self._current.record().sync()  # the products may not be computed yet: they are timed
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    def set_products(self, seconds: float) -> None:
        """Choose the number of products that takes about this long."""
        one_s = self.seconds(STAGED, lambda batch: None, _N_PRODUCTS) / _N_PRODUCTS
        self._n_products = min(_MOST_PRODUCTS, math.ceil(seconds / one_s))
        self.products_s = self.seconds(STAGED, lambda batch: None, self._n_products)

    def timing(self, route: Route, move: _MoveBatch, alone_s: float) -> Timing:
        """Return the speed of a route alone, and time it together with the products."""
        return Timing(self.gb / alone_s, self.seconds(route, move, self._n_products))

    def stage(self, readers: ThreadPool, batch: Sequence[StoreRows]) -> None:
        """Move the rows as a loop does: several threads gather while gathered rows are copied."""
        for sample, host, tensor in zip(batch, self._host, self._tensors, strict=True):
            n = max(1, min(4 * _N_READERS, part_nbytes(sample) // _CHUNK_BYTES))
            edges = [len(sample.rows) * i // n for i in range(n + 1)]
            chunks = [
                (sample.rows[a:b], host.array[a:b], self._device.cut(tensor, a, b))
                for a, b in itertools.pairwise(edges)
            ]
            gather = functools.partial(_gather, sample.store)
            for source, target in (readers.map if n > 1 else map)(gather, chunks):
                self._device.copy(source, target, self.read_stream)

    def gather(self, batch: Sequence[StoreRows]) -> None:
        """Read the rows by the current route."""
        self._device.read(list(zip(batch, self._tensors, strict=True)), self.read_stream)

    def gather_and_scatter(self, stream: Any, batch: Sequence[StoreRows]) -> None:
        """Read the rows by the current route, and write as many other rows in ``stream``."""
        self.gather(batch)
        self._device.write(list(zip(self._host, self._tensors, strict=True)), self._order, stream)


def _gather(
    store: Gatherable, chunk: tuple[Rows, npt.NDArray[Any], Any]
) -> tuple[npt.NDArray[Any], Any]:
    rows, out, target = chunk
    store.gather(rows, out)
    return out, target


# The product has a thousand tiles of 128 x 128, so it occupies every multiprocessor several times,
# and takes a few tens of microseconds on a fast GPU.
_N = 4096
_K = 1024


class MatrixProducts:
    """Matrix products of half precision on one GPU, like most work of a model.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # GPUs before this one have no tensor cores for bfloat16.
        is_recent = torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = torch.bfloat16 if is_recent else torch.float16
        self._left = torch.ones((_N, _K), dtype=dtype, device=device)
        self._right = torch.ones((_K, _N), dtype=dtype, device=device)
        self._out = torch.empty((_N, _N), dtype=dtype, device=device)

    def __call__(self, n: int) -> None:
        """Queue ``n`` products in the current stream."""
        for _ in range(n):
            torch.mm(self._left, self._right, out=self._out)
