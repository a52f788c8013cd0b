"""The variational autoencoder of pytorch/examples, whose DataLoader is wrapped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import pinfeed
from benchmarks.programs.digits import Digits, Size, prepare
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

SIZES = {
    "full": Size(60_000, 128, 200, 100),
    "quick": Size(6000, 128, 40, 20),
    "tiny": Size(100, 16, 6, 3),
}


def unchanged(image: torch.Tensor) -> torch.Tensor:
    """Return the image."""
    return image


def original(folder: Path, size: Size, step: Step) -> None:
    """Copy each batch to the device in the loop."""
    torch.manual_seed(SEED)
    loader = DataLoader(Digits(folder, unchanged), size.batch_size, shuffle=True)
    for data, _ in loader:
        data = data.to(DEVICE)
        step(data)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Wrap the loader."""
    torch.manual_seed(SEED)
    loader = DataLoader(Digits(folder, unchanged), size.batch_size, shuffle=True)
    for data, _ in pinfeed.wrap_loader(loader, device=DEVICE):
        step(data)


class VAE(nn.Module):
    """Linear encoder and decoder of images, with random codes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 400)
        self.mean = nn.Linear(400, 20)
        self.log_variance = nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        x = x.flatten(1)
        hidden = self.hidden(x).relu()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        # The noise is drawn from torch's global generator.
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        decoded = self.decoder(code).sigmoid()
        likelihood = nn.functional.binary_cross_entropy(decoded, x, reduction="sum")
        return likelihood - (1 + log_variance - mean**2 - log_variance.exp()).sum() / 2


def make_step(size: Size) -> Step:
    """Return a training step of the autoencoder with Adam."""
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(data: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(data)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="pytorch/examples, vae",
    sizes=SIZES,
    prepare=prepare,
    ways={"DataLoader": original, OURS: moved},
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
