"""A network on 40 columns of Parquet files, as tabular programs read them with pandas."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

FEATURES = [f"x{number}" for number in range(40)]
N_FILES = 3


@dataclass(frozen=True)
class Size:
    """Sizes of the files and of a batch."""

    n_rows: int
    group_rows: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(102_400, 10_000, 1024, 900, 100),
    "quick": Size(20_480, 5_000, 1024, 180, 30),
    "tiny": Size(40, 15, 8, 30, 4),
}


def prepare(folder: Path, size: Size) -> None:
    """Write files of features, some of which are missing, and of labels."""
    rng = np.random.default_rng(0)
    n = size.n_rows
    for number in range(N_FILES):
        columns = {
            name: pa.array(rng.normal(size=n).astype("float32"), mask=rng.random(n) < 0.01)
            for name in FEATURES
        }
        table = pa.table({**columns, "y": rng.integers(2, size=n)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=size.group_rows)


def original(folder: Path, size: Size, step: Step) -> None:
    """Read all files into a frame, convert it, and batch its rows with a loader."""
    frame = pd.concat([pd.read_parquet(path) for path in sorted(folder.glob("part-*.parquet"))])
    x = torch.tensor(frame[FEATURES].fillna(0).to_numpy(np.float32))
    y = torch.tensor(frame["y"].to_numpy())
    data = TensorDataset(x, y)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(SEED))
    loader = DataLoader(data, batch_size=size.batch_size, sampler=sampler)
    for _ in itertools.count():
        for inputs, targets in loader:
            step(inputs.to(DEVICE), targets.to(DEVICE))


def whole_batches(folder: Path, size: Size, step: Step) -> None:
    """Read all files into tensors, and index them with the rows of a batch."""
    table = pq.read_table(sorted(folder.glob("part-*.parquet")))
    x = np.empty((table.num_rows, len(FEATURES)), np.float32)
    for number, name in enumerate(FEATURES):
        x[:, number] = table[name].fill_null(0).to_numpy()
    inputs = torch.from_numpy(x)
    targets = torch.from_numpy(table["y"].to_numpy().copy())
    del table
    sampler = RandomSampler(inputs, generator=torch.Generator().manual_seed(SEED))
    for _ in itertools.count():
        for rows in torch.tensor(list(sampler)).split(size.batch_size):
            step(inputs[rows].to(DEVICE), targets[rows].to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the columns of all files as a matrix."""
    files = str(folder / "part-*.parquet")
    x = pinfeed.ParquetStore(files, columns=FEATURES, dtype="float32", missing=0)
    y = pinfeed.ParquetStore(files, "y")
    sampler = RandomSampler(range(x.n_rows), generator=torch.Generator().manual_seed(SEED))
    with pinfeed.Feeder((x, y), batch_size=size.batch_size, rows=sampler, device=DEVICE) as feeder:
        for _ in itertools.count():
            for inputs, targets in feeder:
                step(inputs, targets)


class Model(nn.Module):
    """Residual layers for tabular data, with a normalized input."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(len(FEATURES)), nn.Linear(len(FEATURES), width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(2)
        )
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def make_step(_: Size) -> Step:
    """Return a training step with AdamW."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="tabular network, shuffled",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "pandas, TensorDataset, DataLoader": original,
        "whole tensors, indexed": whole_batches,
        OURS: moved,
    },
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
