"""Images of bytes that the device normalizes, flips and crops at random, as for CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step, generator_of_batch

N_CLASSES = 10
PADDING = 4
MEAN = torch.tensor([0.4914, 0.4822, 0.4465], device=DEVICE).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616], device=DEVICE).view(3, 1, 1)

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and labels."""


@dataclass(frozen=True)
class Size:
    """Sizes of the images and of a batch."""

    n_images: int
    length: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(50_000, 32, 128, 300, 60),
    "quick": Size(5000, 32, 64, 70, 30),
    "tiny": Size(100, 8, 16, 6, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write images and labels."""
    rng = np.random.default_rng(0)
    shape = (size.n_images, 3, size.length, size.length)
    np.save(folder / "images.npy", rng.integers(256, size=shape, dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(N_CLASSES, size=size.n_images))


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Return normalized images, half of which are flipped, shifted by at most four pixels."""
    images, labels = batch
    n, _, _, length = images.shape
    device = images.device
    x = (images.float() / 255 - MEAN) / DEVIATION
    flipped = torch.rand((n, 1, 1, 1), generator=generator, device=device) < 0.5
    x = torch.where(flipped, x.flip(3), x)
    x = nn.functional.pad(x, (PADDING,) * 4)
    begin = torch.randint(2 * PADDING + 1, (2, n, 1), generator=generator, device=device)
    rows, columns = begin + torch.arange(length, device=device)
    which = torch.arange(n, device=device)[:, None, None]
    cropped = x.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None]]
    return cropped.permute(0, 3, 1, 2), labels


def order(size: Size) -> list[torch.Tensor]:
    """Return the row indices of each batch of an epoch."""
    generator = torch.Generator().manual_seed(SEED)
    numbers = torch.randperm(size.n_images, generator=generator)
    return list(numbers.split(size.batch_size))


def original(folder: Path, size: Size, step: Step) -> None:
    """Gather, copy and augment each batch in the loop."""
    images = np.load(folder / "images.npy", mmap_mode="r")
    labels = np.load(folder / "labels.npy", mmap_mode="r")
    for number, rows in enumerate(order(size)):
        x = torch.from_numpy(images[rows]).to(DEVICE)
        y = torch.from_numpy(labels[rows]).to(DEVICE)
        x, y = augment((x, y), generator_of_batch(SEED, 0, number, DEVICE))
        step(x, y)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass the files and the transform."""
    source = (folder / "images.npy", folder / "labels.npy")
    with pinfeed.Feeder(
        source, rows=order(size), device=DEVICE, device_transform=augment, seed=SEED
    ) as feeder:
        for x, y in feeder:
            step(x, y)


def make_step(size: Size) -> Step:
    """Return a training step of a small convolutional network with SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, N_CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Augmented images",
    sizes=SIZES,
    prepare=prepare,
    ways={"loop over a memory map": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
