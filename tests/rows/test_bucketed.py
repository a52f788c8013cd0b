"""Buckets have every row once, in the batches of a plain loop that sorts windows by length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import ArgumentError, Feeder, Ranks, rows, wrap_dataset

LENGTHS = np.random.default_rng(0).integers(0, 50, 103)


def epoch_of(order: Any, epoch: int) -> list[int]:
    return np.asarray(order.bind(103, epoch)(np.arange(103))).tolist()


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=60)
def test_batches_are_those_of_sorted_windows(size: int, n_batches: int, epoch: int) -> None:
    base = rows.shuffled(4)
    order = rows.bucketed(LENGTHS, batch_size=size, window_batches=n_batches, order=base, seed=2)
    found = epoch_of(order, epoch)
    assert sorted(found) == list(range(103))
    given_rows = epoch_of(base, epoch)
    for begin in range(0, 103, size * n_batches):
        window = given_rows[begin : begin + size * n_batches]
        full = window[: len(window) // size * size]
        by_length = sorted(full, key=lambda row: -LENGTHS[row])
        want = [by_length[i : i + size] for i in range(0, len(full), size)]
        part = found[begin : begin + len(full)]
        assert sorted(part[i : i + size] for i in range(0, len(full), size)) == sorted(want)
        assert found[begin + len(full) : begin + len(window)] == window[len(full) :]


def test_epochs_and_seeds_shuffle_the_batches() -> None:
    def of(seed: int, epoch: int) -> list[int]:
        order = rows.bucketed(LENGTHS, batch_size=4, order=rows.sequential(), seed=seed)
        return epoch_of(order, epoch)

    assert of(1, 0) != of(1, 1)
    assert of(1, 0) != of(2, 0)
    assert of(1, 0) == of(1, 0)


def test_padding_is_less_with_buckets() -> None:
    padding = rows.bucketed(LENGTHS, batch_size=8).padding()
    assert padding.bucketed < padding.unbucketed / 2
    assert rows.bucketed([3, 3, 3, 3], batch_size=2).padding() == (0.0, 0.0)
    assert rows.bucketed([1, 3], batch_size=2).padding().bucketed == pytest.approx(1 / 3)


def test_orders_of_equal_lengths_are_equal() -> None:
    order = rows.bucketed(LENGTHS, batch_size=8)
    assert order == rows.bucketed(LENGTHS.tolist(), batch_size=8)
    assert repr(order) != repr(rows.bucketed(LENGTHS + 1, batch_size=8))
    assert order.most_copies == 1
    assert rows.bucketed(LENGTHS, batch_size=8, order=rows.drawn(40)).most_copies is None


def test_ranks_divide_and_resume_the_order() -> None:
    order = rows.bucketed(LENGTHS, batch_size=6, window_batches=3, seed=1)
    state = None
    found: list[int] = []
    for world_size in (1, 3, 2, 5):
        for rank in range(world_size):
            ranks = Ranks("join", rank=rank, world_size=world_size)
            with Feeder(np.arange(103), batch_size=3, rows=order, ranks=ranks, device="cpu") as one:
                if state is not None:
                    one.load_state_dict(state)
                for i, batch in enumerate(one, 1):
                    found += batch.tolist()
                    if i == 4 and world_size < 5:
                        break
                last = one.state_dict()
        state = last
    assert sorted(found) == list(range(103))


def test_samples_of_a_dataset_are_bucketed() -> None:
    order = rows.bucketed(LENGTHS, batch_size=5, seed=1)
    with wrap_dataset(range(103), batch_size=5, rows=order, device="cpu") as feeder:
        assert [row for batch in feeder for row in batch.tolist()] == epoch_of(order, 0)


@pytest.mark.parametrize("padded", [False, True])
def test_windows_of_element_batches_are_sorted(padded: bool) -> None:
    batches = rows.element_batches(LENGTHS, 100, padded=padded, window=20, seed=1)
    for epoch in range(2):
        batches.set_epoch(epoch)
        found = [batch.tolist() for batch in batches]
        assert sorted(row for batch in found for row in batch) == list(range(103))
        for batch in found:
            lengths = [int(LENGTHS[row]) for row in batch]
            assert lengths == sorted(lengths, reverse=True)
            assert (max(lengths) * len(batch) if padded else sum(lengths)) <= 100
            assert len({row // 20 for row in batch}) == 1
    plain = rows.element_batches(LENGTHS, 100, padded=True)
    bucketed = rows.element_batches(LENGTHS, 100, padded=True, window=103)
    assert bucketed.count() < plain.count()


def test_bad_input_is_refused() -> None:
    for options in ({"batch_size": 0}, {"batch_size": 2, "window_batches": 0}):
        with pytest.raises(ArgumentError, match="=0: expected a whole number"):
            rows.bucketed(LENGTHS, **options)
    with pytest.raises(ArgumentError, match="expected an order"):
        rows.bucketed(LENGTHS, batch_size=2, order=[1])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="lengths of 103 rows, but is used for 7 rows"):
        Feeder(np.arange(7), batch_size=2, rows=rows.bucketed(LENGTHS, batch_size=2))
