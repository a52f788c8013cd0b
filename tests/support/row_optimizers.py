"""Loops that compare a RowOptimizer with the dense optimizer of torch."""

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

import pinfeed
from pinfeed import HostEmbedding, RowOptimizer

N, DIM = 12, 8
# On the CPU, because results are compared bit for bit with those of a loop there.
train_rows = functools.partial(pinfeed.train_rows, device="cpu")
KEEPS: dict[str, tuple[set[str], set[str]]] = {
    "ASGD": ({"ax"}, {"eta", "mu", "step"}),
    "Adadelta": ({"acc_delta", "square_avg"}, {"step"}),
    "Adafactor": ({"row_var"}, {"col_var", "step"}),
    "Adagrad": ({"sum"}, {"step"}),
    "Adam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "AdamW": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "Adamax": ({"exp_avg", "exp_inf"}, {"step"}),
    "Muon": ({"momentum_buffer"}, set()),
    "NAdam": ({"exp_avg", "exp_avg_sq"}, {"mu_product", "step"}),
    "RAdam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "RMSprop": ({"square_avg"}, {"step"}),
    "Rprop": ({"prev", "step_size"}, {"step"}),
    "SGD": (set(), set()),
    "SparseAdam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
}
"""Keys of the state that each optimizer of torch keeps: row by row, and once for the table."""


def itself(batch: Any) -> Any:
    return batch


def batches(n: int = 6, size: int = 9, seed: int = 0) -> list[torch.Tensor]:
    """Return batches of some of the rows, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(N, (size,), generator=generator) for _ in range(n)]


def loss_of(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(ids)
    return (out.sigmoid() * torch.linspace(-1, 1, out.numel()).view(out.shape)).square().sum()


def state_of(optimizer: RowOptimizer, table: HostEmbedding) -> dict[str, np.ndarray]:
    """Return the row-wise state of the whole table."""
    kept = optimizer.tables[table]
    return {
        row.key: np.array(store.array)
        for row, store in zip(kept.layout.rows, kept.stores, strict=True)
    }


def simple(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> None:
    loss_of(module, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
