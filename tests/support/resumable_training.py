"""A training run that can be saved and resumed."""

import pathlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pinfeed import HostEmbedding, RowOptimizer, checkpoint, train_rows

N = 40
DIM = 6
SAMPLES = 60
SIZE = 7


class Training:
    """A run: tables, a dense model with dropout, optimizers, a scheduler, a shuffling loader."""

    def __init__(
        self,
        *,
        depth: int = 2,
        generator: bool = False,
        workers: int = 0,
        path: pathlib.Path | None = None,
        n: int = SAMPLES,
        drop_last: bool = False,
        device_cache: float | None = None,
    ) -> None:
        torch.manual_seed(7)
        ids, y = torch.randint(0, N, (n, 3)), torch.randn(n)
        own = torch.Generator().manual_seed(3) if generator else None
        samples = TensorDataset(ids, y)
        self.loader = DataLoader(
            samples,
            batch_size=SIZE,
            shuffle=True,
            generator=own,
            num_workers=workers,
            drop_last=drop_last,
        )
        self.table = HostEmbedding(
            N,
            DIM,
            name="words",
            store=None if path is None else path / "words.npy",
            device_cache=device_cache,
        )
        self.rows = RowOptimizer(torch.optim.Adam, [self.table], lr=0.05, amsgrad=True)
        self.model = nn.Sequential(nn.Dropout(0.3), nn.Linear(DIM, 1))
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.rows, 5, 0.5)
        self.batches = train_rows(
            self.loader, {self.table: lambda batch: batch[0]}, optimizer=self.rows, depth=depth
        )
        self.losses: list[float] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "rows": self.rows,
            "model": self.model,
            "dense": self.dense,
            "scheduler": self.scheduler,
            "batches": self.batches,
        }

    def run(
        self,
        until_epoch: int,
        *,
        save_at: int = -1,
        path: pathlib.Path | None = None,
        stop: bool = False,
    ) -> "Training":
        for _ in range(self.batches.epoch, until_epoch):
            for ids, y in self.batches:
                loss = ((self.model(self.table(ids).sum(1))[:, 0] - y) ** 2).mean()
                loss.backward()
                for optimizer in (self.rows, self.dense):
                    optimizer.step()
                    optimizer.zero_grad()
                self.scheduler.step()
                self.losses.append(loss.item())
                if len(self.losses) == save_at:
                    assert path is not None
                    checkpoint.save(path, step=save_at, **self.parts)
                    if stop:
                        return self
        return self

    @property
    def result(self) -> list[np.ndarray]:
        tables = next(iter(self.rows.tables.values())).stores
        stores = [self.table.store, *tables]
        found = []
        for store in stores:
            out = np.empty((store.n_rows, *store.row_shape), store.dtype)
            store.gather(np.arange(store.n_rows), out)
            found.append(out)
        return [*found, *(p.detach().numpy() for p in self.model.parameters())]
