"""Orders that are made of block-shuffled orders: their windows are read ahead, within limits."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.unwrapped import unwrapped

from pinfeed import Config, Feeder, MiB, NpyStore, concat, rows
from pinfeed.rows.orders import Order
from pinfeed.stores.store import Store

N, WIDTH = 6000, 64
ROWS = np.arange(2 * N * WIDTH, dtype=np.float32).reshape(2 * N, WIDTH)
# A block has 128 KiB; 64 KiB are worth a seek.
BLOCKS = rows.block_shuffled(3, block_rows=512, window_blocks=2)
HALVES = {"a": N, "b": N}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The rows in two files."""
    np.save(tmp_path / "0.npy", ROWS[:N])
    np.save(tmp_path / "1.npy", ROWS[N:])
    with concat([NpyStore(tmp_path / "0.npy"), NpyStore(tmp_path / "1.npy")]) as found:
        yield found


@pytest.mark.parametrize(
    "order",
    [
        rows.mixed(HALVES, {"a": 2, "b": 1}, order=BLOCKS),
        rows.mixed(HALVES, {"a": 1, "b": 3}, order=BLOCKS, batch_size=50, until=3000),
        rows.mixed(HALVES, order={"a": BLOCKS, "b": rows.shuffled(1)}, randomly=True),
        rows.bucketed(np.arange(2 * N) % 97, batch_size=50, window_batches=7, order=BLOCKS),
        rows.split([0.7, 0.3], order=BLOCKS, block_rows=1024)[0],
        rows.where(np.arange(2 * N) < 11_000, BLOCKS),
    ],
    ids=lambda order: type(order).__name__,
)
def test_windows_are_read_ahead(store: Store, order: Order) -> None:
    config = Config(cpu_memory_limit=MiB(5.5), preferred_batch_size=50)
    with Feeder(store, config=config, rows=order, device="cpu") as feeder:
        assert "read ahead window by window" in unwrapped(feeder.plan)
        assert feeder.plan.host_bytes <= MiB(5.5)
        for epoch in range(2):
            found = np.concatenate([batch.numpy() for batch in feeder])
            numbers = order.bind(2 * N, epoch)(np.arange(order.length(2 * N)))
            np.testing.assert_array_equal(found, ROWS[numbers])


def test_single_rows_are_not_worth_windows(store: Store) -> None:
    config = Config(cpu_memory_limit=MiB(5.5), preferred_batch_size=50)
    order = rows.split([0.7, 0.3], order=BLOCKS)[0]
    with Feeder(store, config=config, rows=order, device="cpu") as feeder:
        assert "read ahead window by window" not in unwrapped(feeder.plan)
