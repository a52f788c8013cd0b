"""Data, models and loops of the tests of Trainer."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pinfeed.compat.trainer import Trainer

N = 44
IN = 6
OUT = 3
BATCH = 12
LOSS = nn.CrossEntropyLoss()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(N, IN, generator=generator), torch.randint(OUT, (N,), generator=generator)
    )


def loader(*, shuffle: bool = False) -> "DataLoader[Any]":
    return DataLoader(
        dataset(), batch_size=BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(3)
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT))


def trainer_of(model: nn.Module | None = None, **options: Any) -> Trainer:
    model = model or network()
    return Trainer(
        model,
        LOSS,
        torch.optim.Adam(model.parameters(), lr=0.01),
        options.pop("loader", None) or loader(),
        **options,
    )
