"""Images of digits with a transformation of each, as torchvision's MNIST has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Size:
    """Sizes of the dataset and of a batch."""

    n_images: int
    batch_size: int
    n_batches: int
    n_steps: int


def prepare(folder: Path, size: Size) -> None:
    """Write images and labels."""
    rng = np.random.default_rng(0)
    np.save(folder / "images.npy", rng.integers(256, size=(size.n_images, 28, 28), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(10, size=size.n_images))


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Transformed image and label of each row.

    Args:
        folder: Folder with the files.
        transform: Function of the image, whose values are from 0 to 1.
    """

    def __init__(self, folder: Path, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.images = torch.from_numpy(np.load(folder / "images.npy"))
        self.labels = np.load(folder / "labels.npy")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[row, None] / 255), int(self.labels[row])
