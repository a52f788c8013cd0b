"""The MNIST example of pytorch/examples, whose DataLoader is wrapped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import pinfeed
from benchmarks.programs.digits import Digits, Size, prepare
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

SIZES = {
    "full": Size(60_000, 64, 300, 20),
    "quick": Size(6000, 64, 60, 10),
    "tiny": Size(100, 8, 6, 2),
}


def normalize(image: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the dataset, and divide by its standard deviation."""
    return (image - 0.1307) / 0.3081


def original(folder: Path, size: Size, step: Step) -> None:
    """Copy each batch to the device in the loop."""
    torch.manual_seed(SEED)
    loader = DataLoader(Digits(folder, normalize), size.batch_size, shuffle=True)
    for data, target in loader:
        data, target = data.to(DEVICE), target.to(DEVICE)
        step(data, target)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Wrap the loader."""
    torch.manual_seed(SEED)
    loader = DataLoader(Digits(folder, normalize), size.batch_size, shuffle=True)
    for data, target in pinfeed.wrap_loader(loader, device=DEVICE):
        step(data, target)


def make_step(size: Size) -> Step:
    """Return a training step of two convolutions and two linear layers, with dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
        nn.LogSoftmax(1),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def step(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="pytorch/examples, mnist",
    sizes=SIZES,
    prepare=prepare,
    ways={"DataLoader": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
