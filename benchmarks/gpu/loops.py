"""Small batches that are copied to the device and back, and loops over loaders."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.gpu.small_tensors import small_tensors
from pinfeed import Feeder, PinnedStore, wrap_loader

_ROWS = 1000
_DIM = 3
_CHOSEN = 6
_BATCH = 64
_FEATURES = 3072


def loops(run: Run) -> list[Cell]:
    """Return cells of loops over small batches and over loaders."""
    n_small, n_loader = (300, 200) if run.cuda else (50, 20)
    small = small_batches(run.device, n_small)
    cells = [
        Cell(
            {"what": f"{_CHOSEN} rows of {_DIM} float64, to and back", "by": name},
            functools.partial(_mean_us, way),
        )
        for name, way in small.items()
    ]
    cells += small_tensors(run)
    loaders = functools.cache(lambda: Loaders(run, n_loader))
    for name in ("DataLoader, .to(non_blocking)", "a side stream by hand", "wrap_loader"):
        measure = functools.partial(lambda name: loaders().measure(name), name)
        cells.append(Cell({"what": "a DataLoader's loop", "by": name}, measure))
    return cells


def small_batches(device: str, n: int) -> dict[str, Callable[[], list[float]]]:
    """Return functions that copy short rows to the device and back, and time every batch."""
    values = np.random.default_rng(0).random((_ROWS, _DIM))
    chosen = [np.random.default_rng(i).permutation(_ROWS)[:_CHOSEN] for i in range(n)]

    def by_torch() -> list[float]:
        table = torch.from_numpy(values.copy())
        if device == "cuda":
            table = table.pin_memory()
        times = []
        for numbers in chosen:
            begin = time.perf_counter()
            ids = torch.from_numpy(numbers)
            table[ids] = (table[ids].to(device) + 0).cpu()
            times.append(time.perf_counter() - begin)
        return times

    def by_feeder(depth: int) -> list[float]:
        times = []
        with Feeder(
            PinnedStore(values, pin="auto"), rows=chosen, depth=depth, device=device
        ) as feeder:
            last = time.perf_counter()
            for batch in feeder.batches():
                batch.write_back(batch.data + 0)
                now = time.perf_counter()
                times.append(now - last)
                last = now
        return times

    return {
        "torch, page-locked table": by_torch,
        "pinfeed, depth 0": lambda: by_feeder(0),
        "pinfeed, depth 2": lambda: by_feeder(2),
    }


def _mean_us(way: Callable[[], list[float]]) -> Fields:
    """Return microseconds of a batch. The median of loops with write-backs hides half the time."""
    times = way()
    return {
        "mean_us": round(statistics.fmean(times) * 1e6, 1),
        "median_us": round(statistics.median(times) * 1e6, 1),
    }


class Loaders:
    """A DataLoader whose batches are copied in several ways, in a loop with a matrix product."""

    def __init__(self, run: Run, n: int) -> None:
        self._run = run
        self._device = run.device
        self._n = n
        data = TensorDataset(
            torch.arange(n * _BATCH * _FEATURES, dtype=torch.float32).reshape(n * _BATCH, _FEATURES)
        )
        sampler = BatchSampler(range(len(data)), _BATCH, False)
        self._loader = DataLoader(data, batch_size=None, sampler=sampler, pin_memory=run.cuda)
        self._weight = torch.randn(_FEATURES, 4096 if run.cuda else 64, device=run.device)
        self._ways = {
            "DataLoader, .to(non_blocking)": self._by_hand,
            "a side stream by hand": self._by_side_stream,
            "wrap_loader": self._wrapped,
        }
        self._expected = self._sum(self._by_hand)

    def measure(self, name: str) -> Fields:
        """Compare the sum of all values, then time epochs."""
        if name == "a side stream by hand":
            self._run.require_cuda("a side stream")
        make = self._ways[name]
        found = self._sum(make)
        if found != self._expected:
            raise AssertionError(
                f"'{name}' gives values whose sum is {found}, expected {self._expected}"
            )
        times = []
        for _ in range(3):
            wait(self._device)
            begin = time.perf_counter()
            for x in make():
                x @ self._weight
            wait(self._device)
            times.append((time.perf_counter() - begin) / self._n)
        return {"batch_ms": round(min(times) * 1e3, 4)}

    def _sum(self, make: Callable[[], Iterator[torch.Tensor]]) -> float:
        return float(sum(x.sum(dtype=torch.float64) for x in make()))

    def _by_hand(self) -> Iterator[torch.Tensor]:
        for (x,) in self._loader:
            yield x.to(self._device, non_blocking=True)

    def _wrapped(self) -> Iterator[torch.Tensor]:
        with wrap_loader(self._loader, device=self._device) as batches:
            for (x,) in batches:
                yield x

    @functools.cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _by_side_stream(self) -> Iterator[torch.Tensor]:
        """Copy the next batch in a side stream while the loop works on the current one."""
        later: tuple[torch.Tensor, Any] | None = None
        for (x,) in itertools.chain(self._loader, [(None,)]):
            arrived = later
            if x is not None:
                with torch.cuda.stream(self._side):
                    later = x.to(self._device, non_blocking=True), self._side.record_event()
            if arrived is not None:
                batch, copied = arrived
                torch.cuda.current_stream().wait_event(copied)
                batch.record_stream(torch.cuda.current_stream())
                yield batch
