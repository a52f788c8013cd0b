"""The cache benchmark computes the stated optima and counts rows."""

import functools

import numpy as np
import pytest

from benchmarks import cache
from benchmarks.cache_optimum import InformedPolicy, belady_misses, fixed_misses
from benchmarks.cache_streams import Size, Stream, uniform, zipf
from pinfeed.pipeline.cache_policy import CachePolicy


def fewest_misses(batches: list[frozenset[int]], capacity: int) -> int:
    """Return the fewest misses of all ways to choose the rows of the cache."""

    @functools.cache
    def fewest(number: int, held: frozenset[int]) -> int:
        if number == len(batches):
            return 0
        kept = held | batches[number]
        choices = [kept]
        if len(kept) > capacity:
            # It never helps to hold fewer rows.
            choices = [row_set for row_set in subsets(kept) if len(row_set) == capacity]
        later = min(fewest(number + 1, choice) for choice in choices)
        return len(batches[number] - held) + later

    return fewest(0, frozenset())


def subsets(rows: frozenset[int]) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for row in rows:
        found += [some | {row} for some in found]
    return found


def test_beladys_optimum_is_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        batches = [np.unique(rng.integers(6, size=3)) for _ in range(7)]
        sets = [frozenset(rows.tolist()) for rows in batches]
        for capacity in (1, 2, 3):
            found = belady_misses(batches, 6, capacity)
            assert found.sum() == fewest_misses(sets, capacity)


def test_no_policy_misses_fewer_rows_than_the_optima() -> None:
    stream = zipf(1.05, Size(2000, 200, 200))
    late = slice(100, None)
    belady = belady_misses(stream.batches, stream.n_rows, 100)
    fixed = fixed_misses(stream.batches, stream.probabilities, 100)
    learned = cache.run(CachePolicy(stream.n_rows, 100), stream, 0)
    informed = cache.run(InformedPolicy(stream.probabilities, 100), stream, 0)
    ahead = cache.run(InformedPolicy(stream.probabilities, 100), stream, 8)
    misses = [one[late].sum() for one in (belady, ahead.n_in, fixed, informed.n_in, learned.n_in)]
    assert misses == sorted(misses)
    # A window of all slots holds the most probable rows.
    assert misses[3] < 1.01 * misses[2]
    # If all batches are announced, only hits that stay for their step differ from the optimum.
    everything = cache.run(CachePolicy(stream.n_rows, 100), stream, 200)
    assert belady.sum() <= everything.n_in.sum() < 1.06 * belady.sum()


@pytest.mark.parametrize("make", [functools.partial(zipf, 1.2), uniform])
def test_streams_are_drawn_with_their_probabilities(make: functools.partial[Stream]) -> None:
    stream = make(Size(50, 40, 500))
    share = stream.probabilities / stream.probabilities.sum()
    expected = 1 - (1 - share) ** 40
    found = np.bincount(np.concatenate(stream.batches), minlength=50) / 500
    assert abs(found - expected).max() < 0.1
    assert all((np.diff(rows) > 0).all() for rows in stream.batches)


def test_the_report_has_every_cache() -> None:
    records = cache.measure(uniform(Size(1000, 100, 20)))
    assert [record["capacity"] for record in records] == [10, 50, 100]
    assert "| uniform | 10%" in cache.report(records)
    assert len(list(cache.goals(records))) == 9
