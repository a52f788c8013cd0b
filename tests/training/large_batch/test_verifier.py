"""Comparison of strategies with the plain step, if a comparison itself is not possible or exact."""

import warnings

import pytest
import torch
from support.equivalence_models import Average
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch
from pinfeed.errors import ArgumentError

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (24,), generator=torch.Generator().manual_seed(1))


class Narrow(nn.Module):
    """A model in bfloat16, which also converts its inputs itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.bfloat16())
        return (y - 0.01 * y.mean(0)).float()


@pytest.mark.parametrize("strategy", ["accumulate", "two_pass"])
def test_a_difference_that_rounding_hides_is_warned_of(strategy: str) -> None:
    with (
        BigBatch(Narrow(), functional.cross_entropy, chunk_size=8, strategy=strategy) as big,
        pytest.warns(UserWarning, match="the rounding of its dtype may hide differences"),
    ):
        big.backward(X, Y)


def test_auto_refuses_what_rounding_may_hide() -> None:
    with (
        BigBatch(Narrow(), functional.cross_entropy, chunk_size=8) as big,
        pytest.raises(ArgumentError, match="the rounding of its dtype may hide differences"),
    ):
        big.backward(X, Y)


def test_recomputation_is_compared_without_hooks() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Average(False), nn.Linear(8, 8), nn.Linear(8, 5))
    called = []
    model[0].weight.register_hook(lambda gradient: called.append(gradient))
    with (
        BigBatch(model, functional.cross_entropy, strategy="checkpoint") as big,
        pytest.warns(UserWarning, match="does not give the gradients of the plain step"),
    ):
        big.backward(X, Y)
    assert len(called) == 1


def test_an_optimizer_in_the_backward_pass_steps_once() -> None:
    """A comparison of recomputation would run its hooks, which change the parameters."""
    trained = []
    for strategy in (None, "checkpoint"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5))
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        if strategy is None:
            functional.cross_entropy(model(X), Y).backward()
        else:
            with (
                BigBatch(model, functional.cross_entropy, strategy=strategy) as big,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("error")
                big.backward(X, Y)
        trained.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *trained))
