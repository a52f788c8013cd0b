"""Batches bounded by elements: they equal those of a plain loop, and bad input is refused."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ragged import plain_batches

from pinfeed import ArgumentError, Feeder, RaggedStore, rows
from pinfeed.rows import element_batches
from pinfeed.rows.row_lengths import RowLengths, most_in_blocks
from pinfeed.rows.sampler_batches import largest_batch
from pinfeed.rows.shared_batches import shared_batches

LENGTHS = np.array([3, 0, 5, 1, 1, 4, 2, 0, 0, 5, 3, 1])


def epoch_of(order: Any, n: int, epoch: int) -> list[int]:
    return np.asarray(order.bind(n, epoch)(np.arange(order.length(n)))).tolist()


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=40),
    st.integers(0, 30),
    st.none() | st.integers(1, 6),
    st.sampled_from([None, rows.shuffled(1), rows.block_shuffled(2, block_rows=3)]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 50),
)
@settings(max_examples=80)
def test_batches_equal_those_of_a_plain_loop(
    lengths: list[int],
    more: int,
    batch_size: int | None,
    order: Any,
    padded: bool,
    drop_last: bool,
    run_rows: int,
) -> None:
    most = max(1, *lengths, more) + more
    batches = element_batches(
        lengths, most, batch_size=batch_size, order=order, padded=padded, drop_last=drop_last
    )
    with pytest.MonkeyPatch.context() as patch:
        # Batches also lie across the runs in which an order is asked.
        patch.setattr("pinfeed.rows.ragged_batches._RUN_ROWS", run_rows)
        for epoch in (0, 1):
            batches.set_epoch(epoch)
            got = [batch.tolist() for batch in batches]
            assert got == plain_batches(
                lengths,
                epoch_of(order or rows.sequential(), len(lengths), epoch),
                most,
                batch_size=batch_size,
                padded=padded,
                drop_last=drop_last,
            )
            assert batches.count() == batches.count(epoch) == len(got)
            assert all(len(batch) <= batches.batch_size for batch in got)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(1, 20))
@settings(max_examples=80)
def test_bounds_are_those_of_all_subsets(lengths: list[int], most: int) -> None:
    table = RowLengths(np.array(lengths))
    most = max(most, *lengths)
    subsets = [
        subset for n in range(1, len(lengths) + 1) for subset in itertools.combinations(lengths, n)
    ]
    for n in range(1, len(lengths) + 1):
        assert table.most_elements(n) == max(sum(s) for s in subsets if len(s) == n)
    fitting = [len(s) for s in subsets if sum(s) <= most]
    assert table.most_rows(most, padded=False, repeats=False) == max(fitting)
    fitting = [len(s) for s in subsets if len(s) * max(s) <= most]
    assert table.most_rows(most, padded=True, repeats=False) == max(fitting)
    assert table.most_rows(most, padded=True, repeats=True) >= max(fitting)
    assert table.mean == pytest.approx(np.mean(lengths))


def test_blocks_of_many_rows_have_a_close_bound() -> None:
    lengths = np.random.default_rng(0).lognormal(7, 0.5, 60_000).astype(int)
    offsets = np.cumsum([0, *lengths])
    usual = 16 * 512 * lengths.mean()
    assert usual < most_in_blocks(offsets, n_blocks=16, block_rows=512) < 1.2 * usual
    # The longest rows together are far more.
    assert RowLengths(lengths).most_elements(16 * 512) > 1.9 * usual


def test_lengths_too_long_for_a_table_have_the_same_bounds() -> None:
    table = RowLengths(np.array([1 << 21, 3, 3]))
    assert [table.most_elements(n) for n in (1, 2, 3)] == [1 << 21, (1 << 21) + 3, (1 << 21) + 6]
    assert (table.longest, table.n_rows) == (1 << 21, 3)


def test_few_batches_exceed_the_usual_elements() -> None:
    lengths = np.repeat([10, 20, 1000], [9000, 989, 11])
    table = RowLengths(lengths)
    rng = np.random.default_rng(0)
    batches = rng.permuted(np.tile(lengths, (20, 1)), axis=1).reshape(-1, 5)
    assert table.usual_elements(5, padded=True) == 5 * 20
    assert np.mean(batches.max(axis=1) > 20) < 1 / 64
    assert table.usual_elements(50, padded=True) == 50 * 1000
    usual = table.usual_elements(50, padded=False)
    assert np.mean(batches.reshape(-1, 50).sum(axis=1) > usual) < 1 / 64
    assert usual < 50 * 110


def test_the_largest_batch_is_known_but_not_their_number() -> None:
    batches = element_batches(LENGTHS, 6)
    # The rows without elements, those with one, and the row with two.
    assert largest_batch(batches) == batches.batch_size == 7
    with pytest.raises(TypeError):
        len(batches)  # type: ignore[arg-type]
    assert element_batches(LENGTHS, 6, order=rows.per_rank(rows.shuffled(), rank=0, world_size=2))
    text = repr(element_batches(LENGTHS, 6, batch_size=2))
    assert "max_elements=6, order=Sequential(), window=None" in text
    assert "most_rows=2, padded=False" in text


def test_lengths_are_copied_and_may_be_a_tensor() -> None:
    mine = torch.tensor([2, 2, 2])
    batches = element_batches(mine, 4)
    mine[:] = 5
    assert [batch.tolist() for batch in batches] == [[0, 1], [2]]
    with pytest.raises(ValueError, match="read-only"):
        batches.lengths[0] = 1


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1, 9, 2], {}, "row 1 has 9 elements, but max_elements=8"),
        ([1, -2], {}, "row 1 has -2 elements"),
        ([], {}, "lengths: got shape"),
        ([1.5], {}, "of float64"),
        ([[1]], {}, "shape (1, 1)"),
        ([[1], [1, 2]], {}, "lengths:"),
        ([1], {"batch_size": 0}, "batch_size=0"),
        ([1], {"order": [0]}, "order=[0]: expected an order"),
        ([1], {"padded": 1}, "padded=1"),
        ([1], {"drop_last": "no"}, "drop_last='no'"),
    ],
)
def test_bad_input_is_refused(lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        element_batches(lengths, 8, **options)


def test_max_elements_is_a_whole_number() -> None:
    with pytest.raises(ArgumentError, match="max_elements=0"):
        element_batches([1], 0)


def test_a_feeder_follows_the_epoch_and_resumes_the_batches() -> None:
    order = rows.shuffled(5)
    want = [
        plain_batches(
            LENGTHS, epoch_of(order, 12, e), 7, batch_size=None, padded=False, drop_last=False
        )
        for e in range(3)
    ]

    def make(**options: Any) -> Feeder:
        batches = element_batches(LENGTHS, 7, order=order, **options)
        return Feeder(np.arange(12), rows=batches, device="cpu", depth=2)

    with make() as feeder:
        assert [[batch.tolist() for batch in feeder] for _ in range(2)] == want[:2]
        for i, _ in enumerate(feeder):
            if i == 1:
                break
        state = feeder.state_dict()
    with make() as feeder:
        feeder.load_state_dict(state)
        assert [batch.tolist() for batch in feeder] == want[2][2:]
    with make(batch_size=1) as feeder, pytest.raises(ArgumentError, match="another feeder"):
        feeder.load_state_dict(state)


def test_a_feeder_refuses_lengths_of_other_rows() -> None:
    with pytest.raises(ArgumentError, match="has 12 lengths, but the source has 13 rows"):
        Feeder(np.arange(13), rows=element_batches(LENGTHS, 7), device="cpu")
    with pytest.raises(ArgumentError, match="leave out batch_size"):
        Feeder(np.arange(12), rows=element_batches(LENGTHS, 7), batch_size=3, device="cpu")
    with pytest.raises(ArgumentError, match=r"give element_batches\(\.\.\., drop_last=True\)"):
        Feeder(np.arange(12), rows=element_batches(LENGTHS, 7), drop_last=True, device="cpu")


def test_windows_begin_at_the_position_of_the_first_batch() -> None:
    order = rows.block_shuffled(1, block_rows=2, window_blocks=2)
    batches = element_batches(LENGTHS, 7, order=order)
    counts = [len(batch) for batch in batches]
    found, start, stop = shared_batches(batches, None).windows(0, 2)
    assert found is not None
    assert (start, stop) == (sum(counts[:2]), 12)
    assert element_batches(LENGTHS, 7).windows(0, 2) == (None, 0, 0)


def test_the_bound_holds_for_shorter_rows_only() -> None:
    batches = element_batches(LENGTHS, 7)
    assert batches.most_elements(padded=False) == 7
    assert batches.most_elements(padded=True) is None
    assert element_batches(LENGTHS, 7, padded=True).most_elements(padded=True) == 7


def test_a_feeder_refuses_lengths_below_those_of_its_rows() -> None:
    store = RaggedStore(np.arange(30), [0, 17, 30])
    with pytest.raises(
        ArgumentError, match="has length 3 for row 0, but the row has 17 elements in"
    ):
        Feeder(store, rows=element_batches([3, 20], 20))
    with pytest.raises(ArgumentError, match=r"has 3 lengths, but .* has 2 rows"):
        Feeder(store, rows=element_batches([17, 20, 1], 20))
    with Feeder(store, rows=element_batches([20, 20], 40)) as feeder:
        assert len(list(feeder)) == 1
