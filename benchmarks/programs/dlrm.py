"""DLRM: clicks predicted from bags of categories, with an evaluation every few training steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_NUMBERS = 13
"""Number of numeric features of a click."""
LEARNING_RATE = 0.02

Batch = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor]
"""Numbers, ids and offsets of each table, and whether the users clicked."""


@dataclass(frozen=True)
class Size:
    """Sizes of the tables, of the files and of a batch."""

    n_rows: tuple[int, ...]
    n_features: int
    n_ids: int
    batch_size: int
    n_train: int
    n_test: int
    test_freq: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size((1_000_000, 400_000, 100_000, 30_000, 5000, 300), 32, 4, 512, 96, 4, 16, 100, 100),
    "quick": Size((200_000, 50_000, 2000, 300), 16, 4, 256, 32, 2, 8, 30, 30),
    "tiny": Size((500, 60, 20), 8, 3, 16, 6, 2, 3, 9, 9),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the first values of the tables, and clicks that depend on the categories."""
    rng = np.random.default_rng(0)
    tastes = []
    for number, n_rows in enumerate(size.n_rows):
        limit = n_rows**-0.5
        rows = rng.uniform(-limit, limit, (n_rows, size.n_features)).astype(np.float32)
        np.save(folder / f"table{number}.npy", rows)
        tastes.append(rng.standard_normal(n_rows))
    for name, n_batches in (("train", size.n_train), ("test", size.n_test)):
        n = n_batches * size.batch_size
        # Some categories are much more frequent than others.
        drawn = rng.random((len(tastes), n, size.n_ids)) ** 3
        ids = (drawn * np.array(size.n_rows)[:, None, None]).astype(np.int64)
        wanted = sum(taste[one].sum(1) for taste, one in zip(tastes, ids, strict=True))
        np.save(folder / f"{name}_ids.npy", ids.swapaxes(0, 1))
        np.save(folder / f"{name}_numbers.npy", rng.integers(1000, size=(n, N_NUMBERS)))
        np.save(folder / f"{name}_clicks.npy", (wanted > 0).astype(np.float32))


class Clicks(Dataset[Batch]):
    """Whole batches, as DLRM's dataset of binary files has them.

    Args:
        folder: Folder with the files.
        name: Name of the part, ``train`` or ``test``.
        batch_size: Clicks of a batch.
    """

    def __init__(self, folder: Path, name: str, batch_size: int) -> None:
        self.numbers = np.load(folder / f"{name}_numbers.npy", mmap_mode="r")
        self.ids = np.load(folder / f"{name}_ids.npy", mmap_mode="r")
        self.clicks = np.load(folder / f"{name}_clicks.npy", mmap_mode="r")
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.clicks) // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        numbers = torch.from_numpy(self.numbers[rows] + 1).float().log()
        ids = self.ids[rows]
        offsets = torch.arange(0, ids[:, 0].size, ids.shape[2])
        n_tables = ids.shape[1]
        return (
            numbers,
            [torch.from_numpy(ids[:, number].flatten()) for number in range(n_tables)],
            [offsets] * n_tables,
            torch.from_numpy(self.clicks[rows].copy()),
        )


class DLRM(nn.Module):
    """DLRM's network: products of pairs of features, from bags of categories and from numbers.

    Args:
        bags: Table of each kind of category.
        n_features: Features of a row.
    """

    def __init__(self, bags: Iterable[nn.Module], n_features: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(bags)
        n = len(self.bags) + 1
        self.pairs = torch.tril_indices(n, n, -1).unbind()
        generator = torch.Generator().manual_seed(SEED)
        self.bottom = network([N_NUMBERS, 64, n_features], generator)
        self.top = network([n_features + len(self.pairs[0]), 64, 1], generator)[:-1]

    def forward(
        self, numbers: torch.Tensor, ids: list[torch.Tensor], offsets: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the logits of clicks."""
        x = self.bottom(numbers)
        reduced = [bag(*given) for bag, *given in zip(self.bags, ids, offsets, strict=True)]
        features = torch.stack([x, *reduced], 1)
        row, column = self.pairs
        products = torch.bmm(features, features.mT)[:, row, column]
        logits: torch.Tensor = self.top(torch.cat([x, products], 1))
        return logits.squeeze(1)


def network(sizes: list[int], generator: torch.Generator) -> nn.Sequential:
    """Return linear layers with ReLU behind each."""
    layers: list[nn.Module] = []
    for n_inputs, n_outputs in itertools.pairwise(sizes):
        layer = nn.Linear(n_inputs, n_outputs)
        nn.init.xavier_normal_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad, which keeps one number per row if gradients are sparse, as DLRM's does.

    Args:
        params: As for any optimizer of torch.
        lr: Learning rate.
        eps: Number that is added to the denominator.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Change the weights that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    update = self._step_rows if weight.grad.is_sparse else self._step_all
                    update(weight, self.state[weight], group["lr"], group["eps"])

    def _step_rows(
        self, weight: torch.Tensor, state: dict[str, torch.Tensor], lr: float, eps: float
    ) -> None:
        gradient = weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        if not state:
            state["sum"] = torch.zeros(len(weight))
        state["sum"][rows] += values.square().mean(1)
        deviation = state["sum"][rows].sqrt() + eps
        weight.index_add_(0, rows, values / deviation[:, None], alpha=-lr)

    def _step_all(
        self, weight: torch.Tensor, state: dict[str, torch.Tensor], lr: float, eps: float
    ) -> None:
        if not state:
            state["sum"] = torch.zeros_like(weight)
        state["sum"].addcmul_(weight.grad, weight.grad)
        weight.addcdiv_(weight.grad, state["sum"].sqrt() + eps, value=-lr)


def warm_up(step: int) -> float:
    """Return the factor of the learning rate."""
    return min(1.0, (step + 1) / 10)


def loaders(folder: Path, size: Size) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Return the loaders of training and of tests."""
    train, test = (Clicks(folder, name, size.batch_size) for name in ("train", "test"))
    return DataLoader(train, batch_size=None), DataLoader(test, batch_size=None)


def original(folder: Path, size: Size, step: Step) -> None:
    """Train tables that are on the device, with sparse gradients."""
    train_loader, test_loader = loaders(folder, size)
    tables = [
        torch.from_numpy(np.load(folder / f"table{number}.npy"))
        for number in range(len(size.n_rows))
    ]
    bags = [
        nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
        for table in tables
    ]
    model = DLRM(bags, size.n_features).to(DEVICE)
    optimizer = RowWiseAdagrad(model.parameters(), lr=LEARNING_RATE)
    schedule = LambdaLR(optimizer, warm_up)
    for number, batch in enumerate(train_loader, 1):
        step(*on_device(batch), model=model, optimizer=optimizer, schedule=schedule)
        if number % size.test_freq == 0:
            model.eval()
            with torch.no_grad():
                for test in test_loader:
                    step(*on_device(test), model=model)
            model.train()


def on_device(batch: Batch) -> Batch:
    """Copy a batch to the device."""
    numbers, ids, offsets, clicked = batch
    return (
        numbers.to(DEVICE),
        [one.to(DEVICE) for one in ids],
        [one.to(DEVICE) for one in offsets],
        clicked.to(DEVICE),
    )


def moved(folder: Path, size: Size, step: Step) -> None:
    """Train tables in host memory, and prefetch the rows of the evaluations, too."""
    train_loader, test_loader = loaders(folder, size)
    tables = [
        torch.from_numpy(np.load(folder / f"table{number}.npy"))
        for number in range(len(size.n_rows))
    ]
    bags = [
        pinfeed.HostEmbeddingBag.from_pretrained(table, freeze=False, mode="sum")
        for table in tables
    ]
    model = DLRM(bags, size.n_features).to(DEVICE)
    optimizer = pinfeed.CombinedOptimizer(
        pinfeed.RowOptimizer(RowWiseAdagrad, bags, lr=LEARNING_RATE, gradients="sparse"),
        RowWiseAdagrad(model.parameters(), lr=LEARNING_RATE),
    )
    schedule = LambdaLR(optimizer, warm_up)
    ids = {bag: lambda batch, at=at: batch[1][at] for at, bag in enumerate(bags)}
    batches = pinfeed.train_rows(train_loader, ids, optimizer=optimizer, device=DEVICE)
    for number, batch in enumerate(batches, 1):
        step(*batch, model=model, optimizer=optimizer, schedule=schedule)
        if number % size.test_freq == 0:
            model.eval()
            with torch.no_grad(), batches.evaluating():
                for test in pinfeed.read_rows(test_loader, ids, device=DEVICE):
                    step(*test, model=model)
            model.train()


def make_step(size: Size) -> Step:
    """Return a step that trains a model, or evaluates it in eval mode, and returns the loss."""

    def step(
        numbers: torch.Tensor,
        ids: list[torch.Tensor],
        offsets: list[torch.Tensor],
        clicked: torch.Tensor,
        model: DLRM,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LambdaLR | None = None,
    ) -> torch.Tensor:
        logits = model(numbers, ids, offsets)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked)
        if optimizer is not None and schedule is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="DLRM",
    sizes=SIZES,
    prepare=prepare,
    ways={"nn.EmbeddingBag": original, OURS: moved},
    make_step=make_step,
    original=(original, on_device),
    moved=(moved,),
)
