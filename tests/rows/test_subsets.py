"""where() and split(): the selected rows, each once, in any order; disjoint parts."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_batches import rows_of, whole

from pinfeed.errors import ArgumentError, PinfeedError
from pinfeed.rows import block_shuffled, drawn, per_rank, sequential, shuffled, split, where
from pinfeed.rows.order_batches import OrderBatches, RankBatches
from pinfeed.rows.orders import Order, known
from pinfeed.rows.ranks import Ranks

INNER = [sequential(), shuffled(1), block_shuffled(1, block_rows=8, window_blocks=2), drawn(30)]


@given(
    n=st.integers(1, 3000),
    share=st.sampled_from([0.001, 0.1, 0.5, 0.999]),
    order=st.sampled_from(INNER),
)
def test_where_selects_the_rows_of_a_mask(n: int, share: float, order: Order) -> None:
    mask = np.random.default_rng(n).random(n) < share
    mask[n // 2] = True
    selected = np.flatnonzero(mask)
    expected = selected[whole(order, len(selected), 3)]
    assert np.array_equal(whole(where(mask, order), n, 3), expected)
    assert np.array_equal(whole(where(selected, order), n, 3), expected)


@given(share=st.sampled_from([0.002, 0.01, 0.3, 1]), data=st.data())
def test_any_positions_of_a_mask_have_their_rows(share: float, data: st.DataObject) -> None:
    """Positions that are close together, and others, are looked up in different ways."""
    mask = np.random.default_rng(0).random(20_000) < share
    selected = np.flatnonzero(mask)
    at = where(mask).bind(len(mask), 0)
    begin = data.draw(st.integers(0, len(selected) - 1))
    close = np.arange(begin, min(begin + data.draw(st.integers(0, 300)), len(selected)))
    some = st.lists(st.integers(0, len(selected) - 1), max_size=20)
    for positions in (close, close[::-1], np.array(data.draw(some), np.int64)):
        assert np.array_equal(at(positions), selected[positions])


def test_where_keeps_the_sequence_of_row_indices() -> None:
    rows = np.random.default_rng(0).permutation(1000)[:100]
    assert np.array_equal(whole(where(rows), 1000), rows)
    assert known(where(rows)).most_copies == 1
    assert known(where(rows, drawn(30))).most_copies is None


def test_later_changes_of_a_mask_have_no_effect() -> None:
    mask = np.arange(1000) % 3 == 0
    rows = np.flatnonzero(mask)
    orders = [where(mask, shuffled(1)), where(rows, shuffled(1))]
    expected = whole(orders[0], 1000)
    mask[:] = True
    rows[:] = 0
    for order in orders:
        assert np.array_equal(whole(order, 1000), expected)


def test_a_map_of_row_indices_is_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(0, 1000, 7))
    order: Any = where(np.load(tmp_path / "rows.npy", mmap_mode="r"), shuffled(1))
    assert isinstance(order.rows.indices.values.base, np.memmap)
    assert np.array_equal(np.sort(whole(order, 1000)), np.arange(0, 1000, 7))


def test_equal_subsets_are_equal() -> None:
    mask = np.arange(100) % 3 == 0
    assert where(mask) == where(mask.copy()) != where(~mask)
    assert where(mask) != where(mask, shuffled(1))
    assert repr(where(mask)) == repr(where(mask.copy())) != repr(where(~mask))
    assert hash(where(mask)) == hash(where(mask.copy()))
    again = pickle.loads(pickle.dumps(where(mask, shuffled(1))))
    assert np.array_equal(whole(again, 100), whole(where(mask, shuffled(1)), 100))


def test_a_large_mask_takes_less_than_two_bits_per_row() -> None:
    n = 1 << 24
    mask = np.zeros(n, bool)
    mask[:: 1 << 10] = True
    order: Any = where(mask, shuffled(1))
    assert sum(array.nbytes for array in order.kept_arrays) < n * 2 / 8
    rows = order.bind(n, 0)(np.arange(1 << 14))
    assert np.array_equal(np.sort(rows), np.arange(0, n, 1 << 10))


@given(
    n=st.integers(1, 2000),
    sizes=st.sampled_from([(0.9, 0.1), (0.5, 0.25, 0.25), (1.0,), (0.1,) * 10]),
    block_rows=st.sampled_from([1, 7, 5000]),
    seed=st.integers(),
)
def test_a_split_has_every_row_in_one_part(n: int, sizes: Any, block_rows: int, seed: int) -> None:
    parts = split(sizes, seed, block_rows=block_rows)
    found = [whole(part, n) for part in parts]
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(n))
    for part, rows, size in zip(parts, found, sizes, strict=True):
        assert abs(len(rows) - size * n) <= 2 * min(block_rows, n)
        assert np.array_equal(whole(part, n, 5), rows)
        shuffle = whole(where(part, shuffled(1)), n, 5)
        assert np.array_equal(np.sort(shuffle), np.sort(rows))
        assert known(part).most_copies == 1


def test_a_split_by_blocks_keeps_blocks_together() -> None:
    train, valid = split([0.8, 0.2], 1, block_rows=10)
    blocks = [set((whole(part, 1000) // 10).tolist()) for part in (train, valid)]
    assert [len(one) for one in blocks] == [80, 20]
    assert not blocks[0] & blocks[1]


def test_a_split_by_numbers_of_rows_is_exact() -> None:
    parts = split({"train": 70, "valid": 20, "test": 10}, 1)
    assert {name: part.length(100) for name, part in parts.items()} == {
        "train": 70,
        "valid": 20,
        "test": 10,
    }


def test_rows_are_equally_often_in_each_part_over_seeds() -> None:
    counts = np.zeros(100)
    for seed in range(400):
        counts += np.bincount(whole(split([0.75, 0.25], seed)[1], 100), minlength=100)
    # Chi-square with 99 degrees of freedom; less than one in a million is above 180.
    assert ((counts - 100) ** 2 / 75).sum() < 180


def test_a_billion_rows_are_split_without_memory() -> None:
    train, valid = split([0.999, 0.001], 1)
    assert valid.length(10**9) == 10**6
    rows = where(train, shuffled(2)).bind(10**9, 0)(np.arange(1000))
    assert len(np.unique(rows)) == 1000


ORDERS: dict[str, Order] = {
    "where": where(np.arange(91) % 3 != 0, shuffled(1)),
    "blocks": where(np.arange(91) % 3 != 0, block_shuffled(1, block_rows=4)),
    "split": where(split([0.9, 0.1], 3)[0], shuffled(1)),
    "split by blocks": split([0.9, 0.1], 3, block_rows=4)[0],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_subsets_resume_at_every_batch(order: Order) -> None:
    batches = OrderBatches(order, 91, 4)
    expected = rows_of(batches, 2)
    for start in range(len(expected) + 1):
        assert rows_of(batches, 2, start) == expected[start:]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_ranks_of_any_number_share_a_subset(order: Order) -> None:
    left = sorted(whole(order, 91, 1).tolist())
    state: Any = None
    for world_size in (1, 3, 2, 5):
        for rank in range(world_size):
            batches = RankBatches(order, 91, 4, False, Ranks("join"), rank, world_size)
            start = 0 if state is None else batches.resume(state, len(batches))[0]
            for batch in rows_of(batches, 1, start)[: None if world_size == 5 else 2]:
                for row in batch:
                    left.remove(row)
        source = batches.fingerprint
        state = {"epoch": 1, "source": source, **batches.state(1, start + 2)}
    assert left == []


# A run that is resumed under a later version must continue in the same order.
GOLDEN = [
    (where(np.arange(91) % 3 != 0, shuffled(1)), [61, 20, 53, 64, 62, 47, 28, 50]),
    (split([0.9, 0.1], seed=3)[1], [42, 9, 6, 35, 10, 12, 38, 64]),
    (split([0.5, 0.5], seed=3, block_rows=4)[1], [8, 9, 10, 11, 84, 85, 86, 87]),
]


@pytest.mark.parametrize(("order", "rows"), GOLDEN)
def test_the_order_of_a_subset_stays_the_same(order: Order, rows: list[int]) -> None:
    assert whole(order, 91)[:8].tolist() == rows


MASK = np.arange(10) < 5
REFUSED: list[tuple[str, Any]] = [
    ("selects no row", lambda: where(np.zeros(10, bool))),
    ("a mask of shape", lambda: where(np.zeros((2, 5), bool))),
    ("at least one row", lambda: where([])),
    ("a mask of shape", lambda: where([0.5])),
    ("row 3 occurs twice", lambda: where([3, 1, 3])),
    ("row -1 is out of range", lambda: where([3, -1])),
    ("mask of 10 rows", lambda: where(MASK).length(11)),
    ("mask of 10 rows", lambda: where(MASK).bind(9, 0)),
    ("has row 9", lambda: where([1, 9]).length(9)),
    ("expected an order", lambda: where(MASK, "shuffled")),  # type: ignore[arg-type]
    ("share of one rank", lambda: where(MASK, per_rank(sequential(), rank=0, world_size=2))),
    ("add up to 0.9", lambda: split([0.5, 0.4])),
    ("above 0", lambda: split([1.0, 0.0])),
    ("at least one part", lambda: split([])),
    ("one per part", lambda: split(0.9)),  # type: ignore[call-overload]
    ("at least 0", lambda: split([1.5, -0.5])),
    ("whole number", lambda: split([1.0], seed=0.5)),  # type: ignore[call-overload]
    ("block_rows=0", lambda: split([1.0], block_rows=0)),
    ("parts of 30 rows", lambda: split([10, 20])[0].length(31)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_bad_arguments_of_subsets_are_refused(message: str, call: Any) -> None:
    with pytest.raises(PinfeedError, match=message):
        call()


def test_bad_arguments_of_where_are_argument_errors() -> None:
    with pytest.raises(ArgumentError):
        where([3, 1, 3])
