"""Forecasting of a multivariate time series: windows of inputs, and of the targets after them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step


@dataclass(frozen=True)
class Size:
    """Sizes of the series, of the windows and of a batch."""

    n_times: int
    n_series: int
    n_inputs: int
    n_targets: int
    batch_size: int
    n_batches: int
    n_steps: int


# The full size is that of the "electricity" dataset: hourly values of 321 customers.
SIZES = {
    "full": Size(26_304, 321, 96, 24, 32, 300, 60),
    "quick": Size(5000, 100, 96, 24, 32, 100, 30),
    "tiny": Size(300, 4, 12, 3, 16, 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the series: a row for each time."""
    series = np.random.default_rng(0).standard_normal((size.n_times, size.n_series), np.float32)
    np.save(folder / "series.npy", series)


class Windows(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Inputs and targets for each start.

    Args:
        path: Path of the series.
        size: Lengths of the windows.
    """

    def __init__(self, path: Path, size: Size) -> None:
        self.series = np.load(path)
        self.n_inputs = size.n_inputs
        self.n_targets = size.n_targets

    def __len__(self) -> int:
        return len(self.series) - self.n_inputs - self.n_targets + 1

    def __getitem__(self, begin: int) -> tuple[np.ndarray, np.ndarray]:
        middle = begin + self.n_inputs
        return self.series[begin:middle], self.series[middle : middle + self.n_targets]


def original(folder: Path, size: Size, step: Step, n_workers: int = 0) -> None:
    """Slice single windows, and stack them into batches."""
    dataset = Windows(folder / "series.npy", size)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))
    loader = DataLoader(dataset, size.batch_size, sampler=sampler, num_workers=n_workers)
    for x, y in loader:
        step(x.to(DEVICE), y.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass two sources with the same starts."""
    windows = functools.partial(
        pinfeed.NpyStore.windows, folder / "series.npy", span=size.n_inputs + size.n_targets
    )
    with (
        windows(length=size.n_inputs) as inputs,
        windows(length=size.n_targets, start=size.n_inputs) as targets,
    ):
        begins = range(inputs.n_rows)
        sampler = RandomSampler(begins, generator=torch.Generator().manual_seed(SEED))
        rows = BatchSampler(sampler, size.batch_size, drop_last=False)
        with pinfeed.Feeder((inputs, targets), rows=rows, device=DEVICE) as feeder:
            for x, y in feeder:
                step(x, y)


def make_step(size: Size) -> Step:
    """Return a training step of a linear model over time with Adam."""
    torch.manual_seed(0)
    model = nn.Linear(size.n_inputs, size.n_targets)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last = x[:, -1:]
        predicted = model((x - last).transpose(1, 2)).transpose(1, 2) + last
        loss = nn.functional.mse_loss(predicted, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Forecasting",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader": original,
        "DataLoader, 2 workers": functools.partial(original, n_workers=2),
        OURS: moved,
    },
    make_step=make_step,
    original=(Windows, original),
    moved=(moved,),
)
