"""Loops over sharded tables on ranks that are threads, and the dense loop of one process."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.simranks import RankThreads

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    RowOptimizer,
    ShardedEmbedding,
    train_rows,
)

SHAPES = (11, 2), (7, 3)
SGD = torch.optim.SGD
ADAM = torch.optim.Adam
Ids = list[int]
Batch = list[tuple[Ids, Ids]]
"""The ids that each rank looks up in each table."""


def joined(batch: Batch) -> list[torch.Tensor]:
    return [
        torch.tensor([i for of_rank in batch for i in of_rank[t]], dtype=torch.int64)
        for t in range(len(SHAPES))
    ]


def trained(
    table: HostEmbedding, batches: Sequence[torch.Tensor], made: Any = ADAM, **options: Any
) -> list[float]:
    """Train with mean losses, and return them."""
    optimizer, losses = RowOptimizer(made, [table], lr=0.1), []
    for ids in train_rows(
        batches, {table: lambda ids: ids}, optimizer=optimizer, device="cpu", **options
    ):
        loss = table(ids).pow(2).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


N = 8
BATCHES = [[torch.tensor([rank, i, 7]) for rank in range(2)] for i in range(6)]


class Failing(ArrayStore):
    """A store whose row 2 cannot be read or written: row 4 of the table, on two ranks."""

    def __init__(self, n_rows: int, what: str) -> None:
        super().__init__(np.zeros((n_rows, 2), "f4"))
        self.what = what

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        if self.what == "gather" and 2 in rows:
            raise OSError("cannot read row 4")

    def scatter(self, rows: Any, values: Any) -> None:
        if self.what == "scatter" and 2 in rows:
            raise OSError("cannot write row 4")
        super().scatter(rows, values)


class RankLoop:
    """A loop on two ranks in which rank 0 does something of its own."""

    def __init__(self, ranks: RankThreads, rank: int, *, store: str = "", **options: Any) -> None:
        self.rank = rank
        self.group = ranks.groups[rank]
        self.table = ShardedEmbedding(
            N,
            2,
            process_group=self.group,
            name="table",
            store=Failing(4, store if rank == 0 else ""),
        )
        self.optimizer = RowOptimizer(SGD, [self.table], lr=1.0)
        self.options: dict[str, Any] = {"depth": 2, "device": "cpu", **options}

    def run(self, loader: Any = None, ids_of: Any = lambda ids: ids) -> int:
        """Run the loop, and return the number of batches that were stepped."""
        n = 0
        mine = [batch[self.rank] for batch in BATCHES]
        for i, ids in enumerate(
            train_rows(
                loader or mine, {self.table: ids_of}, optimizer=self.optimizer, **self.options
            )
        ):
            self.table(ids).sum().backward()
            if self.training_step(i):
                break
            self.optimizer.step()
            self.optimizer.zero_grad()
            n += 1
        return n

    def training_step(self, i: int) -> bool:
        return False
