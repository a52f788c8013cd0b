"""Batches of orders, samplers and iterables: their rows, and how an epoch is resumed."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.row_batches import ORDERS, Sampler, Unsized, drawn, rows_of, whole
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pinfeed import Feeder
from pinfeed.errors import ArgumentError, RowIndexError
from pinfeed.rows import per_rank, sequential, shuffled
from pinfeed.rows.order_batches import OrderBatches, RowBatches
from pinfeed.rows.orders import Order
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch

# -- batches of orders -----------------------------------------------------------------------------
SIZES = [
    (1, 1),
    (1, 5),
    (20, 1),
    (20, 20),
    (20, 21),
    (100, 7),
    (1000, 10),
    (40_000, 9000),
    (40_000, 17_000),
]
"""Numbers of rows, and of rows in a batch."""


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_batches_of_an_order_are_the_order_in_pieces(order: Order) -> None:
    for (n, batch_size), drop_last in itertools.product(SIZES, (False, True)):
        case = f"{n} rows, batch_size={batch_size}, drop_last={drop_last}"
        batches = OrderBatches(order, n, batch_size, drop_last)
        got, rows = rows_of(batches, 3), whole(order, n, 3).tolist()
        want = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        if drop_last and want and len(want[-1]) < batch_size:
            want.pop()
        assert got == want, case
        assert len(batches) == len(got), case
        for start in {0, 1, len(got) // 2, max(0, len(got) - 1), len(got)}:
            assert rows_of(batches, 3, start) == got[start:], f"{case}, from batch {start}"


def test_batches_are_the_users_to_change() -> None:
    batches = OrderBatches(shuffled(1), 100, 10)
    want = rows_of(batches)
    got = []
    for rows, _ in drawn(batches.epoch(0)):
        got.append(rows.tolist())
        rows[:] = -1
    assert got == want


class Broken:
    """A user's order that gives one row past the end."""

    def length(self, n_rows: int) -> int:
        return n_rows

    def bind(self, n_rows: int, epoch: int) -> Any:
        return lambda positions: positions + 1

    def __repr__(self) -> str:
        return "Broken()"


def test_rows_of_a_users_order_are_checked() -> None:
    assert isinstance(Broken(), Order)
    with pytest.raises(
        RowIndexError,
        match=re.escape("rows=Broken(): row 10 is out of range; expected 0 <= row < 10"),
    ):
        rows_of(OrderBatches(Broken(), 10, 4))


def test_different_orders_have_different_fingerprints() -> None:
    fingerprints = [
        OrderBatches(order, n, size, drop_last).fingerprint
        for order in (
            shuffled(1),
            shuffled(2),
            per_rank(shuffled(1), rank=0, world_size=2),
            per_rank(shuffled(1), rank=1, world_size=2),
        )
        for n in (10, 11)
        for size in (2, 3)
        for drop_last in (False, True)
    ]
    assert all(one != other for one, other in itertools.combinations(fingerprints, 2))


# -- samplers --------------------------------------------------------------------------------------
def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SequentialSampler(range(23)),
        lambda: RandomSampler(range(23), generator=generator()),
        lambda: RandomSampler(range(23), replacement=True, num_samples=40, generator=generator()),
        lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6], generator=generator()),
        lambda: SubsetRandomSampler(torch.tensor([3, 1, 4, 15, 9, 2, 6]), generator=generator()),  # type: ignore[arg-type]
        lambda: WeightedRandomSampler([0.1] * 22 + [5.0], 30, generator=generator()),
        lambda: DistributedSampler(range(23), num_replicas=3, rank=1, seed=4),  # type: ignore[arg-type]
    ],
)
def test_a_torch_sampler_gives_the_rows_that_it_gives_torch(make: Any, drop_last: bool) -> None:
    batches = SamplerBatches(make(), 23, 4, drop_last)
    want = [[int(row) for row in batch] for batch in BatchSampler(make(), 4, drop_last)]
    assert len(batches) == len(want)
    assert rows_of(batches) == want
    assert len(batches) == len(want)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_torch_batch_sampler_gives_whole_batches(drop_last: bool) -> None:
    sampler = BatchSampler(RandomSampler(range(23), generator=generator()), 4, drop_last)
    assert largest_batch(sampler) == 4
    batches = SamplerBatches(sampler, 23, None, drop_last=False)
    want = list(BatchSampler(RandomSampler(range(23), generator=generator()), 4, drop_last))
    assert len(batches) == len(want)
    assert rows_of(batches) == want


def test_a_sampler_gives_another_order_in_every_epoch() -> None:
    random = SamplerBatches(RandomSampler(range(50), generator=generator()), 50, 10, False)
    distributed = SamplerBatches(
        DistributedSampler(range(50), num_replicas=1, rank=0), 50, 10, False
    )  # type: ignore[arg-type]
    for batches in (random, distributed):
        epochs = [rows_of(batches, number) for number in range(3)]
        assert all(one != other for one, other in itertools.combinations(epochs, 2))
    assert rows_of(distributed, 1) == epochs[1], "set_epoch makes it repeatable"


def test_set_epoch_is_called_once_an_epoch() -> None:
    """Only a sampler with an epoch attribute gets one; owners of others may have set theirs."""
    for tells in (False, True):
        sampler: Any = Sampler([0, 1, 2])
        if tells:
            sampler.epoch = 0
        batches = SamplerBatches(sampler, 3, 2, False)
        rows_of(batches, 4)
        rows_of(batches, 5)
        assert sampler.epochs == ([4, 5] if tells else [])


ROWS = [4, 0, 3, 3, 1, 2, 0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        np.array(ROWS),
        np.array(ROWS, np.uint8),
        np.array(ROWS, ">i4"),
        np.array([ROWS, ROWS]).T[:, 0],
        np.array(ROWS[::-1])[::-1],
        torch.tensor(ROWS),
        Sampler(ROWS),
        Sampler(list(map(np.int32, ROWS))),
        Sampler(list(torch.tensor(ROWS))),
        Unsized(ROWS),
        dict.fromkeys([4, 0, 3, 1, 2]),
    ],
    ids=lambda rows: f"{type(rows).__name__}-{getattr(rows, 'dtype', '')}",
)
def test_single_rows_are_cut_into_batches(rows: Any, drop_last: bool) -> None:
    want = [4, 0, 3, 1, 2] if isinstance(rows, dict) else ROWS
    batches = SamplerBatches(rows, 5, 2, drop_last)
    expected = [want[i : i + 2] for i in range(0, len(want), 2)]
    got = rows_of(batches)
    assert got == expected[: -1 if drop_last else None]
    assert rows_of(batches, 1) == got
    for array, _ in drawn(batches.epoch(2)):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


def test_a_range_gives_rows() -> None:
    assert rows_of(SamplerBatches(range(2, 9, 3), 10, 2, False)) == [[2, 5], [8]]


BATCHES = [[0, 1], [2], [4, 4, 3]]


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize(
    "rows",
    [
        BATCHES,
        [np.array(batch) for batch in BATCHES],
        [np.array(batch, np.uint16) for batch in BATCHES],
        [torch.tensor(batch) for batch in BATCHES],
        [tuple(batch) for batch in BATCHES],
        np.array([np.array(batch) for batch in BATCHES], object),
        Sampler(BATCHES),
        Unsized([np.array(batch) for batch in BATCHES]),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_whole_batches_are_taken_as_they_are(rows: Any, batch_size: int | None) -> None:
    batches = SamplerBatches(rows, 5, batch_size, drop_last=True)
    assert rows_of(batches) == BATCHES
    if not isinstance(rows, Unsized):
        assert len(batches) == 3
    assert largest_batch(rows) == (None if isinstance(rows, (Sampler, Unsized)) else 3)


def test_the_rows_of_a_matrix_are_batches() -> None:
    rows = np.arange(6).reshape(3, 2)
    assert largest_batch(rows) == 2
    assert rows_of(SamplerBatches(rows, 6, None, False)) == rows.tolist()


def test_a_batch_may_be_empty() -> None:
    for empty in ([], np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)):
        assert rows_of(SamplerBatches([[1], empty, [2, 3]], 5, None, False)) == [[1], [], [2, 3]]


def test_rows_without_a_length_have_no_number_of_batches() -> None:
    with pytest.raises(TypeError, match=r"rows=Unsized has no len\(\)"):
        len(SamplerBatches(Unsized([1]), 2, 1, False))


def test_a_sampler_with_a_batch_size_may_give_single_rows() -> None:
    sampler = Sampler(ROWS)
    sampler.batch_size = 2  # type: ignore[attr-defined]
    batches = SamplerBatches(sampler, 5, 2, False)
    assert rows_of(batches) == [[4, 0], [3, 3], [1, 2], [0]]
    assert len(batches) == 4
    for size in (2, 3):
        with Feeder(np.arange(5), rows=sampler, batch_size=size, device="cpu") as feeder:
            found = [batch.tolist() for batch in feeder]
        assert found == [ROWS[i : i + size] for i in range(0, 7, size)]


def test_an_iterator_serves_one_epoch() -> None:
    batches = SamplerBatches(iter(ROWS), 5, 4, False)
    assert rows_of(batches) == [[4, 0, 3, 3], [1, 2, 0]]
    with pytest.raises(ArgumentError, match="is exhausted after one epoch"):
        rows_of(batches, 1)


# -- resuming --------------------------------------------------------------------------------------
SAMPLERS: list[Any] = [
    np.arange(30)[::-1].copy(),
    list(range(30)),
    [list(range(i, i + 3)) for i in range(0, 30, 3)],
    Sampler(list(range(30))),
    Unsized(list(range(30))),
    Unsized([np.arange(i, i + 3) for i in range(0, 30, 3)]),
    DistributedSampler(range(30), num_replicas=1, rank=0, seed=1),  # type: ignore[arg-type]
    BatchSampler(SequentialSampler(range(30)), 4, False),
]


def batches_of(rows: Any, n_rows: int = 30) -> SamplerBatches:
    whole_batches = largest_batch(rows) is not None or (
        isinstance(rows, Unsized)
        and any(isinstance(element, np.ndarray) for element in rows.elements)
    )
    return SamplerBatches(rows, n_rows, None if whole_batches else 4, drop_last=False)


@pytest.mark.parametrize("rows", SAMPLERS, ids=lambda rows: type(rows).__name__)
def test_a_resumed_epoch_is_the_rest_of_it(rows: Any) -> None:
    batches = batches_of(rows)
    epoch = [(batch.tolist(), checksum) for batch, checksum in drawn(batches.epoch(2))]
    for start in range(len(epoch) + 1):
        checksum = epoch[start - 1][1] if start else 0
        assert [
            (batch.tolist(), total)
            for batch, total in drawn(batches_of(rows).epoch(2, start, checksum))
        ] == epoch[start:]


@pytest.mark.parametrize("rows", [Sampler, Unsized], ids=lambda rows: rows.__name__)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_another_order_is_noticed(rows: Any, start: int) -> None:
    saved = [checksum for _, checksum in drawn(batches_of(rows(list(range(12)))).epoch(0))][
        start - 1
    ]
    swapped = [1, 0, *range(2, 12)]
    cut = list(range(4 * start - 1))
    late = [*range(4 * start - 1), 11, *range(4 * start, 12)]
    for other in (swapped, cut, [], *([late] if start < 3 else [])):
        with pytest.raises(
            ArgumentError,
            match=f"rows={rows.__name__} gave other rows for epoch 0 than when the state was saved",
        ):
            rows_of(batches_of(rows(other)), 0, start, saved)


def test_another_order_is_noticed_at_the_end_of_an_epoch() -> None:
    saved = [checksum for _, checksum in drawn(batches_of(np.arange(8)).epoch(0))][-1]
    assert rows_of(batches_of(np.arange(8)), 0, 2, saved) == []
    for other in ([0, 1, 2, 3, 4, 5, 7, 6], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]):
        with pytest.raises(ArgumentError, match="gave other rows for epoch 0"):
            rows_of(batches_of(np.array(other)), 0, 2, saved)


def test_a_resume_distinguishes_batches_that_hold_the_same_rows() -> None:
    saved = [checksum for _, checksum in drawn(batches_of([[0, 1], [2], [3]]).epoch(0))][1]
    assert rows_of(batches_of([[0, 1], [2], [3]]), 0, 2, saved) == [[3]]
    with pytest.raises(ArgumentError, match="gave other rows"):
        rows_of(batches_of([[0], [1, 2], [3]]), 0, 2, saved)


def test_an_iterator_that_is_used_up_cannot_be_resumed() -> None:
    batches = batches_of(iter(range(8)))
    (_, saved), *_ = drawn(batches.epoch(0))
    with pytest.raises(ArgumentError, match="gave other rows"):
        rows_of(batches, 0, 1, saved)


def test_the_order_after_a_matching_beginning_is_not_known() -> None:
    saved = next(checksum for _, checksum in drawn(batches_of(np.arange(12)).epoch(0)))
    assert rows_of(batches_of(np.array([0, 1, 2, 3, 9, 8])), 0, 1, saved) == [[9, 8]]


@pytest.mark.parametrize(
    "rows",
    [
        shuffled(1),
        sequential(),
        list(range(100)),
        np.arange(100)[::-1],
        [[1, 2], [3], [4, 5, 6]] * 9,
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [0, 3])
def test_batches_that_are_drawn_together_are_the_same(rows: Any, start: int) -> None:
    batches: RowBatches = (
        OrderBatches(rows, 100, 7)
        if isinstance(rows, Order)
        else SamplerBatches(rows, 100, 7, drop_last=False)
    )
    alone = list(drawn(batches.epoch(1)))
    checksum = alone[start - 1][1] if start else 0
    for n in (1, 2, 5, 100):
        groups = list(batches.epoch(1, start, checksum, n))
        assert all(len(group.batches) == n for group in groups[:-1])
        assert [part for group in groups for part in group.batches] == [
            (len(wanted), total) for wanted, total in alone[start:]
        ]
        assert (
            np.concatenate([group.rows() for group in groups]).tolist()
            == np.concatenate([wanted for wanted, _ in alone[start:]]).tolist()
        )


def test_batches_before_an_error_are_drawn() -> None:
    def rows() -> Iterator[list[int]]:
        yield from ([0], [1], [2], [3], [4])
        raise KeyError("five")

    draws = SamplerBatches(rows(), 10, None, drop_last=False).epoch(0, batches_per_slot=3)
    assert [draw.rows().tolist() for draw in itertools.islice(draws, 2)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(KeyError, match="five"):
        next(draws)
