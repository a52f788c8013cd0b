"""Reductions and term counts of losses."""

import functools
from typing import Any

import pytest
import torch
from support.big_batches import Y, gradients, gradients_of_both, mlp
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: functional.relu(outputs.sum(1)).sum(),
        lambda outputs, targets: (
            functional.cross_entropy(outputs, targets, reduction="sum")
            / targets.gt(3).sum().clamp(min=1)
        ),
        lambda outputs, targets: functional.cross_entropy(outputs, targets) + 0.01 * outputs.var(),
        lambda outputs, targets: (
            functional.cross_entropy(outputs, targets, reduction="none").topk(8).values.mean()
        ),
        functools.partial(functional.cross_entropy, ignore_index=0),
        functools.partial(
            functional.cross_entropy, weight=torch.linspace(1, 2, 7), reduction="sum"
        ),
        nn.CrossEntropyLoss(label_smoothing=0.2, weight=torch.linspace(1, 2, 7)),
    ],
)
def test_losses_that_look_like_others(loss: Any) -> None:
    want, got = gradients_of_both(mlp(), loss, "auto")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_integers_that_are_no_classes() -> None:
    targets = torch.where(Y[:, None] > 3, -100, Y[:, None])
    want, got = gradients_of_both(nn.Linear(20, 1), nn.L1Loss(), "accumulate", y=targets)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_numbers_count_one_by_one() -> None:
    batches = [(torch.ones(2, n, 1), torch.full((2, n, 1), float(n))) for n in (5, 50)]
    plain, model = (nn.Linear(1, 1), nn.Linear(1, 1))
    model.load_state_dict(plain.state_dict())
    (sum(functional.mse_loss(plain(x), y, reduction="sum") for x, y in batches) / 110).backward()
    with BigBatch(model, nn.MSELoss(), chunk_size=1) as big:
        big.backward(iter(batches))
    torch.testing.assert_close(gradients(model), gradients(plain))
