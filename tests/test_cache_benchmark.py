"""The benchmark of the cache counts every row, and its table is made of the results."""

import json

import pytest

from benchmarks import cache
from benchmarks.cache import Size, Stream, figures, report, uniform, zipf
from benchmarks.environment import RESULTS
from pinfeed.native import library as native

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

SIZE = Size(2000, 256, 40)


@pytest.mark.parametrize("stream", [zipf(1.05, SIZE), uniform(SIZE)], ids=lambda one: one.name)
def test_a_cache_of_all_rows_copies_each_row_once(stream: Stream) -> None:
    n_distinct = len(set().union(*(batch.tolist() for batch in stream.batches)))
    found = figures(stream, stream.n_rows)
    assert found["loop"] == n_distinct / sum(map(len, stream.batches))


def test_a_cache_saves_rows_that_are_frequent() -> None:
    skewed, even = (figures(stream, 200) for stream in (zipf(1.2, SIZE), uniform(SIZE)))
    assert skewed["late"] < even["late"] < 1


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    for path in RESULTS.glob("cache-*.json"):
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == report(results) + "\n"
    assert "| uniform | 1%      |" in report(cache.measure(uniform(SIZE)))
