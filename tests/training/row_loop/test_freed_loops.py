"""Loops over train_rows that the garbage collector ends."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import HostEmbedding, PinnedStore, RowOptimizer, train_rows
from pinfeed.training.row_loop.loop_table import LoopTable

STEPS = 3


class Run:
    """A training run in a reference cycle, as in most trainers."""

    def __init__(self, table: HostEmbedding, **options: Any) -> None:
        self.table = table
        self.optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
        ids = [torch.tensor([i, i + 1]) for i in range(10)]
        self.loop = train_rows(
            ids, {table: lambda x: x}, optimizer=self.optimizer, device="cpu", **options
        )
        self.batches = iter(self.loop)
        self.callbacks = [self.step]

    def step(self) -> None:
        self.table(next(self.batches)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("keeps_table", [True, False])
@pytest.mark.parametrize("cache", [None, 64])
@pytest.mark.parametrize("options", [{}, {"depth": 0}, {"depth": 2}])
def test_the_last_step_counts_if_a_cycle_of_references_is_freed(
    options: dict[str, Any], cache: int | None, keeps_table: bool
) -> None:
    store = PinnedStore.zeros((11, 2), pin=False)
    table = HostEmbedding(11, 2, name="items", store=store, device_cache=cache)
    run = Run(table, **options)
    for _ in range(STEPS):
        run.step()
    # The threads of the loop are freed together with a table that only the run has.
    kept = [table] if keeps_table else []
    del run, table
    gc.collect()
    wanted = torch.zeros(11)
    for i in range(STEPS):
        wanted[i : i + 2] -= 0.1
    assert torch.equal(torch.as_tensor(store.array)[:, 0], wanted)
    for table in kept:
        # The table is free for another loop.
        Run(table).step()
    gc.collect()


def test_the_last_step_is_in_the_file_of_a_freed_table(tmp_path: Path) -> None:
    path = tmp_path / "items.npy"
    run = Run(HostEmbedding(11, 2, name="items", store=path), depth=0)
    run.table.store.scatter(np.arange(11), np.zeros((11, 2), np.float32))
    run.step()
    del run
    gc.collect()
    assert np.load(path)[:3, 0].tolist() == [np.float32(-0.1), np.float32(-0.1), 0]


def test_a_loop_that_is_freed_while_a_table_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PinnedStore.zeros((11, 2), pin=False)
    table = HostEmbedding(11, 2, name="items", store=store)
    Run(table, depth=1).step()
    changed_values = LoopTable.changed_values

    def freeing(used: LoopTable) -> Any:
        gc.collect()
        return changed_values(used)

    monkeypatch.setattr(LoopTable, "changed_values", freeing)
    table.flush_writes()
    monkeypatch.undo()
    assert store.array[:3, 0].tolist() == [np.float32(-0.1), np.float32(-0.1), 0]
    gc.collect()
    assert store.array[:3, 0].tolist() == [np.float32(-0.1), np.float32(-0.1), 0]
