"""Launches of the kernels that copy rows, for a profiler: ``python -m benchmarks.gpu.launches``."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.bench import Bench, as_rows
from pinfeed.stores.host_rows import StoreRows, part_nbytes

_ROW_BYTES = 512


class Launches:
    """Launches with rows of a page-locked table, in random order.

    Args:
        device: ``cuda`` or ``cpu``.
        nbytes: Size of the table.
        n_rows: Rows of a batch.
    """

    def __init__(self, device: str, nbytes: int = 1 << 30, n_rows: int = 65_536) -> None:
        self.bench = Bench(device)
        store = as_rows(self.bench.words(nbytes), _ROW_BYTES)
        self._sample = StoreRows(store, np.random.default_rng(0).permutation(store.n_rows)[:n_rows])
        self._into = self.bench.room(self._sample)
        self.nbytes = part_nbytes(self._sample)

    def launch(self, n_blocks: int, n_times: int = 3) -> None:
        """Gather and scatter, one after the other."""
        self.bench.use_route(n_blocks)
        for _ in range(n_times):
            self.bench.gather(self._sample, self._into)
            self.bench.read.record().sync()
            self.bench.scatter(self._sample, self._into)
            self.bench.write.record().sync()


if __name__ == "__main__":
    Launches("cuda").launch(8)
