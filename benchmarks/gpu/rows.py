"""Copying rows of page-locked tables to the device and back, compared with the link."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, as_rows, expected_rows, rate, wait
from benchmarks.gpu.link import Ceilings
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.memory import free
from pinfeed import PinnedStore
from pinfeed.stores.base import StoreRows, part_nbytes

_TABLE_GB = (8, 32, 1)
_SIZES = (512, 4096, 64, 128, 256, 1024, 16_384, 65_536)
_COUNTS = (65_536, 8192, 1 << 20, 1000)
_MOST_BYTES = 512 << 20
_QUEUED_BYTES = 1 << 30
_N_CHECKED = 200
# The blocks of the kernels if the ceilings could not be measured.
_N_BLOCKS = 8


@dataclass
class Sweep:
    """State that the cells share: the device, the ceilings, and one table at a time."""

    device: str
    limits: dict[str, float] = field(default_factory=dict)
    memory: PinnedStore | None = None
    gb: float = 0.0

    @functools.cached_property
    def bench(self) -> Bench:
        return Bench(self.device)

    def ceilings(self) -> Fields:
        """Measure the ceilings that the rows are compared with."""
        self.limits = Ceilings(self.bench, (256 << 20) if self.bench.cuda else (8 << 20)).few()
        return dict(self.limits)

    def table(self, gb: float, row_nbytes: int) -> PinnedStore:
        """Return a table of a size. A table of another size is freed first."""
        if self.memory is None or self.gb != gb:
            self.memory = None
            free()
            self.memory = self.bench.words(int(gb * 1e9))
            self.gb = gb
        return as_rows(self.memory, row_nbytes)

    def moved(self, gb: float, row_nbytes: int, count: int, order: str) -> Fields:
        """Check a gather and a scatter of one batch, then time them."""
        store = self.table(gb, row_nbytes)
        rng = np.random.default_rng(0)
        chosen = np.unique(rng.integers(store.n_rows, size=count))
        numbers = chosen if order == "sorted" else rng.permutation(chosen)
        sample = StoreRows(store, numbers)
        into = self.bench.room(sample)
        self.bench.use_blocks(int(self.limits.get("n_blocks", _N_BLOCKS)))
        check(self.bench, sample, into)
        nbytes = part_nbytes(sample)
        n_queued = max(1, min(8, _QUEUED_BYTES // nbytes))
        found: Fields = {"n_rows": len(numbers)}
        for way, work in (("gather", self.bench.gather), ("scatter", self.bench.scatter)):
            once = functools.partial(work, sample, into)
            reached = rate(nbytes, self.bench.queued_s(once, n_queued))
            found[f"{way}_gb_per_s"] = reached
            found[f"{way}_alone_us"] = round(self.bench.latency_s(once) * 1e6, 1)
            for ceiling in ("kernel", "copy_engine"):
                if limit := self.limits.get(f"{way}_{ceiling}"):
                    found[f"{way}_to_{ceiling}"] = round(reached / limit, 3)
        return found


def sweep(run: Run) -> list[Cell]:
    """Return cells of gathers and scatters by row size, batch, table and order."""
    shared = Sweep(run.device)
    cells = [Cell({"what": "ceilings"}, shared.ceilings)]
    tables = _TABLE_GB if run.cuda else (0.05,)
    sizes = _SIZES if run.cuda else (64, 512)
    counts = _COUNTS if run.cuda else (8192,)
    seen = set()
    for gb, order, count, row_nbytes in itertools.product(
        tables, ("random", "sorted"), counts, sizes
    ):
        capped = min(count, _MOST_BYTES // row_nbytes)
        key = {
            "what": "rows",
            "table_gb": gb,
            "row_nbytes": row_nbytes,
            "count": capped,
            "order": order,
        }
        # Several counts may be limited to the same one.
        if str(key) not in seen and capped <= int(gb * 1e9) // row_nbytes:
            seen.add(str(key))
            cells.append(Cell(key, functools.partial(shared.moved, gb, row_nbytes, capped, order)))
    return cells


def check(bench: Bench, sample: StoreRows, into: torch.Tensor) -> None:
    """Gather rows and scatter other values, and restore the table.

    Raises:
        AssertionError: If rows are wrong on the device or in the table.
    """
    row_nbytes = part_nbytes(sample) // len(sample.rows)
    some = np.unique(np.linspace(0, len(sample.rows) - 1, _N_CHECKED).astype(np.int64))
    expected = expected_rows(sample.rows[some], row_nbytes)
    bench.gather(sample, into)
    bench.read.record().sync()
    if not np.array_equal(into[torch.from_numpy(some)].cpu().numpy(), expected):
        raise AssertionError(f"{len(sample.rows)} gathered rows of {row_nbytes} bytes are wrong")
    for change in (1, -1):
        into += change
        wait(bench.device.name)
        bench.scatter(sample, into)
        bench.write.record().sync()
        if not np.array_equal(sample.store.array[sample.rows[some]], expected + (change == 1)):
            raise AssertionError(
                f"{len(sample.rows)} scattered rows of {row_nbytes} bytes are wrong"
            )
