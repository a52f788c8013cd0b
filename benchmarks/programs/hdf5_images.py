"""Images in a compressed HDF5 file, in a block-shuffled order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_CLASSES = 10
ORDER = pinfeed.rows.block_shuffled(SEED, block_rows=64)


@dataclass(frozen=True)
class Size:
    """Sizes of the images and of a batch."""

    n_images: int
    shape: tuple[int, int, int]
    chunk: int
    batch_size: int
    memory_limit: float
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(20_000, (3, 64, 64), 64, 128, pinfeed.MiB(128), 36, 18),
    "quick": Size(4000, (3, 32, 32), 64, 64, pinfeed.MiB(64), 20, 10),
    "tiny": Size(300, (3, 8, 8), 16, 32, pinfeed.MiB(64), 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write images of smooth noise, which can be compressed, in chunks, and their labels."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / "images.h5", "w") as file:
        shape = (size.n_images, *size.shape)
        chunks = (size.chunk, *size.shape)
        images = file.create_dataset(
            "images", shape, "u1", chunks=chunks, compression="gzip", compression_opts=1
        )
        for begin in range(0, size.n_images, size.chunk):
            n = min(size.chunk, size.n_images - begin)
            images[begin : begin + n] = rng.integers(0, 16, (n, *size.shape), dtype=np.uint8) * 8
        file["labels"] = rng.integers(N_CLASSES, size=size.n_images)


class Images(Dataset[tuple[np.ndarray, int]]):
    """Image and label of each row. Each worker process opens the file itself.

    Args:
        path: Path of the file.
        options: Options with which it is opened.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.options = options
        self.file: Any = None
        with h5py.File(path) as file:
            self.n_images = len(file["images"])

    def __len__(self) -> int:
        return self.n_images

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if self.file is None:
            self.file = h5py.File(self.path, **self.options)
            # Each open dataset has its own cache of chunks.
            self.images = self.file["images"]
            self.labels = self.file["labels"]
        return self.images[row], self.labels[row]


def original(folder: Path, size: Size, step: Step, n_workers: int = 0, **options: Any) -> None:
    """Read single images, in pinfeed's block-shuffled order."""
    dataset = Images(folder / "images.h5", **options)
    rows = ORDER.bind(len(dataset), 0)(np.arange(len(dataset))).tolist()
    loader = DataLoader(dataset, size.batch_size, sampler=rows, num_workers=n_workers)
    for images, labels in loader:
        step(images.to(DEVICE), labels.to(DEVICE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the datasets of the file, with a memory limit."""
    path = folder / "images.h5"
    config = pinfeed.Config(
        cpu_memory_limit=size.memory_limit, preferred_batch_size=size.batch_size
    )
    with h5py.File(path) as file:
        source = (file["images"], file["labels"])
        with pinfeed.Feeder(source, config=config, rows=ORDER, device=DEVICE) as feeder:
            for images, labels in feeder:
                step(images, labels)


def make_step(size: Size) -> Step:
    """Return a training step of a small convolutional network with SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, N_CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # The smallest images are as large as the filters.
        images = nn.functional.pad(images.float() / 255, (2, 2, 2, 2))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="HDF5 images",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "DataLoader": original,
        "DataLoader, 2 workers": functools.partial(original, n_workers=2),
        # The default cache has 1 MiB, which is one chunk.
        "DataLoader, chunk cache of 64 MiB": functools.partial(
            original, rdcc_nbytes=2**26, rdcc_nslots=10_007
        ),
        OURS: moved,
    },
    make_step=make_step,
    original=(Images, original),
    moved=(moved,),
)
