"""Orders that are made of block-shuffled orders: their windows are read ahead, within limits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.unwrapped import unwrapped

from pinfeed import Config, Feeder, MiB, NpyStore, RaggedStore, Ranks, concat, rows
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
        assert "read ahead into buffers" in unwrapped(feeder.plan)
        assert feeder.plan.host_bytes <= MiB(5.5)
        for epoch in range(2):
            found = np.concatenate([batch.numpy() for batch in feeder])
            numbers = order.bind(2 * N, epoch)(np.arange(order.length(2 * N)))
            np.testing.assert_array_equal(found, ROWS[numbers])


def test_single_rows_are_not_worth_windows(store: Store) -> None:
    config = Config(cpu_memory_limit=MiB(5.5), preferred_batch_size=50)
    order = rows.split([0.7, 0.3], order=BLOCKS)[0]
    with Feeder(store, config=config, rows=order, device="cpu") as feeder:
        assert "read ahead into buffers" not in unwrapped(feeder.plan)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["packed", "element_batches", "bucketed"])
def test_items_of_ragged_rows_are_prefetched(tmp_path: Path, name: str, world_size: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 4000)
    offsets = np.append(0, lengths.cumsum())
    np.save(tmp_path / "x.npy", np.arange(offsets[-1]))
    order = rows.block_shuffled(3, block_rows=64, window_blocks=4)
    made: Any = (
        rows.bucketed(lengths, batch_size=16, window_batches=8, order=order)
        if name == "bucketed"
        else getattr(rows, name)(lengths, 4096, window=300, order=order)
    )
    size = 16 if name == "bucketed" else None
    config = Config(cpu_memory_limit=MiB(5), preferred_batch_size=size, depth=1)
    for rank in range(world_size):
        ranks = Ranks("drop", rank=rank, world_size=world_size) if world_size > 1 else None
        options: Any = {"rows": made, "ranks": ranks, "device": "cpu"}
        with (
            RaggedStore(NpyStore(tmp_path / "x.npy"), offsets, layout="packed") as limited,
            RaggedStore(np.arange(offsets[-1]), offsets, layout="packed") as plain,
            Feeder(limited, config=config, **options) as feeder,
            Feeder(plain, batch_size=size, **options) as expected,
        ):
            assert "prefetched one window ahead" in unwrapped(feeder.plan)
            for batch, other in zip(feeder, expected, strict=True):
                assert torch.equal(batch.values, other.values)
                assert torch.equal(batch.cu_seqlens, other.cu_seqlens)
