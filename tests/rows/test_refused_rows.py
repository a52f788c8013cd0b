"""Invalid row indices, and samplers that break their promise, are refused."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_batches import Sampler, Unsized, rows_of

from pinfeed.errors import ArgumentError, RowIndexError, WorkerError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 5], "row 5 is out of range; expected 0 <= row < 5"),
        ([0, -1], "row -1 is out of range"),
        ([-1, 9], "row -1 is out of range"),
        ([2**63], "row 9223372036854775808 is out of range"),
        (np.array([2**64 - 1], np.uint64), "row 18446744073709551615 is out of range"),
        ([2**64], r"got shape \(1,\) of object"),
        ([0.0, 1.0], r"got shape \(2,\) of float64; expected integer row indices"),
        ([True, False], r"got shape \(2,\) of bool"),
        (["0"], r"got shape \(1,\) of <U1"),
        ([None], r"got shape \(1,\) of object"),
        ([[0, 1], [2, 3]], r"got shape \(2, 2\) of int64"),
        ([0, [1]], "inhomogeneous"),
        (3, r"got shape \(\) of int64"),
        (np.array(3), r"got shape \(\) of int64"),
        ("abc", r"got shape \(\) of <U3"),
    ],
    ids=repr,
)
def test_invalid_row_indices_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(RowIndexError, match=f"mine: .*{message}"):
        check_rows(rows, 5, "mine")


def test_row_indices_are_checked_without_a_needless_copy() -> None:
    rows = np.arange(5)
    assert check_rows(rows, 5) is rows


BAD_ARRAYS: list[Any] = [
    [0, 5],
    [0, -1],
    [0.5, 1.0],
    np.array([0.0]),
    np.array([True, False]),
    np.array(3),
    [0, [1, 2]],
    "rows",
    b"rows",
    np.zeros((2, 2, 2), int),
    [[0, 5]],
    [[0], [1], [-1]],
    [[0.0]],
    [[True]],
    [[0], 1],
    [[[0]]],
    [[0, [1]]],
]


@pytest.mark.parametrize("rows", BAD_ARRAYS, ids=repr)
def test_bad_rows_are_refused_at_once_where_they_are_given(rows: Any) -> None:
    # A feeder calls this first.
    largest_batch(rows)
    with pytest.raises(RowIndexError):
        SamplerBatches(rows, 5, 4, False)


@pytest.mark.parametrize(
    "elements",
    [
        [0, 5],
        [0, -1],
        [0.5],
        [True],
        [[0], [5]],
        [[0], 1],
        [0, [1]],
        [[[0]]],
        ["0"],
        [{0, 1}],
        [None],
    ],
    ids=repr,
)
def test_bad_rows_of_a_sampler_are_refused_when_they_are_drawn(elements: list[Any]) -> None:
    with pytest.raises(RowIndexError):
        rows_of(SamplerBatches(Sampler(elements), 5, 4, False))


def test_a_bad_batch_is_named() -> None:
    with pytest.raises(
        RowIndexError, match="batch 1 of rows: row 7 is out of range; expected 0 <= row < 5"
    ):
        SamplerBatches([[0], [1, 7]], 5, None, False)


def test_rows_changed_by_the_user_are_checked_again() -> None:
    rows = np.arange(8)
    batches = SamplerBatches(rows, 8, 4, False)
    rows[6] = 8
    with pytest.raises(RowIndexError, match="row 8 is out of range"):
        rows_of(batches)


@pytest.mark.parametrize(
    "rows", [[], (), np.empty(0, np.int64), np.empty((0, 3), np.int64), range(0)], ids=repr
)
def test_empty_rows_are_refused(rows: Any) -> None:
    assert largest_batch(rows) is None
    with pytest.raises(ArgumentError, match="rows is empty"):
        SamplerBatches(rows, 5, 2, False)


@pytest.mark.parametrize("rows", [[0, 1], np.arange(2), range(2)], ids=repr)
def test_single_rows_need_a_batch_size(rows: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match="rows gives single row indices; expected a batch size as well",
    ):
        SamplerBatches(rows, 5, None, False)
    with pytest.raises(ArgumentError, match="rows gives single row indices"):
        rows_of(SamplerBatches(Sampler(list(rows)), 5, None, False))


def test_a_batch_larger_than_planned_is_refused() -> None:
    message = "batch 1 of rows has 3 rows; expected at most 2, the planned batch size"
    with pytest.raises(ArgumentError, match=message):
        SamplerBatches([[0], [1, 2, 3]], 5, 2, False)
    with pytest.raises(ArgumentError, match=message):
        rows_of(SamplerBatches(Unsized([[0], [1, 2, 3]]), 5, 2, False))


@pytest.mark.parametrize(("elements", "length", "drop_last", "promised", "came"), [
    ([0, 1, 2], 5, False, 3, 2),
    ([0, 1, 2], 6, True, 3, 1),
    ([], 1, False, 1, 0),
    ([[0], [1]], 3, False, 3, 2),
])  # fmt: skip
def test_a_sampler_that_gives_less_than_it_promised_is_an_error(
    elements: list[Any], length: int, drop_last: bool, promised: int, came: int
) -> None:
    message = re.escape(
        f"rows=Sampler promised {promised} batches (its len), but ended after {came} in epoch 6"
    )
    with pytest.raises(WorkerError, match=message):
        rows_of(SamplerBatches(Sampler(elements, length), 5, 2, drop_last), 6)


def test_a_sampler_may_give_more_than_it_promised() -> None:
    assert rows_of(SamplerBatches(Sampler([0, 1, 2], 1), 5, 2, False)) == [[0, 1], [2]]


def test_an_error_of_a_sampler_is_raised() -> None:
    def rows() -> Iterator[int]:
        yield 0
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rows_of(SamplerBatches(rows(), 5, 1, False))


@given(
    rows=st.lists(st.integers(-2, 12), min_size=1),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    kind=st.sampled_from([list, np.array, Sampler, Unsized]),
)
def test_single_rows_are_batched_in_order_or_refused(
    rows: list[int], batch_size: int, drop_last: bool, kind: Any
) -> None:
    n_full = len(rows) // batch_size * batch_size
    # A whole array is checked at once.
    used = rows[:n_full] if drop_last and kind in (Sampler, Unsized) else rows
    if not all(0 <= row < 10 for row in used):
        with pytest.raises(RowIndexError):
            rows_of(SamplerBatches(kind(rows), 10, batch_size, drop_last))
        return
    want = [
        rows[i : i + batch_size] for i in range(0, n_full if drop_last else len(rows), batch_size)
    ]
    assert rows_of(SamplerBatches(kind(rows), 10, batch_size, drop_last)) == want
