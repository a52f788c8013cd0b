"""The memory that an order keeps is in the plan of its loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pinfeed
from pinfeed import Config, Feeder, MiB, RaggedStore, rows
from pinfeed.errors import NotEnoughCPUMemory

N = 10_000
LENGTHS = np.arange(N) % 7 + 1
MASK = np.arange(N) % 3 == 0
INDICES = np.arange(0, N, 2)

MASK_BYTES = -(-N // 128) * (16 + 8)
"""A bit for each row, in chunks of 128, and a count for each chunk."""


def kept(plan: pinfeed.Plan) -> dict[str, int]:
    """Return the bytes that the plan counts for arrays of the order, by place."""
    return {item.place: item.total for item in plan.items if item.what == "arrays of the order"}


def kept_of(order: Any, source: Any = None, **how: Any) -> dict[str, int]:
    how = how or {"batch_size": 100}
    with Feeder(np.zeros(N) if source is None else source, rows=order, **how) as feeder:
        return kept(feeder.plan)


def mixture(*orders: Any) -> Any:
    names = [f"source {i}" for i in range(len(orders))]
    sizes = dict.fromkeys(names, N // len(orders))
    return rows.mixed(sizes, order=dict(zip(names, orders, strict=True)))


HALF = np.arange(N // 2) % 5 == 0
HALF_BYTES = -(-(N // 2) // 128) * 24


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (rows.where(MASK), MASK_BYTES),
        (rows.where(INDICES, rows.shuffled(1)), 8 * len(INDICES)),
        (rows.bucketed(LENGTHS, batch_size=100), 8 * N),
        (rows.bucketed(LENGTHS, batch_size=100, order=rows.where(MASK)), 8 * N + MASK_BYTES),
        (rows.per_rank(rows.where(MASK), rank=0, world_size=2), MASK_BYTES),
        (rows.where(MASK, rows.where(np.arange(10))), MASK_BYTES + 80),
        (rows.where(rows.split([0.5, 0.5])[0], rows.where(np.arange(10))), 80),
        (mixture(rows.where(HALF), rows.where(np.arange(20))), HALF_BYTES + 160),
        (
            rows.per_rank(mixture(rows.where(HALF), rows.shuffled(1)), rank=1, world_size=2),
            HALF_BYTES,
        ),
    ],
    ids=str,
)
def test_the_plan_counts_what_an_order_keeps(order: Any, expected: int) -> None:
    assert kept_of(order) == {"host": expected}


@pytest.mark.parametrize(
    "order",
    [
        rows.sequential(),
        rows.shuffled(1),
        rows.drawn(50),
        rows.block_shuffled(1, block_rows=100),
        rows.split([0.5, 0.5])[0],
        mixture(rows.shuffled(1), rows.sequential()),
    ],
    ids=str,
)
def test_other_orders_keep_nothing(order: Any) -> None:
    assert kept_of(order) == {}


def test_an_array_is_counted_once() -> None:
    half = rows.where(HALF)
    indices = np.arange(30)
    indices.flags.writeable = False
    assert kept_of(mixture(half, half)) == {"host": HALF_BYTES}
    # Read-only row indices are not copied, so two orders share them.
    assert kept_of(mixture(rows.where(indices), rows.where(indices))) == {"host": 240}
    assert kept_of(mixture(rows.where(indices[:20]), rows.where(indices[20:]))) == {"host": 240}


def test_mapped_row_indices_are_in_the_page_cache(tmp_path: Path) -> None:
    np.save(tmp_path / "indices.npy", INDICES)
    mapped = np.load(tmp_path / "indices.npy", mmap_mode="r")
    order = mixture(rows.where(mapped[: N // 4]), rows.where(np.arange(20)))
    assert kept_of(order) == {"page cache": 8 * (N // 4), "host": 160}


def test_ranks_of_a_feeder_keep_the_whole_order() -> None:
    ranks = pinfeed.Ranks(rank=1, world_size=4)
    assert kept_of(rows.where(MASK), batch_size=10, ranks=ranks) == {"host": MASK_BYTES}


@pytest.mark.parametrize("layout", ["padded", "packed", "offsets"])
def test_batches_of_ragged_rows_keep_their_lengths(layout: Any) -> None:
    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    store = RaggedStore(np.zeros(offsets[-1]), offsets, layout=layout)
    orders = {
        "padded": rows.element_batches(store.lengths, 70, padded=True, order=rows.where(MASK)),
        "packed": rows.packed(store.lengths, 70, order=rows.where(MASK)),
        "offsets": rows.element_batches(store.lengths, 70, order=rows.where(MASK)),
    }
    with Feeder(store, rows=orders[layout]) as feeder:
        assert kept(feeder.plan) == {"host": 8 * N + MASK_BYTES}


def test_limits_hold_with_what_an_order_keeps() -> None:
    source = np.zeros((N, 64))
    limit = MiB(3) + 3_000_000
    sizes = []
    for order in (rows.shuffled(1), rows.where(np.arange(N), rows.shuffled(1))):
        with Feeder(source, rows=order, config=Config(cpu_memory_limit=limit), depth=2) as feeder:
            assert feeder.plan.host_bytes <= limit
            sizes.append(feeder.plan.batch_size)
    # 80,000 bytes are 39 rows of 512 bytes in each of the four batches.
    assert 0 < sizes[0] - sizes[1] < 60
    order = rows.where(np.arange(N))
    with pytest.raises(NotEnoughCPUMemory, match="for arrays of the order"):
        Feeder(source, rows=order, config=Config(cpu_memory_limit=MiB(3) + 60_000), depth=0)


def test_samples_count_what_an_order_keeps() -> None:
    dataset = [np.zeros(3, np.float32)] * N
    order = rows.where(MASK, rows.shuffled(1))
    with pinfeed.wrap_dataset(dataset, batch_size=10, rows=order) as feeder:
        assert kept(feeder.plan) == {"host": MASK_BYTES}


def test_an_order_of_the_user_may_say_what_it_keeps() -> None:
    @dataclasses.dataclass(frozen=True)
    class Reversed:
        order: Any
        kept_arrays = (np.zeros(100),)

        def length(self, n_rows: int) -> int:
            return self.order.length(n_rows)

        def bind(self, n_rows: int, epoch: int) -> Any:
            at = self.order.bind(n_rows, epoch)
            return lambda positions: at(self.length(n_rows) - 1 - positions)

    order = rows.bucketed(LENGTHS, batch_size=100, order=Reversed(rows.shuffled(1)))
    assert kept_of(order) == {"host": 8 * N + 800}


@pytest.mark.parametrize("window", [1000, 200_000])
def test_the_plan_counts_large_windows(window: int) -> None:
    lengths = np.arange(300_000) % 7 + 1
    orders = [
        rows.packed(lengths, 64, window=window),
        rows.element_batches(lengths, 64, window=window),
        rows.bucketed(lengths, batch_size=100, window_batches=window // 100),
    ]
    for order in orders:
        size = 100 if order is orders[-1] else None
        offsets = np.append(0, lengths.cumsum())
        source = RaggedStore(np.arange(offsets[-1]), offsets, layout="packed")
        with Feeder(source, rows=order, batch_size=size, device="cpu") as feeder:
            found = [i.total for i in feeder.plan.items if i.what == "windows of the order"]
        assert bool(found) == (window > 1000)
        assert all(total > 50 * window for total in found)
