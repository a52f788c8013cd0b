"""The cache policy compared with a model, and the rows that the device has meanwhile."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinfeed.native import library as native
from pinfeed.pipeline.cache_policy import CacheMoves, CachePolicy

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

N_ROWS = 24
BATCHES = st.lists(st.sets(st.integers(0, N_ROWS - 1), max_size=10), max_size=12)


def decided(tested: CachePolicy, batch: Any) -> CacheMoves:
    return tested.decide(np.array(sorted(batch), np.int64))


def run(tested: CachePolicy, batches: Sequence[Any]) -> list[int]:
    """Run a loop that carries every decision out; return the hits of each batch."""
    tested.begin()
    hits = []
    for batch in batches:
        moves = decided(tested, batch)
        tested.note_done(moves)
        hits.append(moves.n_hits)
    return hits


def held(tested: CachePolicy, n_rows: int = N_ROWS) -> set[int]:
    return set(np.flatnonzero(tested.contains(np.arange(n_rows))).tolist())


def changed(tested: CachePolicy) -> tuple[list[int], list[int]]:
    rows, slots = tested.changed_rows()
    return rows.tolist(), slots.tolist()


class Model:
    """The policy in plain Python, without memory of the device."""

    def __init__(self, n_rows: int, capacity: int) -> None:
        self.n_rows = n_rows
        self.capacity = capacity
        self.uses = dict.fromkeys(range(n_rows), 0)
        self.slots: list[int] = []

    def begin(self) -> None:
        self.uses = {row: uses // 2 for row, uses in self.uses.items()}
        most = sorted(self.uses.values())[-self.capacity]
        self.least = max(2, most + 1) if self.capacity < self.n_rows else 0
        self.slots = []

    def decide(self, batch: list[int]) -> tuple[list[int], list[int]]:
        """Return the positions and the slots of the moves."""
        hits = [row for row in batch if row in self.slots]
        bypassed = []
        n = len(self.slots)
        for row in batch:
            self.uses[row] += 1
            if row in hits:
                continue
            if len(self.slots) < self.capacity and self.uses[row] >= self.least:
                self.slots.append(row)
            else:
                bypassed.append(row)
        ordered = [*hits, *self.slots[n:], *bypassed]
        slots = [*map(self.slots.index, hits), *range(n, len(self.slots))]
        return [batch.index(row) for row in ordered], slots


@given(loops=st.lists(BATCHES, min_size=1, max_size=4), capacity=st.integers(1, N_ROWS))
def test_decisions_equal_those_of_the_model(loops: list[list[set[int]]], capacity: int) -> None:
    tested, model = CachePolicy(N_ROWS, capacity), Model(N_ROWS, capacity)
    for batches in loops:
        tested.begin()
        model.begin()
        for number, batch in enumerate(map(sorted, batches)):
            moves = decided(tested, batch)
            tested.note_done(moves)
            positions, slots = model.decide(batch)
            assert moves.positions.tolist() == [*positions, *slots]
            assert moves.gathered.tolist() == [batch[i] for i in positions[moves.n_hits :]]
            assert (moves.number, moves.n) == (number, len(batch))
            assert moves.n_held == len(slots)
            assert moves.n_bypassed == len(batch) - len(slots)
            assert held(tested) == set(model.slots)
            assert changed(tested)[0] == sorted(model.slots)


def test_rows_that_are_used_once_stay_outside() -> None:
    hot = {0, 1, 2, 3}
    batches = [hot | set(range(4 + 10 * i, 14 + 10 * i)) for i in range(50)]
    assert run(CachePolicy(1000, 5), batches)[2:] == [4] * 48


def test_a_whole_table_enters_at_once() -> None:
    assert run(CachePolicy(6, 6), [{0, 3}, {0, 1, 3}, {0, 1, 2, 3}]) == [0, 2, 3]


def test_later_loops_keep_the_most_frequent_rows() -> None:
    tested = CachePolicy(100, 2)
    # Without counts, the first two rows that recur take the room.
    assert run(tested, [{0, 1}, {0, 1}, *[{10, 11}] * 40]) == [0] * 42
    assert run(tested, [{0, 1}, {10, 11}, {0, 1}, {10, 11}]) == [0, 0, 0, 2]
    assert held(tested, 100) == {10, 11}


def test_a_loop_that_is_left_at_once_changes_nothing() -> None:
    tested = CachePolicy(100, 2)
    run(tested, [{10, 11}] * 40)
    tested.begin()
    assert run(tested, [{0, 1}, {0, 1}, {10, 11}, {10, 11}]) == [0, 0, 0, 2]


def test_old_loops_count_less() -> None:
    tested = CachePolicy(100, 2)
    run(tested, [{0, 1}] * 40)
    for _ in range(2):
        run(tested, [{10, 11}] * 20)
    assert run(tested, [{0, 1}, {10, 11}, {10, 11}]) == [0, 0, 2]


@pytest.mark.parametrize("capacity", [10, N_ROWS])
def test_the_bookkeeping_has_the_bytes_of_the_plan(capacity: int) -> None:
    tested = CachePolicy(N_ROWS, capacity)
    run(tested, [{1, 2}] * 3)
    arrays = [one for one in vars(tested).values() if isinstance(one, np.ndarray) and one.ndim]
    assert sum(one.nbytes for one in arrays) == tested.nbytes == 4 * N_ROWS + 16 * capacity


def test_decisions_ahead_of_the_device_do_not_change_its_rows() -> None:
    tested = CachePolicy(10, 10)
    tested.begin()
    tested.note_done(decided(tested, {3, 4}))
    later = [decided(tested, batch) for batch in ({1, 3}, {5}, {4})]
    assert changed(tested) == ([3, 4], [0, 1])
    for moves, rows in zip(later, ([1, 3, 4], [1, 3, 4, 5], [1, 3, 4, 5]), strict=True):
        tested.note_done(moves)
        assert changed(tested)[0] == rows


def test_a_flush_returns_the_rows_of_the_last_and_later_batches() -> None:
    tested = CachePolicy(10, 10)
    run(tested, [{3, 4}, {3}, {3}])
    tested.note_flushed()
    # The last batch may change its rows after the flush.
    assert changed(tested)[0] == [3]
    decided(tested, {4})
    assert changed(tested)[0] == [3, 4]
