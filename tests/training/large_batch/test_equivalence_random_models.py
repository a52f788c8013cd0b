"""Comparison of strategies with the plain step on random models."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.equivalence_models import Average, Calls, Counts, batch_norm, error_of
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from pinfeed import BigBatch, errors


class Sum(nn.Module):
    """Adds what a part of the model computes to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten())


ALONE: list[Callable[[], nn.Module]] = [
    nn.Tanh,
    functools.partial(nn.Linear, 8, 8),
    functools.partial(nn.LayerNorm, 8),
    functools.partial(nn.GroupNorm, 2, 8),
    lambda: Sum(nn.Linear(8, 8)),
    lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    lambda: nn.BatchNorm1d(8).eval(),
    frozen,
    convolution,
]
"""Layers that compute each sample by itself."""


TOGETHER: list[Callable[[], nn.Module]] = [
    lambda: Calls(lambda x: x - 0.5 * x.mean(0)),
    lambda: Calls(lambda x: x + 0.01 * x.mean(0)),
    lambda: Calls(batch_norm),
    lambda: Calls(lambda x: x + x.roll(1, 0)),
    lambda: Calls(lambda x: x.sort(0).values),
    lambda: Calls(lambda x: x.cumsum(0)),
    lambda: Calls(lambda x: x / x.norm()),
    lambda: Calls(lambda x: x * len(x)),
    lambda: Calls(lambda x: (x @ x.T).softmax(1) @ x),
    lambda: nn.BatchNorm1d(8),
    lambda: Average(True),
    lambda: Average(False),
    Counts,
    lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    lambda: old_spectral_norm(nn.Linear(8, 8)),
]
"""Layers whose samples depend on each other, or whose state each forward pass changes."""


class Shaped(nn.Module):
    """A module whose outputs are those of another one, in some structure."""

    def __init__(self, body: nn.Module, shape: str) -> None:
        super().__init__()
        self.body = body
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return {
            "tensor": lambda: y,
            "dict": lambda: {"logits": y, "hidden": y.tanh()},
            "tuple": lambda: (y, y.argmax(1)),
            "auxiliary": lambda: (y, y.square().mean().reshape(1)),
            "transposed": lambda: y.T,
        }[self.shape]()


def logits(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, dict):
        return outputs["logits"]
    if isinstance(outputs, tuple):
        return outputs[0]
    return outputs if outputs.shape[1] == 5 else outputs.T


def random_loss(rng: random.Random) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a loss of logits, and a function that makes its targets from classes."""
    classes: list[Any] = [
        nn.CrossEntropyLoss(reduction=rng.choice(["mean", "sum"])),
        nn.CrossEntropyLoss(ignore_index=rng.randrange(5)),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6), label_smoothing=rng.choice([0, 0.2])),
        functools.partial(
            functional.cross_entropy, ignore_index=-100, reduction=rng.choice(["mean", "sum"])
        ),
        functional.multi_margin_loss,
    ]
    numbers: list[Any] = [
        nn.MSELoss(reduction=rng.choice(["mean", "sum"])),
        functools.partial(functional.mse_loss, size_average=rng.choice([True, False])),
        functools.partial(functional.smooth_l1_loss, beta=0.5),
        nn.KLDivLoss(reduction=rng.choice(["batchmean", "sum", "mean"])),
        lambda o, y: (
            (functional.normalize(o, dim=1) @ functional.normalize(y, dim=1).T).logsumexp(1).mean()
        ),
        lambda o, y: (o - y).square().sum(1).topk(3).values.mean(),
    ]
    if rng.random() < 0.5:
        loss = rng.choice(classes)
        can_be_uint8 = isinstance(loss, nn.CrossEntropyLoss) and not loss.label_smoothing
        dtype = torch.uint8 if can_be_uint8 and rng.random() < 0.5 else torch.int64
        return loss, lambda y: y.to(dtype)
    return rng.choice(numbers), lambda y: functional.one_hot(y, 5).float()


class Program:
    """A random model, loss and batch.

    Attributes:
        is_exact: Whether chunks give the gradients of the whole batch, by how it is made.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        layers = [rng.choice(ALONE)() for _ in range(rng.randint(1, 3))]
        self.is_exact = rng.random() < 0.5
        if not self.is_exact:
            layers.insert(rng.randint(0, len(layers)), rng.choice(TOGETHER)())
        if rng.random() < 0.3:
            # The same layer occurs twice.
            layers.append(layers[0])
        shape = rng.choice(["tensor"] * 3 + ["dict", "tuple", "auxiliary", "transposed"])
        self.is_exact = self.is_exact and shape not in ("auxiliary", "transposed")
        self.model = Shaped(nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 5)), shape)
        if rng.random() < 0.1:
            self.is_exact = False
            for p in self.model.parameters():
                if p.requires_grad:
                    p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        loss, targets = random_loss(rng)
        # Torch's own losses of plain outputs are accumulated, others computed in two passes.
        self.loss = loss if shape == "tensor" else lambda outputs, y: loss(logits(outputs), y)
        n = rng.randint(6, 24)
        self.inputs = torch.randn(n, 6)
        self.targets = targets(torch.randint(5, (n,)))
        self.chunk_size = rng.randint(1, n - 1)


# torch warns of deprecated functions.
@pytest.mark.filterwarnings("ignore")
def outcome_of(seed: int) -> str:
    """Return ``refused`` or the chosen strategy, and check that its gradients are right."""
    program, plain = Program(seed), Program(seed)
    torch.manual_seed(seed)
    plain.loss(plain.model(plain.inputs), plain.targets).backward()
    torch.manual_seed(seed)
    with BigBatch(program.model, program.loss, chunk_size=program.chunk_size) as big:
        try:
            big.backward(program.inputs, program.targets)
        except errors.ArgumentError:
            return "refused"
    assert error_of(plain.model, program.model) < 1e-4, f"seed {seed}: silently wrong"
    for one, other in zip(plain.model.buffers(), program.model.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=f"seed {seed}: a buffer is silently wrong")
    assert big.chosen is not None
    return big.chosen.strategy


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_random_model_is_silently_wrong(first: int) -> None:
    for seed in range(first, first + 20):
        assert outcome_of(seed) != "refused" or not Program(seed).is_exact, (
            f"seed {seed}: refused, and chunks would be exact"
        )


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(1000, 5000, 200))
def test_no_model_of_many_is_silently_wrong(first: int) -> None:
    for seed in range(first, first + 200):
        outcome_of(seed)
