"""Copying rows of page-locked tables to the device and back, compared with the link."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu.bench import (
    Bench,
    Samples,
    as_rows,
    compare,
    expected_rows,
    first_part,
    rate,
    some_of,
    wait,
)
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.conditions import gpu_state
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.memory import free
from pinfeed import PinnedStore
from pinfeed.stores.host_rows import StoreRows, part_nbytes

# Both smaller tables are parts of one memory. The largest one takes the longest to make.
_TABLE_GB = (8, 1, 32)
_FIRST_SIZES = (512, 4096, 64, 128, 256, 65_536)
_FIRST_COUNT = 65_536
_SIZES = (512, 4096, 64, 128, 256, 1024, 16_384, 65_536)
_COUNTS = (65_536, 8192, 1 << 20, 1000)
_MOST_BYTES = 512 << 20
_QUEUED_BYTES = 1 << 30
_N_SAMPLES = 4
# The blocks of the kernels if the ceilings could not be measured.
_N_BLOCKS = 8


@dataclass
class Sweep:
    """State that the cells share: the device, the ceilings of each table, and the memory."""

    device: str
    limits: dict[float, dict[str, float]] = field(default_factory=dict)
    memory: PinnedStore | None = None

    @functools.cached_property
    def bench(self) -> Bench:
        return Bench(self.device)

    def table(self, gb: float) -> PinnedStore:
        """Return the words of a table of a size: a part of the memory, or new and larger memory."""
        nbytes = int(gb * 1e9)
        if self.memory is None or self.memory.array.nbytes < nbytes - 8:
            self.memory = None
            free()
            self.memory = self.bench.words(nbytes)
        return first_part(self.memory, nbytes)

    def ceilings(self, gb: float) -> Fields:
        """Measure the ceilings that the rows of a table are compared with."""
        limits = Ceilings(self.bench, self.table(gb))
        self.limits[gb] = limits.few()
        return {**self.limits[gb], "conditions": limits.conditions()}

    def moved(self, gb: float, row_nbytes: int, count: int, order: str) -> Fields:
        """Check a gather and a scatter of one batch, then time them, each time on other rows.

        The conditions of large batches of random rows are recorded, too.
        """
        store = as_rows(self.table(gb), row_nbytes)
        rng = np.random.default_rng(0)
        drawn = [np.unique(rng.integers(store.n_rows, size=count)) for _ in range(_N_SAMPLES)]
        n = min(map(len, drawn))
        # Equally many of each sample, and not only those with the smallest row indices.
        chosen = [rng.permutation(rows)[:n] for rows in drawn]
        samples = [StoreRows(store, np.sort(c) if order == "sorted" else c) for c in chosen]
        nbytes = part_nbytes(samples[0])
        limits = self.limits.get(gb, {})
        self.bench.use_route(int(limits.get("n_blocks", _N_BLOCKS)))
        check(self.bench, samples[0], self.bench.room(samples[0]))
        several = Samples(self.bench, samples[: max(1, _QUEUED_BYTES // nbytes)])
        n_queued = max(1, min(8, _QUEUED_BYTES // nbytes))
        found: Fields = {"n_rows": n}
        for way, once in (("gather", several.gather), ("scatter", several.scatter)):
            reached = rate(nbytes, self.bench.queued_s(once, n_queued))
            found[f"{way}_gb_per_s"] = reached
            found[f"{way}_alone_us"] = round(self.bench.latency_s(once) * 1e6, 1)
            for ceiling in ("kernel", "copy_engine"):
                if limit := limits.get(f"{way}_{ceiling}"):
                    found[f"{way}_to_{ceiling}"] = round(reached / limit, 3)
        if order == "random" and count == min(_FIRST_COUNT, _MOST_BYTES // row_nbytes):
            found["conditions"] = gpu_state(lambda: self.bench.latency_s(several.gather))
        return found


def sweep(run: Run) -> list[Cell]:
    """Return cells of gathers and scatters by row size, batch, table and order.

    The ceilings of each table, and large batches of random rows of some sizes, are first.
    """
    shared = Sweep(run.device)
    cells = []
    seen = set()
    for gb, row_nbytes, count, order in _combinations(run.cuda):
        if gb not in seen:
            seen.add(gb)
            key: Fields = {"what": "ceilings", "table_gb": gb}
            cells.append(Cell(key, functools.partial(shared.ceilings, gb)))
        capped = min(count, _MOST_BYTES // row_nbytes)
        key = {
            "what": "rows",
            "table_gb": gb,
            "row_nbytes": row_nbytes,
            "count": capped,
            "order": order,
        }
        # Several counts may be limited to the same one.
        if str(key) not in seen:
            seen.add(str(key))
            cells.append(Cell(key, functools.partial(shared.moved, gb, row_nbytes, capped, order)))
    return cells


def _combinations(cuda: bool) -> Iterator[tuple[float, int, int, str]]:
    """Yield the table in GB, the bytes of a row, the number of rows, and their order."""
    if not cuda:
        yield from itertools.product((0.05, 0.01), (64, 512), (8192,), ("random", "sorted"))
        return
    yield from itertools.product(_TABLE_GB, _FIRST_SIZES, (_FIRST_COUNT,), ("random",))
    for gb, order, count in itertools.product(_TABLE_GB, ("random", "sorted"), _COUNTS):
        for row_nbytes in _SIZES:
            yield gb, row_nbytes, count, order


def check(bench: Bench, sample: StoreRows, into: torch.Tensor) -> None:
    """Gather rows and scatter other values, and restore the table.

    Raises:
        AssertionError: If rows are wrong on the device or in the table.
    """
    bench.gather(sample, into)
    bench.read.record().sync()
    compare(sample, into)
    row_nbytes = part_nbytes(sample) // len(sample.rows)
    some = some_of(sample.rows)
    expected = expected_rows(sample.rows[some], row_nbytes)
    for change in (1, -1):
        into += change
        wait(bench.device.name)
        bench.scatter(sample, into)
        bench.write.record().sync()
        if not np.array_equal(sample.store.array[sample.rows[some]], expected + (change == 1)):
            raise AssertionError(
                f"{len(sample.rows)} scattered rows of {row_nbytes} bytes are wrong"
            )
