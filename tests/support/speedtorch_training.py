"""A small model with a nested embedding, trained with SpeedTorch's tables and without them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it

N = 40
DIM = 3
BATCH = 4
POS = 2
NEG = 3

Make = Callable[..., torch.optim.Optimizer]

MODELS = [
    "ModelFactory",
    "ModelFactoryMM",
    "PytorchModelFactory",
    "GPUPytorchModelFactory",
    "CPUPytorchModelFactory",
]
STATES = [name.replace("Model", "Optimizer") for name in MODELS]
COMS = ["COM", "COMMM", "PytorchCOM", "GPUPytorchCOM", "CPUPytorchCOM"]


# Optimizers that leave rows with a gradient of zero unchanged, and others.
LAZY: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
}
OTHERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


class Inner(nn.Module):
    def __init__(self, rows: int, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, DIM, sparse=sparse, dtype=dtype)


class Model(nn.Module):
    """A nested embedding, after a parameter that the optimizer does not have."""

    def __init__(self, rows: int, sparse: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)
        self.inner = Inner(rows, sparse, dtype)

    def forward(self, pos: Any, neg: Any) -> torch.Tensor:
        words = self.inner.words
        return score(
            *(words(torch.as_tensor(slots, device=words.weight.device)) for slots in (pos, neg))
        )


def score(pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, NEG, dtype=pos.dtype, device=pos.device)
    return (pos.sum(1, keepdim=True) * neg).sum(2).sigmoid().mul(
        weights
    ).sum() + pos.square().sum() / 7


def batches(repeat: bool, steps: int = 8) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    for _ in range(steps):
        ids = (
            rng.integers(0, 9, BATCH * (POS + NEG))
            if repeat
            else rng.permutation(N)[: BATCH * (POS + NEG)]
        )
        yield ids[: BATCH * POS].reshape(BATCH, POS), ids[BATCH * POS :].reshape(BATCH, NEG)


def made(
    model_name: str, make: Make, *, sparse: bool = False, seed: int = 0
) -> tuple[Any, Any, Model, torch.optim.Optimizer]:
    model = Model(5, sparse)
    optimizer = make([model.inner.words.weight])
    weights = getattr(SpeedTorch, model_name)(model.inner.words, N, DIM, datatype="float64")
    states = getattr(SpeedTorch, model_name.replace("Model", "Optimizer"))(
        optimizer, N, DIM, model, "inner.words", dtype="float64"
    )
    torch.manual_seed(seed)
    weights.uniformDistributionInit(-1, 1)
    states.optInit()
    return weights, states, model, optimizer


def train(
    weights: Any, states: Any, model: Model, optimizer: torch.optim.Optimizer, ids: Any
) -> np.ndarray:
    static = weights.variableTransformer(BATCH, POS, NEG)
    for pos, neg in ids:
        weights.beforeForwardPass(pos, neg)
        states.beforeForwardPass(pos, neg)
        optimizer.zero_grad()
        model(*static).backward()
        optimizer.step()
        weights.afterOptimizerStep(pos, neg)
        states.afterOptimizerStep(pos, neg)
    return weights.getNumpyVersion()


def start(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return nn.init.uniform_(torch.empty(N, DIM, dtype=torch.float64), -1, 1)


def whole(make: Make, ids: Any, sparse: bool = False) -> np.ndarray:
    """Train the whole table in a plain loop."""
    embedding = nn.Embedding.from_pretrained(start(), freeze=False, sparse=sparse)
    optimizer = make([embedding.weight])
    for pos, neg in ids:
        optimizer.zero_grad()
        score(embedding(torch.from_numpy(pos)), embedding(torch.from_numpy(neg))).backward()
        optimizer.step()
    return embedding.weight.detach().numpy()


def by_block(make: Make, ids: Any) -> np.ndarray:
    """Train blocks of distinct rows in a plain loop, with their state in tables of full length."""
    table = start()
    kept = dict[str, torch.Tensor]()
    shared = dict[str, Any]()
    # Rprop begins with its learning rate; the state of all others begins with zeros.
    initial = {"step_size": 0.1}
    for pos, neg in ids:
        rows, inverse = np.unique(
            np.concatenate([pos.reshape(-1), neg.reshape(-1)]), return_inverse=True
        )
        block, inverse = nn.Parameter(table[rows].clone()), torch.from_numpy(inverse)
        optimizer = make([block])
        optimizer.state[block] = {
            **shared,
            **{key: value[rows].clone() for key, value in kept.items()},
        }
        if not optimizer.state[block]:
            del optimizer.state[block]
        looked_up = block[inverse]
        score(
            looked_up[: pos.size].view(BATCH, POS, DIM), looked_up[pos.size :].view(BATCH, NEG, DIM)
        ).backward()
        optimizer.step()
        for key, value in optimizer.state[block].items():
            if isinstance(value, torch.Tensor) and value.shape == block.shape:
                full = kept.setdefault(
                    key, torch.full((N, DIM), initial.get(key, 0.0), dtype=torch.float64)
                )
                full[rows] = value
            else:
                shared[key] = value
        table[rows] = block.detach()
    return table.numpy()


def step_of(
    ids: Any, *switchers: Any, model: Model, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Run a training step that does not copy its rows back."""
    for switcher in switchers:
        switcher.beforeForwardPass(ids)
    optimizer.zero_grad()
    loss = model.inner.words(torch.arange(len(ids))).square().sum()
    loss.backward()
    optimizer.step()
    return loss


ARRAY = np.arange(7 * 4 * 3, dtype=np.float32).reshape(7, 4, 3)
