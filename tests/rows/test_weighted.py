"""weighted: rows with replacement by weight, a function of weights, seed, epoch and position."""

from typing import Any

import numpy as np
import pytest
import torch
from support.row_batches import whole
from torch.utils.data import WeightedRandomSampler

from pinfeed import Feeder, Ranks, rows
from pinfeed.errors import ArgumentError

WEIGHTS = np.array([0.0, 4.0, 1.0, 0.0, 0.5, 2.5, 0.0, 8.0, 0.0])
DRAWN = np.flatnonzero(WEIGHTS)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return Pearson's statistic, in deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


# The draws are functions of their seeds, so these tests cannot fail by chance.
@pytest.mark.parametrize("epoch", [0, 1])
def test_rows_are_drawn_in_proportion_to_their_weights(epoch: int) -> None:
    counts = np.bincount(whole(rows.weighted(WEIGHTS, 100_000, seed=1), 9, epoch), minlength=9)
    assert not counts[WEIGHTS == 0].any()
    expected = 100_000 * WEIGHTS / WEIGHTS.sum()
    assert abs(chi_square(counts[DRAWN], expected[DRAWN])) < 3


def test_the_distribution_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler(WEIGHTS.tolist(), 100_000, generator=generator)
    theirs = np.bincount(list(sampler), minlength=9)[DRAWN]
    ours = np.bincount(whole(rows.weighted(WEIGHTS, 100_000, seed=1), 9), minlength=9)[DRAWN]
    # Two samples of equal size: the expected counts are their means.
    both = np.stack((ours, theirs))
    statistic = ((both - both.mean(axis=0)) ** 2 / both.mean(axis=0)).sum()
    freedom = len(DRAWN) - 1
    assert abs(statistic - freedom) / np.sqrt(2 * freedom) < 3


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_positions_are_independent(lag: int) -> None:
    found = whole(rows.weighted(np.ones(20), 100_000, seed=2), 20)
    pairs = np.bincount(20 * found[:-lag] + found[lag:], minlength=400)
    assert abs(chi_square(pairs, np.full(400, pairs.sum() / 400))) < 3


def test_classes_are_balanced_by_the_inverse_of_their_counts() -> None:
    labels = np.repeat([0, 1, 2], [9000, 900, 100])
    order = rows.weighted(1 / np.bincount(labels)[labels], 30_000, seed=1)
    counts = np.bincount(labels[whole(order, 10_000)])
    assert abs(chi_square(counts, np.full(3, 10_000))) < 3


@pytest.mark.parametrize("weights", [[5e-324], [0, 5e-324, 0], [1e308, 0], [0, 1e-300, 1e308, 0]])
def test_extreme_weights_draw_rows_of_positive_weight(weights: list[float]) -> None:
    found = whole(rows.weighted(weights, 10_000), len(weights))
    assert set(found) == {int(np.argmax(weights))}


def test_the_unit_of_the_weights_and_the_container_do_not_matter() -> None:
    order = rows.weighted([1, 2, 5], 100, seed=3)
    for same in ((0.25, 0.5, 1.25), torch.tensor([1.0, 2.0, 5.0]), np.array([1, 2, 5], "uint8")):
        assert rows.weighted(same, 100, seed=3) == order  # type: ignore[arg-type]
    assert rows.weighted([1, 2, 6], 100, seed=3) != order
    assert rows.weighted([1, 2, 5]).length(3) == 3


def test_later_changes_of_the_weights_do_not_matter() -> None:
    weights = np.ones(50)
    order = rows.weighted(weights, 100)
    expected = whole(order, 50)
    weights[:] = 0
    np.testing.assert_array_equal(whole(order, 50), expected)


@pytest.mark.parametrize("ranks_after", [1, 3])
def test_ranks_share_the_draws_and_any_number_resumes_them(ranks_after: int) -> None:
    weights = np.arange(50.0)
    order = rows.weighted(weights, 120, seed=1)

    def run(rank: int, world_size: int, state: Any, n_batches: int) -> tuple[list[int], Any]:
        ranks = Ranks("pad", rank=rank, world_size=world_size)
        with Feeder(np.arange(50), batch_size=5, rows=order, ranks=ranks) as feeder:
            if state is not None:
                feeder.load_state_dict(state)
            found = []
            for _, batch in zip(range(n_batches), feeder, strict=False):
                found += batch.tolist()
            return found, feeder.state_dict()

    first = [run(rank, 2, None, 6) for rank in range(2)]
    state = first[0][1]
    rest = [run(rank, ranks_after, state, 99) for rank in range(ranks_after)]
    found = [row for rows_of_rank, _ in first + rest for row in rows_of_rank]
    assert sorted(found) == sorted(whole(order, 50).tolist())


def test_a_loop_with_other_weights_is_another_loop() -> None:
    with Feeder(np.arange(3), batch_size=2, rows=rows.weighted([1, 1, 2], 9)) as feeder:
        state = feeder.state_dict()
    with (
        Feeder(np.arange(3), batch_size=2, rows=rows.weighted([1, 1, 3], 9)) as feeder,
        pytest.raises(ArgumentError, match="Weighted"),
    ):
        feeder.load_state_dict(state)


def test_the_plan_counts_the_weights() -> None:
    order = rows.weighted(np.ones(1000), 10)
    with Feeder(np.zeros(1000), batch_size=10, rows=order) as feeder:
        (kept,) = [item for item in feeder.plan.items if item.what == "arrays of the order"]
    assert kept.total == 8000


def test_rows_of_a_part_are_drawn_by_their_weights() -> None:
    ids = np.array([3, 7, 9])
    found = whole(rows.where(ids, rows.weighted([1, 0, 1], 1000)), 10)
    assert set(found) == {3, 9}


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([], r"got shape \(0,\)"),
        ([[1.0]], r"got shape \(1, 1\)"),
        (["a"], "got shape"),
        ([True], "of bool"),
        ([1, -0.5], "row 1 has -0.5"),
        ([1, float("nan")], "row 1 has nan"),
        ([float("inf"), 1], "row 0 has inf"),
        ([0, 0.0], "their sum is 0.0"),
        ([1e308, 1e308], "their sum is inf"),
        ([[1], [1, 2]], "weights: "),
        (np.ma.masked_array([1, 2], [False, True]), "row 1 has --"),
    ],
)
def test_other_weights_are_refused(weights: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem) as error:
        rows.weighted(weights)
    assert "expected finite numbers of 0 or more, shape (n_rows,)" in str(error.value)


def test_a_source_of_other_length_is_refused() -> None:
    with pytest.raises(ArgumentError, match="weights of 3 rows, but is used for 4 rows"):
        Feeder(np.zeros(4), batch_size=2, rows=rows.weighted([1, 2, 3]))
    with pytest.raises(ArgumentError, match="n=0: expected a whole number, at least 1"):
        rows.weighted([1, 2, 3], n=0)
