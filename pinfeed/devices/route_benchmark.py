"""How rows of page-locked stores get to a GPU: decided by measuring, once for each GPU, rows and batch, and remembered in a file."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.route import Rates, Route, fewest_blocks
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import row_nbytes
from pinfeed.stores.pinned import PinnedStore
from pinfeed.threads.pool import ThreadPool

BLOCKS = (4, 8, 16, 32)
"""Blocks of the kernels that are tried."""
_SAMPLE_BYTES = 16 << 20
_PIECE_BYTES = 256 << 10
_REPEATS = 3
# Of a loop with the usual depth.
_N_READERS = min(3, len(os.sched_getaffinity(0)))


class Sample:
    """Rows of a store that are wanted for nothing but to be timed."""

    def __init__(self, store: ArrayStore, rows: Rows) -> None:
        self.store = store
        self.rows = rows
        self.dtype = store.dtype
        self.shape = (len(rows), *store.row_shape)

    def read(self, out: npt.NDArray[Any]) -> Iterator[None]:
        """As that of every part."""
        self.store.gather(self.rows, out)
        yield


def measure(device: Any, stores: Sequence[ArrayStore], n_rows: int) -> Rates:
    """Time each way, some tens of milliseconds in all.

    The stores are read only: what is written goes to memory that is made for this.

    Args:
        device: A CudaDevice that nobody else uses.
        stores: Page-locked.
        n_rows: Rows of a batch.
    """
    with ThreadPool(_N_READERS, "pinfeed-tuning") as readers:
        trial = _Trial(device, stores, n_rows)
        staged = trial.rate(functools.partial(trial.stage, readers))
        direct = {}
        for n_blocks in BLOCKS:
            device.route = Route(n_blocks, True, "")
            direct[n_blocks] = trial.rate(trial.come)
        device.route = Route(fewest_blocks(direct), True, "")
        both, in_turn = (
            2 * trial.rate(functools.partial(trial.come_and_go, stream))
            for stream in (trial.back, trial.there)
        )
    return Rates(direct, staged, both, in_turn)


class _Trial:
    """Batches that are brought to be timed, other rows each time, so that they are not in a cache."""

    def __init__(self, device: Any, stores: Sequence[ArrayStore], n_rows: int) -> None:
        self._device = device
        n, rng = (
            max(1, min(n_rows, _SAMPLE_BYTES // sum(map(row_nbytes, stores)))),
            np.random.default_rng(0),
        )
        self._batches = []
        for _ in range(1 + _REPEATS):
            chosen = {
                n_all: rng.integers(n_all, size=n) for n_all in {store.n_rows for store in stores}
            }
            self._batches.append([Sample(store, chosen[store.n_rows]) for store in stores])
        first, now = self._batches[0], device.current_stream()
        self._gb = sum(map(nbytes_of, first)) / 1e9
        self._into = [
            device.tensor(device.empty(nbytes_of(sample), now), sample.shape, sample.dtype)
            for sample in first
        ]
        self._host = [PinnedStore.empty(sample.shape, sample.dtype) for sample in first]
        self.there = device.stream("read")
        self.back = device.stream("write")
        # The memory may be in use until then.
        self.there.wait(now.record())
        self.back.wait(now.record())

    def rate(self, work: Callable[[Sequence[Sample]], object]) -> float:
        """GB/s of the fastest batch; the first one is not timed, for code that is loaded then."""
        times = []
        for batch in self._batches:
            begin = time.perf_counter()
            work(batch)
            self.there.record().sync()
            self.back.record().sync()
            times.append(time.perf_counter() - begin)
        return self._gb / min(times[1:])

    def stage(self, readers: ThreadPool, batch: Sequence[Sample]) -> None:
        """As a loop does it: several threads gather, and what they have is on its way meanwhile."""
        for sample, host, into in zip(batch, self._host, self._into, strict=True):
            n = max(1, min(4 * _N_READERS, nbytes_of(sample) // _PIECE_BYTES))
            edges = [len(sample.rows) * i // n for i in range(n + 1)]
            pieces = [
                (sample.rows[a:b], host.array[a:b], self._device.cut(into, a, b))
                for a, b in itertools.pairwise(edges)
            ]
            gather = functools.partial(_gather, sample.store)
            for out, there in (readers.map if n > 1 else map)(gather, pieces):
                self._device.copy(out, there, self.there)

    def come(self, batch: Sequence[Sample]) -> None:
        """Kernels read the rows."""
        deque(self._device.read(list(zip(batch, self._into, strict=True)), self.there), maxlen=0)

    def come_and_go(self, stream: Any, batch: Sequence[Sample]) -> None:
        """And write as many others in ``stream``."""
        self.come(batch)
        for host, tensor in zip(self._host, self._into, strict=True):
            self._device.write([(host, tensor)], np.arange(host.n_rows), stream)


def _gather(
    store: ArrayStore, piece: tuple[Rows, npt.NDArray[Any], Any]
) -> tuple[npt.NDArray[Any], Any]:
    rows, out, there = piece
    store.gather(rows, out)
    return out, there


def nbytes_of(sample: Sample) -> int:
    """Bytes of its rows."""
    return len(sample.rows) * row_nbytes(sample.store)
