"""Casting and augmenting batches of images: in the training step, and by ``device_transform``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.bench import wait
from benchmarks.gpu.recorder import Cell, Fields, Run
from benchmarks.programs.program import generator_of_batch
from pinfeed import Feeder

_IN_STEP = "in the training step"
_TRANSFORM = "device_transform"


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a batch of uint8 images as normalized floats, about half of them mirrored."""
    x = images.permute(0, 3, 1, 2).float().sub_(127.5).div_(127.5)
    is_mirrored = torch.rand(len(x), generator=generator, device=x.device) < 0.5
    return torch.where(is_mirrored[:, None, None, None], x.flip(3), x)


class FunctionBench:
    """Epochs over images in host memory that are augmented on the device, with a model or without.

    Args:
        run: The run.
        with_model: Whether a training step follows.
    """

    def __init__(self, run: Run, *, with_model: bool) -> None:
        n, size, batch_size, width = (16_384, 96, 256, 64) if run.cuda else (64, 16, 16, 4)
        images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8)
        self._run = run
        self._images = torch.from_numpy(images).split(batch_size)
        self._model: nn.Module | None = None
        if with_model:
            torch.manual_seed(0)
            self._model = nn.Sequential(
                nn.Conv2d(3, width, 7, 2), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()
            ).to(run.device)
        make = functools.partial(Feeder, images, batch_size=batch_size, device=run.device, depth=2)
        self._feeders = {
            _IN_STEP: make(),
            _TRANSFORM: make(device_transform=augmented, seed=1),
        }

    def measure(self, name: str) -> Fields:
        """Compare the batches of an epoch, then time epochs."""
        expected = (
            self._augmented(batch.to(self._run.device), 0, number)
            for number, batch in enumerate(self._images)
        )
        if not all(map(torch.equal, self._epoch(name, 0), expected)):
            raise AssertionError(f"'{name}' gives other batches than the training step makes")
        times = []
        for epoch in range(1, 4):
            wait(self._run.device)
            begin = time.perf_counter()
            for x in self._epoch(name, epoch):
                if self._model is not None:
                    self._model.zero_grad()
                    self._model(x).square().mean().backward()
            wait(self._run.device)
            times.append((time.perf_counter() - begin) / len(self._images))
        return {"batch_ms": round(min(times) * 1e3, 4)}

    def _epoch(self, name: str, epoch: int) -> Iterator[torch.Tensor]:
        """Yield the augmented batches of an epoch."""
        feeder = self._feeders[name]
        if name == _TRANSFORM:
            feeder.set_epoch(epoch)
            yield from feeder
            return
        for number, batch in enumerate(feeder):
            yield self._augmented(batch, epoch, number)

    def _augmented(self, batch: torch.Tensor, epoch: int, number: int) -> torch.Tensor:
        """Return the batch after ``device_transform``."""
        return augmented(batch, generator_of_batch(1, epoch, number, str(self._run.device)))


def transforms(run: Run) -> list[Cell]:
    """Return cells of loops with a ``device_transform``, with a model and without."""
    benches = {
        with_model: functools.cache(functools.partial(FunctionBench, run, with_model=with_model))
        for with_model in (True, False)
    }
    return [
        Cell({"by": name, "model": with_model}, functools.partial(_measure, bench, name))
        for with_model, bench in benches.items()
        for name in (_IN_STEP, _TRANSFORM)
    ]


def _measure(bench: Callable[[], FunctionBench], name: str) -> Fields:
    return bench().measure(name)
