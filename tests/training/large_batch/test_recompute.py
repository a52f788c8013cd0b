"""Recomputation of parts of a model."""

import copy

import pytest
import torch
from support.big_batches import X, Y, gradients, gradients_of_both
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_parts_that_are_shared_or_have_residuals() -> None:
    torch.manual_seed(0)
    act = nn.Tanh()
    shared = nn.Sequential(nn.Linear(20, 20), act, nn.Linear(20, 20), act, nn.Linear(20, 7))
    residual = nn.Sequential(
        Residual(nn.Linear(20, 20), nn.Tanh()),
        Residual(nn.Linear(20, 20), nn.Tanh()),
        nn.Linear(20, 7),
    )
    only = nn.ModuleDict({"a": Residual(nn.Linear(20, 20), nn.Tanh())})

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = only
            self.head = nn.Linear(20, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.parts["a"](x))

    for model in (shared, residual, Uses()):
        want, got = gradients_of_both(model, functional.cross_entropy, "checkpoint")
        assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", ["checkpoint", "two_pass"])
def test_recomputation_begins_with_the_same_buffers(strategy: str) -> None:
    """A power iteration and a counter take one step for one batch, whatever is computed twice."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(20, 20)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.inner(x) * self.count

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20)),
        nn.Tanh(),
        Counted(),
        nn.Linear(20, 7),
    )
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    functional.cross_entropy(plain(X), Y).backward()
    with BigBatch(other, functional.cross_entropy, chunk_size=23, strategy=strategy) as big:
        big.backward(X, Y)
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-6)
    for a, b in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
