"""Training rows of a table in host memory with a device cache, and in other ways."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import DIRECTIONS, Ceilings
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.tables import Contest, contest_cells
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import CACHED, STEP_ALONE, prefetched

CACHES = {
    f"{CACHED}{share:.0%}": functools.partial(prefetched, cache=share)
    for share in (0.01, 0.05, 0.1, 1.0)
}
"""Contestants with caches that hold shares of the rows, by name."""
_EXPONENTS = (1.05, 1.2)
# With 128 floats a row, the 12,270 distinct rows of a batch and their state are 19 MB. The link
# copies them faster than the readers work, so a cache can hardly help. With 1,024 floats, they are
# 130 to 150 MB.
_DIMS = (1024, 128)
# The contestants that decide whether a cache helps are first.
_NAMES = tuple(
    dict.fromkeys(
        (
            STEP_ALONE,
            "prefetch",
            "cache of 10%",
            "whole table",
            "synchronous",
            *CACHES,
            "SpeedTorch's",
        )
    )
)


@dataclass(frozen=True)
class SkewedCell(RowCell):
    """A table whose row lookups follow Zipf's law.

    Args:
        repeated: Not used, because the law determines how many ids repeat.
        exponent: Exponent of the law.
    """

    repeated: float = 0.0
    exponent: float = 1.05

    def __str__(self) -> str:
        return f"{self.n_rows:,} rows of {4 * self.dim} B, {self.n_ids} ids, Zipf({self.exponent})"

    def batches(self, n: int) -> list[torch.Tensor]:
        """Return the ids of each batch, int64, shape (n_ids,), the same at every call."""
        rng = np.random.default_rng(0)
        frequencies = np.arange(1, self.n_rows + 1) ** -self.exponent
        # The frequent rows are scattered over the table.
        rows = rng.permutation(self.n_rows)
        drawn = rng.choice(rows, (n, self.n_ids), p=frequencies / frequencies.sum())
        return list(torch.from_numpy(drawn))


def caches(run: Run) -> list[Cell]:
    """Return cells of steps with caches of several sizes, without one, and by other ways.

    The caches fill in the steps before those that are timed. Each loss of a loop with a cache must
    equal that of the loop without one, bit for bit.
    """
    rates: dict[str, float] = {}
    cells = [Cell({"what": "link"}, functools.partial(_link, run, rates))]
    contests = []
    for exponent, dim in itertools.product(_EXPONENTS if run.cuda else _EXPONENTS[:1], _DIMS):
        if run.cuda:
            # A step takes longer with longer rows, and a larger table takes longer to make.
            n_steps, nbytes = (60, 1 << 30) if dim > 128 else (150, 512 << 20)
            cell = SkewedCell(dim, 32_768, exponent=exponent, table_bytes=nbytes)
            contests.append(Contest(cell, run.device, n_steps, 0.6, 40, 12, CACHES, rates))
        else:
            cell = SkewedCell(dim // 8, 1024, exponent=exponent, table_bytes=dim << 13)
            contests.append(Contest(cell, run.device, 20, 0.1, 10, 12, CACHES, rates))
    for model, contest in itertools.product(("small", "large"), contests):
        cells += contest_cells(contest, _NAMES, (model,))
    return cells


def _link(run: Run, rates: dict[str, float]) -> Fields:
    """Measure the copy engine in each direction, for the time that the link needs for a step."""
    bench = Bench(run.device)
    limits = Ceilings(bench, bench.words((512 << 20) if run.cuda else (8 << 20)))
    rates |= {direction: limits.engine(direction) for direction in DIRECTIONS[:2]}
    return {"gb_per_s": dict(rates)}
