"""Time series: windows of inputs, and of the targets that follow them.

Both stores have the same number of rows, because a row of either needs ``span`` time steps. The
order, the batches and the losses are those of a Dataset that slices the series. Several files are
several series, and no window crosses from one to the next.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import pinfeed

N_INPUTS = 96
N_TARGETS = 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Windows(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Inputs and targets for each start: the original dataset."""

    def __init__(self, path: Path) -> None:
        self.series = np.load(path)

    def __len__(self) -> int:
        return len(self.series) - N_INPUTS - N_TARGETS + 1

    def __getitem__(self, begin: int) -> tuple[np.ndarray, np.ndarray]:
        middle = begin + N_INPUTS
        return self.series[begin:middle], self.series[middle : middle + N_TARGETS]


def train(batches: Iterable[list[torch.Tensor]]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(N_INPUTS, N_TARGETS).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for x, y in batches:
        predicted = model(x.to(DEVICE).transpose(1, 2)).transpose(1, 2)
        loss = nn.functional.mse_loss(predicted, y.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(n_times: int = 5000, n_series: int = 7) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "series.npy"
        np.save(path, rng.standard_normal((n_times, n_series), np.float32).cumsum(0))
        dataset = Windows(path)
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
        expected = train(DataLoader(dataset, batch_size=32, sampler=sampler))

        span = N_INPUTS + N_TARGETS
        inputs = pinfeed.NpyStore.windows(path, length=N_INPUTS, span=span)
        targets = pinfeed.NpyStore.windows(path, length=N_TARGETS, start=N_INPUTS, span=span)
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
        rows = BatchSampler(sampler, 32, drop_last=False)
        with inputs, targets, pinfeed.Feeder((inputs, targets), rows=rows) as feeder:
            assert inputs.n_rows == targets.n_rows == len(dataset)
            assert train(feeder) == expected
            print(f"{len(expected)} losses, equal to those of a Dataset of windows")


if __name__ == "__main__":
    main()
