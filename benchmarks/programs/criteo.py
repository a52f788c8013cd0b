"""Clicks of the Criteo dataset in .npy files of several days, as torchrec's DLRM reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, Program, Step

N_DENSE = 13
N_SPARSE = 26
N_IDS = 1000
"""Rows of each embedding table."""
KINDS = ("dense", "sparse", "labels")

Array = np.ndarray


@dataclass(frozen=True)
class Size:
    """Sizes of the files and of a batch."""

    n_days: int
    n_clicks: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(3, 1_000_000, 2048, 1400, 60),
    "quick": Size(3, 200_000, 1024, 500, 30),
    "tiny": Size(3, 50, 16, 9, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the dense features, the ids and the labels of each day."""
    rng = np.random.default_rng(0)
    n = size.n_clicks
    for day in range(size.n_days):
        np.save(folder / f"dense-{day}.npy", rng.random((n, N_DENSE), np.float32))
        ids = rng.integers(N_IDS, size=(n, N_SPARSE), dtype=np.int32)
        np.save(folder / f"sparse-{day}.npy", ids)
        np.save(folder / f"labels-{day}.npy", rng.integers(2, size=(n, 1), dtype=np.int32))


class Clicks:
    """Batches of memory maps, in the order of the days; a batch may contain parts of two days.

    Args:
        folder: Folder with the files.
        batch_size: Clicks of a batch.
    """

    def __init__(self, folder: Path, batch_size: int) -> None:
        self.batch_size = batch_size
        days = range(len(list(folder.glob("labels-*.npy"))))
        paths = [[folder / f"{kind}-{day}.npy" for kind in KINDS] for day in days]
        self.days = [[np.load(path, mmap_mode="r") for path in day] for day in paths]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        kept: list[Array] = []
        for day in self.days:
            begin = 0
            while begin < len(day[0]):
                end = begin + self.batch_size - (len(kept[0]) if kept else 0)
                part = [array[begin:end] for array in day]
                if kept:
                    part = [np.concatenate(pair) for pair in zip(kept, part, strict=True)]
                kept = part
                begin = end
                if len(kept[0]) == self.batch_size:
                    yield batch_of(*kept)
                    kept = []
        if kept:
            yield batch_of(*kept)


def batch_of(dense: Array, sparse: Array, labels: Array) -> tuple[torch.Tensor, ...]:
    """Return the dense features, the ids of one column after another, and the labels."""
    ids = sparse.T.reshape(-1)
    return torch.from_numpy(dense.copy()), torch.from_numpy(ids), torch.tensor(labels[:, 0])


def original(folder: Path, size: Size, step: Step) -> None:
    """Cut batches from memory maps."""
    for dense, ids, labels in Clicks(folder, size.batch_size):
        step(dense.to(DEVICE), ids.to(DEVICE), labels.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the files of all days as shards."""
    source = tuple(str(folder / f"{kind}-*.npy") for kind in KINDS)
    with pinfeed.Feeder(source, batch_size=size.batch_size, device=DEVICE) as feeder:
        for dense, sparse, labels in feeder:
            step(dense, sparse.T.reshape(-1), labels.view(-1))


class Model(nn.Module):
    """A linear layer for dense features, one table for the ids of all columns, and a top layer."""

    def __init__(self, n_features: int = 16) -> None:
        super().__init__()
        self.bottom = nn.Linear(N_DENSE, n_features)
        self.tables = nn.EmbeddingBag(N_SPARSE * N_IDS, n_features, mode="sum", sparse=True)
        self.top = nn.Linear(2 * n_features, 1)
        self.first = torch.arange(N_SPARSE, device=DEVICE) * N_IDS

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = ids.view(N_SPARSE, -1).T + self.first
        features = torch.cat([self.bottom(dense).relu(), self.tables(rows)], 1)
        return self.top(features)[:, 0]


def make_step(_: Size) -> Step:
    """Return a training step with SGD."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(dense, ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Criteo files of torchrec",
    sizes=SIZES,
    prepare=prepare,
    ways={"loop over memory maps": original, OURS: moved},
    make_step=make_step,
    original=(Clicks, batch_of, original),
    moved=(moved,),
)
