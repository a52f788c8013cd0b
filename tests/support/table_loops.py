"""Loops that compare a HostEmbedding with nn.Embedding."""

import functools
from typing import Any

import torch

import pinfeed
from pinfeed import (
    RowOptimizer,
)

N, DIM = 40, 8
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# On the CPU, because results are compared bit for bit with those of a loop there.
train_rows = functools.partial(pinfeed.train_rows, device="cpu")
SGD = functools.partial(RowOptimizer, torch.optim.SGD, lr=0.1)


def batches(n: int = 6, shape: tuple[int, ...] = (5, 4), rows: int = N) -> list[torch.Tensor]:
    """Return batches of ids that repeat, in a batch and between batches."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(rows, shape, generator=generator) for _ in range(n)]


def itself(batch: Any) -> Any:
    return batch


def step_ones(optimizer: RowOptimizer, out: torch.Tensor) -> None:
    """Take a step that subtracts lr from every number that was looked up once."""
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
