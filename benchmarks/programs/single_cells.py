"""Batches of cells of an .h5ad file, made dense, as AnnTorchDataset of scvi-tools makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_KINDS = 12


@dataclass(frozen=True)
class Size:
    """Sizes of the matrix and of a batch."""

    n_cells: int
    n_genes: int
    mean_genes: int
    batch_size: int
    n_batches: int
    n_steps: int


# The Jupyter notebooks of scanpy and scvi-tools have 2,700 to 70,000 cells, and batches of 128.
SIZES = {
    "full": Size(20_000, 20_000, 1500, 128, 157, 60),
    "quick": Size(4000, 20_000, 1500, 128, 32, 20),
    "tiny": Size(90, 40, 9, 16, 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write counts of genes, and the kind of each cell, as AnnData writes them."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(size.mean_genes), 0.5, size.n_cells).astype(int)
    lengths = np.clip(lengths, 1, size.n_genes)
    genes = [np.sort(rng.choice(size.n_genes, n, replace=False)) for n in lengths]
    with h5py.File(folder / "cells.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"] = "csr_matrix"
        matrix.attrs["encoding-version"] = "0.1.0"
        matrix.attrs["shape"] = (size.n_cells, size.n_genes)
        parts = {
            "data": rng.geometric(0.4, lengths.sum()).astype(np.float32),
            "indices": np.concatenate(genes).astype(np.int32),
            "indptr": np.concatenate(([0], lengths.cumsum())),
        }
        for name, array in parts.items():
            matrix.create_dataset(name, data=array, maxshape=(None,))
        file["obs/kind/codes"] = rng.integers(N_KINDS, size=size.n_cells, dtype=np.int8)


class Cells(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Cells of a file in memory, by the row indices of a whole batch.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        import scipy.sparse

        with h5py.File(path) as file:
            matrix = file["X"]
            parts = tuple(matrix[name][:] for name in ("data", "indices", "indptr"))
            self.counts = scipy.sparse.csr_matrix(parts, matrix.attrs["shape"])
            self.kinds = file["obs/kind/codes"][:]

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.from_numpy(self.counts[rows].toarray())
        return counts, torch.from_numpy(self.kinds[rows])


class BackedCells(Cells):
    """Cells that are read from the file, sorted within each batch.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path)
        self.matrix = self.file["X"]
        self.offsets = self.matrix["indptr"][:]
        self.kinds = self.file["obs/kind/codes"][:]

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.zeros(len(rows), self.matrix.attrs["shape"][1])
        for i in np.argsort(rows):
            cell = slice(*self.offsets[rows[i] : rows[i] + 2])
            counts.numpy()[i, self.matrix["indices"][cell]] = self.matrix["data"][cell]
        return counts, torch.from_numpy(self.kinds[rows])


def sampler_of(n_cells: int, batch_size: int) -> BatchSampler:
    """Return shuffled batches of row indices, the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    return BatchSampler(RandomSampler(range(n_cells), generator=generator), batch_size, False)


def original(folder: Path, size: Size, step: Step, cells: Any = Cells) -> None:
    """Make the cells of each batch dense."""
    dataset = cells(folder / "cells.h5ad")
    sampler = sampler_of(len(dataset), size.batch_size)
    for counts, kinds in DataLoader(dataset, batch_size=None, sampler=sampler):
        step(counts.to(DEVICE), kinds.to(DEVICE))


def backed(folder: Path, size: Size, step: Step) -> None:
    """Read the cells of each batch from the file."""
    original(folder, size, step, BackedCells)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the matrix and the codes of the file."""
    path = folder / "cells.h5ad"
    with (
        pinfeed.SparseStore(path, layout="dense") as counts,
        pinfeed.HDF5Store(path, "obs/kind/codes") as kinds,
    ):
        rows = sampler_of(counts.n_rows, size.batch_size)
        with pinfeed.Feeder((counts, kinds), rows=rows, device=DEVICE) as feeder:
            for counts, kinds in feeder:
                step(counts, kinds)


def make_step(size: Size) -> Step:
    """Return a training step of a classifier of normalized counts with SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size.n_genes, 64), nn.ReLU(), nn.Linear(64, N_KINDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(counts: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        rates = torch.log1p(1e4 * counts / counts.sum(1, keepdim=True))
        loss = nn.functional.cross_entropy(model(rates), kinds.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Single cells",
    sizes=SIZES,
    prepare=prepare,
    ways={"DataLoader": original, "DataLoader, backed": backed, OURS: moved},
    make_step=make_step,
    original=(Cells, original),
    moved=(moved,),
)
