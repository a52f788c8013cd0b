"""Images of bytes, which the device normalizes and flips at random ahead of the training step.

The copy moves a byte for each value. ``device_transform`` runs after it in a stream of its own. Its
generator depends on (seed, epoch, batch) alone, so the batches do not depend on how many are
prefetched. A run that stops in the middle of an epoch resumes with the same batches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import pinfeed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Batch = tuple[torch.Tensor, torch.Tensor]


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Return normalized images, half of which are flipped, and the labels."""
    images, labels = batch
    x = (images.float() / 255 - 0.45) / 0.25
    shape = (len(images), 1, 1, 1)
    flipped = torch.rand(shape, generator=generator, device=images.device) < 0.5
    return torch.where(flipped, x.flip(3), x), labels


def feeder(folder: Path, depth: int | None = None) -> pinfeed.Feeder:
    """Return the feeder of a run."""
    return pinfeed.Feeder(
        (folder / "images.npy", folder / "labels.npy"),
        batch_size=32,
        shuffle=True,
        seed=3,
        depth=depth,
        device_transform=augment,
    )


def train(batches: pinfeed.Feeder, n_epochs: int) -> list[float]:
    """Return the losses of a linear model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10)).to(DEVICE)
    losses = []
    for _ in range(n_epochs):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.01 * weight.grad
                    weight.grad = None
            losses.append(loss.item())
    return losses


def main(n_images: int = 5000, n_epochs: int = 2) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "images.npy", rng.integers(256, size=(n_images, 3, 16, 16), dtype="u1"))
        np.save(folder / "labels.npy", rng.integers(10, size=n_images))
        losses = []
        for depth in (0, 1, 3):
            with feeder(folder, depth) as batches:
                losses.append(train(batches, n_epochs))
        assert losses[0] == losses[1] == losses[2]

        with feeder(folder) as batches:
            whole = [x for x, _ in batches]
        with feeder(folder) as batches:
            for number, _ in enumerate(batches, 1):
                if number == 3:
                    state = batches.state_dict()
                    break
        with feeder(folder) as batches:
            batches.load_state_dict(state)
            rest = [x for x, _ in batches]
        assert all(torch.equal(one, want) for one, want in zip(rest, whole[3:], strict=True))
    print(
        f"{len(losses[0])} losses with 0, 1 and 3 prefetched batches; {len(rest)} resumed batches"
    )


if __name__ == "__main__":
    main()
