"""Batches of many small tensors: the time of a batch, and what it costs the process."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import wrap_loader

_N_TENSORS = 40
_TENSOR_BYTES = 8192
_N_WARM = 20
_N_REPEATS = 3

NAMES = ("wrap_loader", ".to(non_blocking) of each tensor", "one cat, copy and split")

Batch = dict[str, torch.Tensor]
Batches = Callable[[], contextlib.AbstractContextManager[Iterable[Batch]]]


def small_tensors(run: Run) -> list[Cell]:
    """Return cells of batches of 40 tensors of 8 KB, and of one tensor of the same size."""
    n = 500 if run.cuda else 50
    cells = []
    for pinned in (False, True):
        for n_tensors in (_N_TENSORS, 1):
            made = functools.cache(functools.partial(SmallTensors, run, n_tensors, pinned, n))
            for name in NAMES:
                key = {
                    "what": "a dict of small tensors",
                    "tensors": n_tensors,
                    "batch_nbytes": _N_TENSORS * _TENSOR_BYTES,
                    "pinned": pinned,
                    "by": name,
                }
                measure = functools.partial(lambda made, name: made().measure(name), made, name)
                cells.append(Cell(key, measure))
    return cells


class SmallTensors:
    """Batches on the host, and loops that copy them.

    Args:
        run: Arguments of the part.
        n_tensors: Tensors of a batch.
        pinned: Whether the loader's batches are page-locked, as with ``pin_memory=True``.
        n: Batches of an epoch.
    """

    def __init__(self, run: Run, n_tensors: int, pinned: bool, n: int) -> None:
        if pinned:
            run.require_cuda("page-locked memory of torch")
        self._device = run.device
        numel = _N_TENSORS * _TENSOR_BYTES // 4 // n_tensors
        some = [
            {
                f"tensor_{j}": torch.full((numel,), float(i + j), pin_memory=pinned)
                for j in range(n_tensors)
            }
            for i in range(8)
        ]
        self._loader = [some[i % len(some)] for i in range(_N_WARM + n)]
        self._numel = numel
        ways: tuple[Batches, ...] = (
            lambda: wrap_loader(self._loader, device=self._device),
            lambda: contextlib.nullcontext(self._by_hand()),
            lambda: contextlib.nullcontext(self._by_one_copy()),
        )
        self._ways = dict(zip(NAMES, ways, strict=True))

    def measure(self, name: str) -> Fields:
        """Compare all values with those of the loader, then time epochs without a step.

        ``host_us`` is CPU time of the consumer thread, ``process_us`` that of all threads.
        """
        make = self._ways[name]
        with make() as batches:
            for found, expected in zip(batches, self._loader, strict=True):
                if not all(torch.equal(found[key].cpu(), expected[key]) for key in expected):
                    raise AssertionError(f"'{name}' gives other values than the loader")
        times = [self._epoch(make) for _ in range(_N_REPEATS)]
        names = ("batch_us", "host_us", "process_us")
        return {
            name: round(statistics.median(column) * 1e6, 1)
            for name, column in zip(names, zip(*times, strict=True), strict=True)
        }

    def _epoch(self, make: Batches) -> tuple[float, float, float]:
        """Return seconds of a batch: of the clock, of this thread, and of all threads."""
        with make() as loop:
            batches = iter(loop)
            for _ in range(_N_WARM):
                next(batches)
            wait(self._device)
            begin = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in batches:
                pass
            wait(self._device)
            end = time.perf_counter(), time.thread_time(), time.process_time()
        n = len(self._loader) - _N_WARM
        wall, thread, process = ((b - a) / n for a, b in zip(begin, end, strict=True))
        return wall, thread, process

    def _by_hand(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield {name: x.to(self._device, non_blocking=True) for name, x in batch.items()}

    def _by_one_copy(self) -> Iterator[Batch]:
        """Copy the tensors into one page-locked block, and that to the device."""
        pinned = self._device == "cuda"
        blocks = [torch.empty(_N_TENSORS * _TENSOR_BYTES // 4, pin_memory=pinned) for _ in range(4)]
        copied = [torch.cuda.Event() for _ in blocks] if pinned else []
        for i, batch in enumerate(self._loader):
            block = blocks[i % len(blocks)]
            if pinned:
                # The copy of an earlier batch may still read the block.
                copied[i % len(blocks)].synchronize()
            torch.cat(list(batch.values()), out=block)
            there = block.to(self._device, non_blocking=True, copy=True)
            if pinned:
                copied[i % len(blocks)].record()
            yield dict(zip(batch, torch.split(there, self._numel), strict=True))
