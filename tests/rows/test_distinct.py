"""Tests of rows in ascending order and of distinct rows: the same results as numpy's functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinfeed.rows.indices import distinct_rows, first_occurrences, sort_rows

_RNG = np.random.default_rng(0)
_LARGEST = np.iinfo(np.int64).max

CASES = {
    "no row": [],
    "row 0": [0],
    "one row": [7],
    "largest row alone": [_LARGEST],
    "two equal rows": [3, 3],
    "all equal": [5] * 9,
    "ascending": [0, 1, 2, 3, 4, 5, 6, 7],
    "descending": [8, 7, 6, 5, 4, 3, 2, 1, 0],
    "many rows that repeat": _RNG.integers(0, 1000, 4096),
    "many rows": _RNG.integers(0, 1 << 40, 4097),
    # Three rows leave 61 bits for each row.
    "largest keys": [(1 << 61) - 1, 0, (1 << 61) - 1],
    "largest compiled keys": [(1 << 62) - 1, 0, (1 << 62) - 1],
    "too large for keys": [1 << 61, 0, 1 << 61],
    "large rows that repeat": _RNG.integers(_LARGEST - 50, _LARGEST, 300),
    "negative rows": [-1, 4, -7, 4, -1],
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def rows(request):
    return np.array(request.param, np.int64)


def test_rows_are_sorted_and_equal_rows_keep_their_order(rows):
    before = rows.copy()
    ascending, order = sort_rows(rows)
    assert np.array_equal(order, np.argsort(rows, kind="stable"))
    assert np.array_equal(ascending, np.sort(rows))
    assert ascending.dtype == np.int64
    assert np.array_equal(rows, before)


def test_distinct_rows_are_those_of_unique(rows):
    found = distinct_rows(rows)
    for array, expected in zip(found, np.unique(rows, return_inverse=True), strict=True):
        assert array.dtype == np.int64
        assert np.array_equal(array, expected)
    assert np.array_equal(found[0][found[1]], rows)


def test_first_occurrences_keep_the_order_of_the_rows(rows):
    distinct, positions = first_occurrences(rows)
    first = np.sort(np.unique(rows, return_index=True)[1])
    assert np.array_equal(distinct, rows[first])
    assert (positions is None) == (len(first) == len(rows))
    if positions is not None:
        assert np.array_equal(distinct[positions], rows)
        assert (positions <= np.arange(len(rows))).all()


def test_rows_may_be_a_part_of_an_array():
    columns = _RNG.integers(0, 50, (40, 2))
    rows, positions = distinct_rows(columns[:, 1])
    assert np.array_equal(rows[positions], columns[:, 1])


@st.composite
def _any_rows(draw):
    """Draw rows with any number of bits, of which some repeat."""
    bound = 1 << draw(st.integers(0, 62))
    n = draw(st.sampled_from([1, 2, 3, 100, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    pool = rng.integers(-bound if draw(st.booleans()) else 0, bound, n)
    return rng.choice(pool, n)


@pytest.mark.parametrize("function", [distinct_rows, first_occurrences])
@given(rows=_any_rows())
def test_rows_of_every_size_are_those_of_unique(function, rows):
    distinct, positions = function(rows)
    assert np.array_equal(distinct if positions is None else distinct[positions], rows)
    assert np.array_equal(np.sort(distinct), np.unique(rows))


@pytest.mark.usefixtures("without_native")
def test_rows_are_the_same_without_compiled_functions(rows):
    test_rows_are_sorted_and_equal_rows_keep_their_order(rows)
    test_distinct_rows_are_those_of_unique(rows)
    test_first_occurrences_keep_the_order_of_the_rows(rows)
