"""The rows that a batch shares with recent batches are those that a plain search finds."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed.pipeline.forwarding import PositionRange, RecentRows, SharedRows
from pinfeed.rows.orders import Rows

Pairs = set[tuple[int, int]]
Found = dict[int, tuple[Pairs, Pairs]]
"""For each earlier batch, the positions of its latest rows, and those of its hidden ones."""


def rows_of(numbers: Sequence[int]) -> Rows:
    return np.array(numbers, np.int64)


class PlainSearch:
    """The rows of recent batches, of which every pair is compared."""

    def __init__(self, n_ahead: int) -> None:
        self.n_ahead = n_ahead
        self.batches: dict[int, Rows] = {}

    def add(self, number: int, rows: Rows, written: Rows, pending: Collection[int]) -> Found:
        found: Found = {}
        seen: set[int] = set()
        for earlier, other in sorted(self.batches.items(), reverse=True):
            if earlier >= number - self.n_ahead or earlier in pending:
                pairs = {tuple(pair) for pair in np.argwhere(rows[:, None] == other).tolist()}
                hidden = {pair for pair in pairs if int(rows[pair[0]]) in seen}
                seen |= set(other.tolist())
                if pairs:
                    found[earlier] = pairs - hidden, hidden
        if len(set(written.tolist())) == len(written):
            self.batches[number] = written
        return found


def pairs_in(shared: SharedRows, span: PositionRange) -> Pairs:
    ranges = [shared.positions[slice(*ends)].tolist() for ends in (span.later, span.earlier)]
    pairs = list(zip(*ranges, strict=True))
    assert len(set(pairs)) == len(pairs), "a pair was found twice"
    return set(pairs)


def found_in(shared: SharedRows, group: int) -> Found:
    return {
        earlier: (pairs_in(shared, overlap.latest), pairs_in(shared, overlap.hidden))
        for earlier, overlap in shared.overlaps[group].items()
    }


def check(n_ahead: int, batches: Sequence[tuple[Sequence[tuple[Rows, Rows]], set[int]]]) -> None:
    """Compare the results for batches, each of which has groups of rows and pending batches.

    A batch that was once not pending does not become pending again.
    """
    finds_unread = all(
        int(rows.max(initial=0)) < 1 << 31 for each, _ in batches for rows, _ in each
    )
    recent = RecentRows(n_ahead)
    plain = [PlainSearch(n_ahead) for _ in batches[0][0]]
    pending: set[int] = set()
    for number, (groups, late) in enumerate(batches):
        pending = {i for i in (*pending, number - n_ahead - 1) if number - i in late}
        gathered, written = zip(*groups, strict=True)
        finds = [finds_unread] * len(groups)
        shared, repeated = recent.add(number, gathered, written, pending, finds)
        ends = [0]
        for g, (rows, own) in enumerate(groups):
            if finds_unread:
                in_flight = {
                    i for pairs in found_in(shared, g).values() for i, _ in pairs[0] | pairs[1]
                }
                left = [(row, i) for i, row in enumerate(rows.tolist()) if i not in in_flight]
                unread = shared.unread[g]
                if unread is None:
                    assert len(left) == len(rows)
                else:
                    numbers = shared.positions[unread.begin :].tolist()[: 2 * unread.n_rows]
                    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
                    assert pairs == sorted(left)
                    ends.append(unread.begin + 2 * unread.n_rows)
            assert found_in(shared, g) == plain[g].add(number, rows, own, pending)
            values, counts = np.unique(rows, return_counts=True)
            assert repeated[g] in (values[counts > 1].tolist() or [None])
            spans = [span for overlap in shared.overlaps[g].values() for span in overlap]
            ends += [span.earlier[1] for span in spans if span.n_rows]
        assert max(ends) == len(shared.positions), "only shared rows have positions"


@st.composite
def some_rows(draw: st.DrawFn, scale: int) -> tuple[Rows, Rows]:
    """Draw the rows of a batch, and the rows that it may write: often the same."""
    numbers = st.lists(st.integers(0, 24), max_size=20, unique=draw(st.booleans()))
    rows = rows_of(draw(numbers)) * scale
    if draw(st.booleans()):
        rows.sort()
    return rows, rows_of(draw(numbers)) * scale if draw(st.integers(0, 3)) == 0 else rows


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[list[tuple[Rows, Rows]], set[int]]]:
    """Draw batches of up to two groups of rows. Some rows are too large for sort keys."""
    scales = draw(st.lists(st.sampled_from([1, 1 << 40, (1 << 62) // 24]), min_size=1, max_size=2))
    late = st.sets(st.integers(2, 9))
    n = draw(st.integers(1, 12))
    return [([draw(some_rows(scale)) for scale in scales], draw(late)) for _ in range(n)]


@settings(max_examples=150)
@given(st.integers(0, 4), programs())
def test_shared_rows_are_those_of_a_plain_search(
    n_ahead: int, batches: list[tuple[list[tuple[Rows, Rows]], set[int]]]
) -> None:
    check(n_ahead, batches)


def repeated_by(n: int) -> Rows:
    return np.repeat(np.arange(0, 40, 3), n)


LONG = {
    "every row in both": [np.arange(200), np.arange(200)],
    "no row in both": [np.arange(0, 200, 2), np.arange(1, 201, 2)],
    "the first batch ends early": [np.arange(10), np.arange(200)],
    "the first batch begins late": [np.arange(190, 200), np.arange(200)],
    "the last row": [rows_of([199]), np.arange(200)],
    "few rows of many": [np.arange(0, 1 << 12, 5), rows_of([3, 5, 4090])],
    "one row": [rows_of([7]), rows_of([7])],
    "no rows at first": [rows_of([]), np.arange(9)],
    "no rows at last": [np.arange(9), rows_of([])],
    "rows too large for keys": [
        np.arange(99)[::-1] + (1 << 61),
        np.tile(np.arange(50, 150), 2) + (1 << 61),
    ],
    "one row everywhere": [np.arange(9), np.full(101, 4)],
    **{f"each row {n} times": [np.arange(40), repeated_by(n)] for n in (2, 3, 4, 7, 10)},
    "each row in any order": [
        np.random.default_rng(0).permutation(500),
        np.random.default_rng(1).integers(0, 700, 900),
    ],
}


@pytest.mark.parametrize("rows", LONG.values(), ids=LONG)
def test_shared_rows_of_long_batches(rows: list[Rows]) -> None:
    """The pass over two batches is cut into sections, between which rows may repeat."""
    check(2, [([(each, each), (each[:50], each[:50])], set()) for each in (rows[0], *rows)])


def test_a_batch_is_kept_while_its_write_is_pending() -> None:
    rows = [(np.arange(5),) * 2]
    recent = RecentRows(1)
    kept = []
    for number, pending in enumerate([(), (), (0,), (0, 1), (0,), ()]):
        shared, _ = recent.add(number, *zip(*rows, strict=True), pending, [False])
        kept.append(sorted(shared.overlaps[0]))
    assert kept == [[], [0], [0, 1], [0, 1, 2], [0, 3], [4]]


def test_a_loop_that_does_not_prefetch_keeps_no_rows() -> None:
    recent = RecentRows(0)
    rows = [rows_of([4, 2, 4])]
    shared, repeated = recent.add(0, rows, rows, (), [False])
    assert (shared.overlaps, repeated, recent._groups) == ([{}], [4], [{}])
    recent.add(1, [rows[0][:2]], [rows[0][:2]], (), [False])
    assert recent._groups == [{}]


@pytest.mark.usefixtures("without_native")
def test_shared_rows_are_the_same_without_compiled_functions() -> None:
    test_shared_rows_are_those_of_a_plain_search()
    for rows in LONG.values():
        test_shared_rows_of_long_batches(rows)
