"""Click models: embedding bags in host memory, and an evaluation every few training steps.

The tables are trained with DLRM's row-wise Adagrad. It keeps one number for each row if gradients
are sparse, and is plain Adagrad if they are dense. One scheduler changes the learning rates of the
tables and of the network. Losses and accuracies are those of a loop over ``nn.EmbeddingBag``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

import pinfeed

N_ROWS = (5000, 300)
N_FEATURES = 16
N_IDS = 4
BATCH_SIZE = 64
TEST_EVERY = 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Batch = dict[str, Any]


class Clicks(Dataset[Batch]):
    """Batches of numbers, of the ids of each table, and of clicks.

    Args:
        n_batches: Number of batches.
        seed: Seed of the batches.
    """

    def __init__(self, n_batches: int, seed: int) -> None:
        self.n_batches = n_batches
        self.seed = seed

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng((self.seed, index))
        ids = [(rng.random((BATCH_SIZE, N_IDS)) ** 3 * n).astype(np.int64) for n in N_ROWS]
        clicked = ids[0].sum(1) % 3 == 0
        return {
            "numbers": torch.from_numpy(rng.standard_normal((BATCH_SIZE, 8), np.float32)),
            "ids": [torch.from_numpy(one) for one in ids],
            "clicked": torch.from_numpy(clicked.astype(np.float32)),
        }


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number of state per row of a sparse gradient, as in DLRM."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.update(weight, self.state[weight], group["lr"])

    def update(self, weight: Any, state: dict[str, Any], lr: float) -> None:
        if weight.grad.is_sparse:
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            added = values.square().mean(1)
            total = state.setdefault("sum", torch.zeros(len(weight), device=weight.device))
            total[rows] += added
            weight.index_add_(0, rows, values / (total[rows].sqrt() + 1e-10)[:, None], alpha=-lr)
        else:
            total = state.setdefault("sum", torch.zeros_like(weight))
            total.addcmul_(weight.grad, weight.grad)
            weight.addcdiv_(weight.grad, total.sqrt() + 1e-10, value=-lr)


class Model(nn.Module):
    """Products of the features of bags and numbers, and a network over them."""

    def __init__(self, bags: Iterable[nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(bags)
        n = len(self.bags) + 1
        self.pairs = torch.tril_indices(n, n, -1).unbind()
        torch.manual_seed(1)
        self.bottom = nn.Linear(8, N_FEATURES)
        self.top = nn.Sequential(nn.Linear(len(self.pairs[0]), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        reduced = [bag(ids) for bag, ids in zip(self.bags, batch["ids"], strict=True)]
        features = torch.stack([self.bottom(batch["numbers"]), *reduced], 1)
        row, column = self.pairs
        logits: torch.Tensor = self.top((features @ features.mT)[:, row, column])
        return logits[:, 0]


def weights() -> list[torch.Tensor]:
    """Return the first values of the tables."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, N_FEATURES, generator=generator) for n in N_ROWS]


def train_step(model: Model, batch: Batch, optimizer: Any, schedule: Any) -> float:
    """Train on a batch, and return the loss."""
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["clicked"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: Model, batches: Iterable[Batch]) -> float:
    """Return the share of clicks that the model predicts."""
    model.eval()
    right = torch.cat([(model(batch) > 0) == (batch["clicked"] > 0.5) for batch in batches])
    model.train()
    return right.float().mean().item()


def original(train_loader: Any, test_loader: Any) -> list[float]:
    """Return the losses and accuracies of the usual loop, with whole tables on the device."""
    bags = [
        nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
        for table in weights()
    ]
    model = Model(bags).to(DEVICE)
    optimizer = RowWiseAdagrad(model.parameters())
    schedule = LinearLR(optimizer, 0.1, total_iters=20)
    results = []
    for number, batch in enumerate(pinfeed.wrap_loader(train_loader, depth=0), 1):
        results.append(train_step(model, batch, optimizer, schedule))
        if number % TEST_EVERY == 0:
            results.append(accuracy(model, pinfeed.wrap_loader(test_loader, depth=0)))
    return results


def moved(train_loader: Any, test_loader: Any) -> list[float]:
    """Return the losses and accuracies with tables in host memory."""
    bags = [
        pinfeed.HostEmbeddingBag.from_pretrained(table, freeze=False, mode="sum")
        for table in weights()
    ]
    model = Model(bags).to(DEVICE)
    # Without gradients=, RowOptimizer raises an error, because this optimizer has two rules.
    rows = pinfeed.RowOptimizer(RowWiseAdagrad, bags, lr=1e-2, gradients="sparse")
    optimizer = pinfeed.CombinedOptimizer(rows, RowWiseAdagrad(model.parameters()))
    schedule = LinearLR(optimizer, 0.1, total_iters=20)
    ids = {bag: lambda batch, at=at: batch["ids"][at] for at, bag in enumerate(bags)}
    batches = pinfeed.train_rows(train_loader, ids, optimizer=optimizer)
    results = []
    for number, batch in enumerate(batches, 1):
        results.append(train_step(model, batch, optimizer, schedule))
        if number % TEST_EVERY == 0:
            with batches.evaluating():
                results.append(accuracy(model, pinfeed.read_rows(test_loader, ids)))
    return results


def main(n_batches: int = 200, n_tests: int = 10) -> None:
    train_loader = DataLoader(Clicks(n_batches, seed=0), batch_size=None)
    test_loader = DataLoader(Clicks(n_tests, seed=1), batch_size=None)
    expected = original(train_loader, test_loader)
    found = moved(train_loader, test_loader)
    # Sums of gradients have no fixed order on a GPU.
    tolerance = 0.0 if DEVICE.type == "cpu" else 1e-3
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    print(f"{n_batches} losses and {n_batches // TEST_EVERY} accuracies, as with nn.EmbeddingBag")


if __name__ == "__main__":
    main()
