"""A flush that fails in a training step, after which the program continues."""

from typing import Any

import numpy as np
import pytest
import torch
from support.table_loops import SGD, itself, step_ones, train_rows

from pinfeed import ArrayStore, HostEmbedding
from pinfeed.errors import WriteBackError
from pinfeed.native import library as native

BATCHES = [torch.tensor([row]) for row in (0, 1, 2, 0)]


class Refusing(ArrayStore):
    """Rows that cannot be written while the disk is full."""

    is_full = True

    def scatter(self, rows: Any, values: Any) -> None:
        if self.is_full:
            raise OSError("the disk is full")
        super().scatter(rows, values)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_cannot_continue_without_its_writes(depth: int) -> None:
    table = HostEmbedding(4, 2, store=Refusing(np.zeros((4, 2), "f4")), name="table")
    optimizer = SGD([table])
    n_steps = 0
    with pytest.raises(WriteBackError, match="an earlier write_back of this loop failed"):
        for batch in train_rows(BATCHES, {table: itself}, optimizer=optimizer, depth=depth):
            step_ones(optimizer, table(batch))
            n_steps += 1
            with pytest.raises(OSError, match="the disk is full"):
                table.flush_writes()
    assert n_steps == 1


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_a_cache_are_written_once_more_at_the_end(depth: int) -> None:
    """The rows stay on the device when a flush fails, so nothing is lost if the loop continues."""
    store = Refusing(np.zeros((4, 2), "f4"))
    table = HostEmbedding(4, 2, store=store, name="table", device_cache=1.0)
    optimizer = SGD([table])
    loop = train_rows(BATCHES, {table: itself}, optimizer=optimizer, depth=depth)
    for i, batch in enumerate(loop):
        step_ones(optimizer, table(batch))
        if i == 1:
            with pytest.raises(OSError, match="the disk is full"):
                table.flush_writes()
            store.is_full = False
    np.testing.assert_allclose(store.array[:, 0], [-0.2, -0.1, -0.1, 0], rtol=1e-6)
