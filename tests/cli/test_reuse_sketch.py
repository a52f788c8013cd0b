"""ReuseSketch: hit rates of caches, compared with caches of the same size that are simulated."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest

from pinfeed.cli.cache_advice import CACHE_SHARES, ReuseSketch

Batches = Sequence[np.ndarray]


def zipf(n_rows: int, exponent: float, n_ids: int, n_batches: int) -> list[np.ndarray]:
    """Return the distinct rows of batches whose ids follow Zipf's law, in a scattered order."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, n_rows + 1) ** -exponent
    total = np.cumsum(weights / weights.sum())
    scattered = rng.permutation(n_rows)
    ids = scattered[np.searchsorted(total, rng.random((n_batches, n_ids)))]
    return list(map(np.unique, ids))


def uniform(n_rows: int, n_ids: int, n_batches: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.unique(ids) for ids in rng.integers(0, n_rows, (n_batches, n_ids))]


def sketch_of(batches: Batches, n_rows: int) -> ReuseSketch:
    sketch = ReuseSketch(n_rows)
    for rows in batches:
        sketch.add(rows)
    return sketch


def lru_hit_rate(batches: Batches, capacity: int) -> float:
    """Return the hit rate of a cache that keeps the rows that were used last."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in np.concatenate(batches).tolist():
        hits += row in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits / sum(map(len, batches))


def most_used_hit_rate(batches: Batches, capacity: int) -> float:
    """Return the hit rate in the second half of the rows that were used most in the first half."""
    half = len(batches) // 2
    uses = Counter(np.concatenate(batches[:half]).tolist())
    kept = {row for row, _ in uses.most_common(capacity)}
    later = np.concatenate(batches[half:]).tolist()
    return sum(row in kept for row in later) / len(later)


@pytest.mark.parametrize("n_rows", [5_000, 60_000])
@pytest.mark.parametrize("exponent", [1.05, 1.2])
def test_the_better_of_two_caches_is_predicted(n_rows: int, exponent: float) -> None:
    batches = zipf(n_rows, exponent, n_ids=2_000, n_batches=40)
    sketch = sketch_of(batches, n_rows)
    for share in CACHE_SHARES:
        capacity = int(share * n_rows)
        recent = lru_hit_rate(batches, capacity)
        frequent = most_used_hit_rate(batches, capacity)
        assert sketch.hit_rate(capacity) == pytest.approx(max(recent, frequent), abs=0.04)


def test_rows_of_a_moving_window_are_predicted_from_the_last() -> None:
    batches = [np.arange(100 * i, 100 * i + 400) for i in range(40)]
    sketch = sketch_of(batches, 5_000)
    for capacity in (50, 299, 300, 399, 400, 401, 2_000):
        assert sketch.hit_rate(capacity) == lru_hit_rate(batches, capacity)
    # A row is looked up by four batches in a row.
    assert sketch.hit_rate(400) == (16_000 - 4_300) / 16_000
    size = sketch.best_size()
    assert size is not None
    assert size.share == 0.1


def test_uniform_rows_need_no_cache() -> None:
    batches = uniform(20_000, n_ids=2_000, n_batches=50)
    sketch = sketch_of(batches, 20_000)
    for share in CACHE_SHARES:
        capacity = int(share * 20_000)
        assert sketch.hit_rate(capacity) == pytest.approx(share, abs=0.03)
        if share < 0.1:
            assert lru_hit_rate(batches, capacity) < share
    assert sketch.best_size() is None


def test_skewed_rows_need_a_small_cache() -> None:
    size = sketch_of(zipf(60_000, 1.2, 2_000, 40), 60_000).best_size()
    assert size is not None
    assert size.share <= 0.1
    assert size.hit_rate > 0.6


def test_a_few_batches_say_nothing() -> None:
    sketch = ReuseSketch(1_000)
    assert sketch.hit_rate(10) == 0
    for _ in range(20):
        assert not sketch.is_informative
        assert sketch.best_size() is None
        sketch.add(np.arange(100))
    assert sketch.is_informative
    assert sketch.best_size() is not None


@pytest.mark.parametrize("n_rows", [10_000, 100_000])
def test_no_more_lookups_are_kept_than_fit(n_rows: int) -> None:
    sketch = ReuseSketch(n_rows)
    batches = uniform(n_rows, n_ids=n_rows // 10, n_batches=50)
    n_added = 0
    while not sketch.is_full:
        sketch.add(batches[n_added])
        n_added += 1
    # Each row was looked up so often on average.
    assert 2 <= n_added / 10 <= 4.2
    before = [sketch.hit_rate(share * n_rows) for share in CACHE_SHARES]
    assert before == pytest.approx(CACHE_SHARES, abs=0.04)
    for rows in batches:
        sketch.add(rows)
    assert [sketch.hit_rate(share * n_rows) for share in CACHE_SHARES] == before
    assert sketch._lookups.nbytes <= 1 << 18


def test_a_sample_that_is_exactly_full_makes_room() -> None:
    sketch = ReuseSketch(1 << 20)
    for first in range(0, 1 << 20, 1 << 15):
        assert not sketch.is_full
        sketch.add(np.arange(first, first + (1 << 15)))
    for _ in range(2):
        sketch.add(np.arange(1 << 20))
    # All rows of the second half are in a cache of the whole table.
    assert sketch.hit_rate(1 << 20) == pytest.approx(1, abs=0.01)


def test_the_order_of_the_rows_of_a_batch_does_not_matter_much() -> None:
    rng = np.random.default_rng(0)
    batches = zipf(60_000, 1.2, n_ids=2_000, n_batches=40)
    ascending = sketch_of(batches, 60_000)
    shuffled = sketch_of([rng.permutation(rows) for rows in batches], 60_000)
    for share in CACHE_SHARES:
        capacity = share * 60_000
        assert shuffled.hit_rate(capacity) == pytest.approx(ascending.hit_rate(capacity), abs=0.02)
