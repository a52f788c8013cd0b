"""Models, losses and data of the tests of BigBatch."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pinfeed import BigBatch

X = torch.randn(23, 20, generator=torch.Generator().manual_seed(0))
Y = torch.randint(7, (23,), generator=torch.Generator().manual_seed(0))
IGNORED = Y.clone()
IGNORED[::3] = IGNORED[:6] = -100


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 50), *middle, nn.ReLU(), nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 7)
    )


def contrastive(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of all pairs (Khosla et al., arXiv 2004.11362)."""
    unit = functional.normalize(outputs, dim=1)
    same = (labels[:, None] == labels[None]).float()
    return -(functional.log_softmax(unit @ unit.T / 0.1, 1) * same).sum(1).div(same.sum(1)).mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradients_of_both(
    model: nn.Module, loss: Any, strategy: str, x: Any = X, y: Any = Y, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the plain step and of a strategy, on copies of a model."""
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(2)
    loss(plain(x), y).backward()
    torch.manual_seed(2)
    with BigBatch(other, loss, strategy=strategy, **({"chunk_size": 5} | options)) as big:
        big.backward(x, y)
    return gradients(plain), gradients(other)
