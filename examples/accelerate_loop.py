"""Hugging Face Accelerate: a training loop over a feeder, with gradient accumulation.

``accelerate launch`` starts any number of processes. The model and the optimizer are prepared. A
feeder is not, because it is not a DataLoader: ``accelerator.prepare`` would return it unchanged.
Each process selects its own shard of the rows. If the last batches of an epoch are fewer than
``gradient_accumulation_steps``, Accelerate takes their step only if the loader announces its last
batch. ``Epoch`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pinfeed

# Batches whose gradients are accumulated for one step.
N_STEPS = 4
LR = 0.05


class Epoch(DataLoaderStateMixin):
    """A feeder that announces the last batch of an epoch to Accelerate."""

    def __init__(self, feeder: Any) -> None:
        self.feeder = feeder
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for number, batch in enumerate(self.feeder, 1):
                self.end_of_dataloader = number == len(self.feeder)
                yield batch
        finally:
            self.end()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 1)


def train(accelerator: Accelerator, epochs: list[Any]) -> tuple[torch.Tensor, int]:
    """Return the weights after training on these epochs, and the number of steps."""
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    n_steps = 0
    for batches in epochs:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x)[:, 0], y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                n_steps += accelerator.sync_gradients
    return accelerator.unwrap_model(model).weight.detach().clone(), n_steps


def by_hand(epochs: list[Any]) -> torch.Tensor:
    """Train without Accelerate: a step after ``N_STEPS`` batches and at the end of an epoch."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batches in epochs:
        n = len(batches)
        for number, (x, y) in enumerate(batches, 1):
            (nn.functional.mse_loss(model(x)[:, 0], y) / N_STEPS).backward()
            if number % N_STEPS == 0 or number == n:
                optimizer.step()
                optimizer.zero_grad()
    return model.weight.detach()


def main() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 8)).astype("float32"), rng.normal(size=300).astype("float32")
    accelerator = Accelerator(gradient_accumulation_steps=N_STEPS)
    # ranks="pad" finds the rank and the world size of the job.
    options: dict[str, Any] = {"batch_size": 32, "shuffle": True, "seed": 1, "ranks": "pad"}

    with pinfeed.Feeder((x, y), device=accelerator.device, **options) as feeder:
        assert accelerator.prepare(feeder) is feeder
        weights, n_steps = train(accelerator, [Epoch(feeder)] * 3)
        assert n_steps == 3 * -(-len(feeder) // N_STEPS)
    with pinfeed.Feeder((x, y), device=accelerator.device, **options) as feeder:
        if accelerator.num_processes == 1 and accelerator.device.type == "cpu":
            assert torch.equal(weights, by_hand([feeder] * 3))

    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=32)
    prepared = accelerator.prepare(loader)
    with pinfeed.wrap_loader(prepared, device=accelerator.device) as wrapped:
        for ours, theirs in zip(wrapped, list(prepared), strict=True):
            assert all(map(torch.equal, ours, theirs))
    accelerator.end_training()
    print(f"{n_steps} steps of {N_STEPS} batches or of the rest of an epoch")


if __name__ == "__main__":
    main()
