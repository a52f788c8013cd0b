"""Rows for the ids of a loader's batches: by hand in the loop, and by ``wrap_loader(fetch=)``."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import PinnedStore, wrap_loader

_DIM = 128
_BY_HAND = "x[ids].to(device)"


class FetchBench:
    """Batches of ids, and the ways to get their rows to the device during a matrix product.

    Args:
        run: The run.
        power: Ids are ``n_rows * u ** power`` for uniform u; 1 for ids that seldom repeat.
    """

    def __init__(self, run: Run, power: float) -> None:
        n_rows, n_ids, n, width = (2_000_000, 65_536, 60, 4096) if run.cuda else (500, 64, 5, 8)
        rng = np.random.default_rng(0)
        self._run = run
        self._rows = rng.standard_normal((n_rows, _DIM), np.float32)
        self._batches = [
            torch.from_numpy((n_rows * rng.random(n_ids) ** power).astype(np.int64))
            for _ in range(n)
        ]
        self._weight = torch.randn(_DIM, width, device=run.device)
        self._folder = tempfile.TemporaryDirectory()
        sources: dict[str, Callable[[], object]] = {
            "fetch, array": lambda: self._rows,
            "fetch, page-locked": lambda: PinnedStore(self._rows, pin="auto"),
            "fetch, file": self._file,
        }
        self._loop = functools.cache(
            lambda name: wrap_loader(
                self._batches, fetch={"x": (sources[name](), lambda ids: ids)}, device=run.device
            )
        )

    def measure(self, name: str) -> Fields:
        """Compare the rows of every batch, then time epochs with a matrix product."""
        for found, ids in zip(self._epoch(name), self._batches, strict=True):
            if not np.array_equal(found.cpu().numpy(), self._rows[ids.numpy()]):
                raise AssertionError(f"'{name}' gives other rows than those of the ids")
        times = []
        for _ in range(3):
            wait(self._run.device)
            begin = time.perf_counter()
            for x in self._epoch(name):
                x @ self._weight
            wait(self._run.device)
            times.append((time.perf_counter() - begin) / len(self._batches))
        distinct = np.mean([len(torch.unique(ids)) / len(ids) for ids in self._batches])
        return {"batch_ms": round(min(times) * 1e3, 4), "distinct_share": round(float(distinct), 3)}

    def _epoch(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows of every batch, on the device."""
        if name == _BY_HAND:
            rows = torch.from_numpy(self._rows)
            for ids in self._batches:
                yield rows[ids].to(self._run.device)
        else:
            for _, got in self._loop(name):
                yield got["x"]

    def _file(self) -> Path:
        path = Path(self._folder.name) / "x.npy"
        np.save(path, self._rows)
        return path


def fetches(run: Run) -> list[Cell]:
    """Return cells of loops with ``fetch``, with ids that repeat often and seldom."""
    benches = {
        "uniform": functools.cache(lambda: FetchBench(run, 1.0)),
        "skewed": functools.cache(lambda: FetchBench(run, 8.0)),
    }
    names = (_BY_HAND, "fetch, array", "fetch, page-locked", "fetch, file")
    return [
        Cell({"ids": ids, "by": name}, functools.partial(_measure, bench, name))
        for ids, bench in benches.items()
        for name in names
    ]


def _measure(bench: Callable[[], FetchBench], name: str) -> Fields:
    return bench().measure(name)
