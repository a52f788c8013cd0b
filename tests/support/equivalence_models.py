"""Models and data of the tests that compare strategies with the plain step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Calls(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


class Average(nn.Module):
    """Divides by a moving average of what it has seen."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        if as_buffer:
            self.register_buffer("seen", torch.ones(8))
        else:
            self.seen = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().abs().mean(0)
        return x / self.seen


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x / self.n


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, training=True)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error_of(model: nn.Module, other: nn.Module) -> float:
    want, got = gradients(model), gradients(other)
    return float((want - got).norm() / want.norm())
