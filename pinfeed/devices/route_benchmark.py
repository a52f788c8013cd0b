"""Measurement of the routes between page-locked stores and a GPU."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.route import Rates, Route, fewest_blocks
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import Gatherable, StoreRows, part_nbytes, row_nbytes
from pinfeed.stores.pinned import PinnedStore
from pinfeed.threads.pool import ThreadPool

BLOCKS = (4, 8, 16, 32)
"""Numbers of blocks with which the kernels are timed."""
_SAMPLE_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10
_REPEATS = 3
# Reader threads of a loop with the default depth.
_N_READERS = min(3, len(os.sched_getaffinity(0)))


def measure(device: Any, stores: Sequence[ArrayStore], n_rows: int) -> Rates:
    """Time each route, in some tens of milliseconds in all.

    The stores are only read: what is written goes to memory that is allocated here.

    Args:
        device: A CudaDevice that is not used for anything else.
        stores: Page-locked stores.
        n_rows: Rows of a batch.
    """
    with ThreadPool(_N_READERS, "pinfeed-tuning") as readers:
        trial = _Trial(device, stores, n_rows)
        staged = trial.rate(functools.partial(trial.stage, readers))
        direct = {}
        for n_blocks in BLOCKS:
            device.route = Route(n_blocks, True, "")
            direct[n_blocks] = trial.rate(trial.gather)
        device.route = Route(fewest_blocks(direct), True, "")
        both = 2 * trial.rate(functools.partial(trial.gather_and_scatter, trial.write_stream))
        in_turn = 2 * trial.rate(functools.partial(trial.gather_and_scatter, trial.read_stream))
    return Rates(direct, staged, both, in_turn)


class _Trial:
    """Batches that are moved to be timed; each has other rows, which no cache holds yet."""

    def __init__(self, device: Any, stores: Sequence[ArrayStore], n_rows: int) -> None:
        self._device = device
        rng = np.random.default_rng(0)
        n = max(1, min(n_rows, _SAMPLE_BYTES // sum(map(row_nbytes, stores))))
        self._batches = []
        for _ in range(1 + _REPEATS):
            chosen = {
                n_all: rng.integers(n_all, size=n) for n_all in {store.n_rows for store in stores}
            }
            self._batches.append([StoreRows(store, chosen[store.n_rows]) for store in stores])
        first = self._batches[0]
        current = device.current_stream()
        self._gb = sum(map(part_nbytes, first)) / 1e9
        self._tensors = [
            device.tensor(device.empty(part_nbytes(sample), current), sample.shape, sample.dtype)
            for sample in first
        ]
        self._host = [PinnedStore.empty(sample.shape, sample.dtype) for sample in first]
        self.read_stream = device.stream("read")
        self.write_stream = device.stream("write")
        # Work of the current stream may still use the memory.
        self.read_stream.wait(current.record())
        self.write_stream.wait(current.record())

    def rate(self, move: Callable[[Sequence[StoreRows]], object]) -> float:
        """Return GB/s of the fastest batch.

        The first batch is not timed, because code is loaded in it.
        """
        times = []
        for batch in self._batches:
            begin = time.perf_counter()
            move(batch)
            self.read_stream.record().sync()  # the rows may not have arrived yet: they are timed
            self.write_stream.record().sync()  # as above, for rows that are written
            times.append(time.perf_counter() - begin)
        return self._gb / min(times[1:])

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
        """Let kernels read the rows."""
        pairs = list(zip(batch, self._tensors, strict=True))
        deque(self._device.read(pairs, self.read_stream), maxlen=0)

    def gather_and_scatter(self, stream: Any, batch: Sequence[StoreRows]) -> None:
        """Let kernels read the rows, and write as many other rows in ``stream``."""
        self.gather(batch)
        for host, tensor in zip(self._host, self._tensors, strict=True):
            self._device.write([(host, tensor)], np.arange(host.n_rows), stream)


def _gather(
    store: Gatherable, chunk: tuple[Rows, npt.NDArray[Any], Any]
) -> tuple[npt.NDArray[Any], Any]:
    rows, out, target = chunk
    store.gather(rows, out)
    return out, target
