"""Training rows of a table in host memory with a device cache, and in other ways."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.recorder import Cell, Run
from benchmarks.gpu.tables import Contest, contest_cells
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import CACHED, STEP_ALONE, prefetched

CACHES = {
    f"{CACHED}{share:.0%}": functools.partial(prefetched, cache=share)
    for share in (0.01, 0.05, 0.1, 1.0)
}
"""Contestants with caches that hold shares of the rows, by name."""
_EXPONENTS = (1.05, 1.2)


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
    names = (STEP_ALONE, "prefetch", "synchronous", *CACHES, "SpeedTorch's", "whole table")
    cells = []
    for exponent in _EXPONENTS:
        if run.cuda:
            cell = SkewedCell(128, 32_768, exponent=exponent, table_bytes=512 << 20)
            contest = Contest(cell, run.device, 150, 0.6, 40, 12, CACHES)
        else:
            cell = SkewedCell(16, 1024, exponent=exponent, table_bytes=1 << 20)
            contest = Contest(cell, run.device, 20, 0.1, 10, 12, CACHES)
        cells += contest_cells(contest, names)
    return cells
