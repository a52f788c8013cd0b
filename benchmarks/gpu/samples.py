"""Samples made in threads and by worker processes, and the pause between epochs."""

from __future__ import annotations

import functools
import multiprocessing
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from pinfeed import wrap_dataset, wrap_loader

_FORK = multiprocessing.get_context("fork")
_WRAPPED = ("wrap_dataset", "wrap_dataset, continuous=False", "wrap_loader, threads")


class CompressedImages(Dataset[torch.Tensor]):
    """Compressed uint8 images, which take about a millisecond to decode without Python's lock.

    Args:
        n: Number of images.
        size: Pixels of a side.
    """

    def __init__(self, n: int, size: int) -> None:
        rng = np.random.default_rng(0)
        self._shape = (3, size, size)
        pixels = rng.integers(0, 16, (64, *self._shape), np.uint8)
        distinct = [zlib.compress(image.tobytes(), 1) for image in pixels]
        self._images = [distinct[i % len(distinct)] for i in range(n)]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, i: int) -> torch.Tensor:
        data = bytearray(zlib.decompress(self._images[i]))
        return torch.frombuffer(data, dtype=torch.uint8).view(self._shape).add(i % 251)


class SampleBench:
    """Epochs over compressed images on the device.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        n, size, self._batch_size = (8192, 224, 128) if run.cuda else (64, 16, 8)
        self._run = run
        self._images = CompressedImages(n, size)
        self._n_threads = 8 if run.cuda else 2

    def measure(self, name: str) -> Fields:
        """Compare the sums of all batches of an epoch, then time epochs and their first batches."""
        loader = DataLoader(self._images, self._batch_size)
        expected = [int(batch.long().sum()) for batch in loader]
        epoch = self._epochs(name)
        if [int(batch.long().sum()) for batch in next(epoch)] != expected:
            raise AssertionError(f"'{name}' gives other batches than the DataLoader")
        times, firsts = [], []
        for batches in (next(epoch) for _ in range(3)):
            begin = time.perf_counter()
            for i, batch in enumerate(batches):
                if i == 0:
                    firsts.append(time.perf_counter() - begin)
                batch.float().mean()
            wait(self._run.device)
            times.append(time.perf_counter() - begin)
        return {
            "images_per_s": round(len(self._images) / min(times)),
            "first_batch_ms": round(min(firsts) * 1e3, 3),
        }

    def _epochs(self, name: str) -> Iterator[Iterator[torch.Tensor]]:
        """Yield the batches of epoch after epoch."""
        device = self._run.device
        if name not in _WRAPPED:
            loader = DataLoader(
                self._images,
                self._batch_size,
                num_workers=self._n_threads,
                persistent_workers=True,
                pin_memory=self._run.cuda,
            )
            while True:
                yield (batch.to(device, non_blocking=True) for batch in loader)
        if name == "wrap_loader, threads":
            plain = DataLoader(self._images, self._batch_size)
            feeder = wrap_loader(plain, threads=self._n_threads, device=device)
        else:
            feeder = wrap_dataset(
                self._images,
                batch_size=self._batch_size,
                threads=self._n_threads,
                device=device,
                continuous=None if name == "wrap_dataset" else False,
            )
        with feeder:
            while True:
                yield iter(feeder)


def samples(run: Run) -> list[Cell]:
    """Return a cell for each way of making samples."""
    bench = functools.cache(functools.partial(SampleBench, run))
    names = (*_WRAPPED, "DataLoader with workers, .to(non_blocking)")
    cells = [Cell({"by": name}, functools.partial(_measure, bench, name)) for name in names]
    counts = (1, 8, 14) if run.cuda else (1, 2)
    bare = [
        Cell({"by": by, "n": n}, functools.partial(_decoded, run, made, n))
        for n in counts
        for by, made in (("bare threads", threading.Thread), ("bare processes", _FORK.Process))
    ]
    return [*cells, *bare]


def _decoded(run: Run, made: Callable[..., Any], n: int) -> Fields:
    """Return the images that ``n`` threads or processes decode in a second, without pinfeed.

    If threads are as much slower than processes here, the cause is the interpreter's lock.
    """
    images = CompressedImages(2048 if run.cuda else 64, 224 if run.cuda else 16)
    # Processes inherit it.
    torch.set_num_threads(1)

    def work(first: int) -> None:
        for i in range(first, len(images), n):
            images[i]

    workers = [made(target=work, args=(first,)) for first in range(n)]
    begin = time.perf_counter()
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    return {"images_per_s": round(len(images) / (time.perf_counter() - begin))}


def _measure(bench: functools._lru_cache_wrapper[SampleBench], name: str) -> Fields:
    return bench().measure(name)
