"""drawn: independent rows with replacement, a function of seed, epoch and position."""

import itertools
from typing import Any

import numpy as np
import pytest
from support.row_batches import whole

from pinfeed import Feeder, Ranks, rows
from pinfeed.errors import ArgumentError, WriteBackError
from pinfeed.rows.orders import known


def chi_square(counts: np.ndarray) -> float:
    """Return Pearson's statistic of counts that are to be equal, in deviations from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / np.sqrt(2 * freedom)


# The draws are functions of their seeds, so these tests cannot fail by chance.
@pytest.mark.parametrize("n_rows", [2, 1000, 30_011])
@pytest.mark.parametrize("epoch", [0, 1])
def test_all_rows_are_equally_probable(n_rows: int, epoch: int) -> None:
    found = whole(rows.drawn(100_000, seed=1), n_rows, epoch)
    assert abs(chi_square(np.bincount(found, minlength=n_rows))) < 3


def test_all_rows_of_a_large_store_are_equally_probable() -> None:
    found = whole(rows.drawn(100_000, seed=1), 10**15)
    assert found.min() >= 0
    assert found.max() < 10**15
    assert abs(chi_square(np.bincount(found // 10**12, minlength=1000))) < 3


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_positions_are_independent(lag: int) -> None:
    found = whole(rows.drawn(100_000, seed=2), 20)
    pairs = np.bincount(20 * found[:-lag] + found[lag:], minlength=400)
    assert abs(chi_square(pairs)) < 3


def test_epochs_and_seeds_are_independent() -> None:
    found = [whole(rows.drawn(20_000, seed), 20, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for one, other in itertools.combinations(found, 2):
        assert abs(chi_square(np.bincount(20 * one + other, minlength=400))) < 3


def test_rows_repeat_as_often_as_chance_has_it() -> None:
    found = whole(rows.drawn(10_000, seed=1), 10_000)
    # A share of 1 / e of the rows is not drawn.
    assert abs(10_000 - len(np.unique(found)) - 10_000 / np.e) < 100
    assert known(rows.drawn(10)).most_copies is None


def test_a_row_does_not_depend_on_the_length_of_the_epoch() -> None:
    longer = whole(rows.drawn(1000, seed=1), 77)
    assert np.array_equal(whole(rows.drawn(10, seed=1), 77), longer[:10])


def test_repr_and_equality_of_an_order() -> None:
    assert repr(rows.drawn(np.int64(4), seed=np.int64(2))) == "Drawn(n=4, seed=2)"  # type: ignore[arg-type]
    assert rows.drawn(4) == rows.drawn(4, seed=0) != rows.drawn(5)
    assert len(whole(rows.drawn(4), 0)) == 0


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_the_number_of_rows_is_positive(n: Any) -> None:
    with pytest.raises(ArgumentError, match=f"n={n!r}: expected a whole number, at least 1"):
        rows.drawn(n)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(ArgumentError, match="seed=None"):
        rows.drawn(4, seed=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_loop_resumes_at_once(depth: int) -> None:
    array = np.arange(50)
    order = rows.drawn(10**12, seed=1)
    expected = order.bind(50, 0)(np.arange(10**11, 10**11 + 40))
    with Feeder(array, batch_size=10, rows=order, depth=depth) as feeder:
        assert len(feeder) == 10**11
        feeder.load_state_dict({**feeder.state_dict(), "batch": 10**10})
        found = [x.numpy() for x in itertools.islice(feeder, 4)]
        np.testing.assert_array_equal(np.concatenate(found), expected)


def test_another_seed_is_another_loop() -> None:
    with Feeder(np.arange(50), batch_size=10, rows=rows.drawn(100, seed=1)) as feeder:
        state = feeder.state_dict()
    with (
        Feeder(np.arange(50), batch_size=10, rows=rows.drawn(100, seed=2)) as feeder,
        pytest.raises(ArgumentError, match=r"Drawn\(n=100, seed=2\)"),
    ):
        feeder.load_state_dict(state)


def test_ranks_share_the_draws() -> None:
    whole_order = rows.drawn(120, seed=1)
    expected = np.sort(whole(whole_order, 50))
    found = []
    for rank in range(3):
        with Feeder(
            np.arange(50),
            batch_size=10,
            rows=whole_order,
            ranks=Ranks("pad", rank=rank, world_size=3),
        ) as feeder:
            found += [x.numpy() for x in feeder]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), expected)


def test_rows_that_repeat_in_a_batch_cannot_be_written_back() -> None:
    array = np.zeros((3, 2), np.float32)
    with Feeder(array, batch_size=10, rows=rows.drawn(10)) as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError):
                batch.write_back(batch.data)
    assert not array.any()
