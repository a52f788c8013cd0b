"""The cache policy compared with a model: consistent moves, and the rows that it should keep."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinfeed.pipeline import cache_policy
from pinfeed.pipeline.cache_policy import CacheMoves, CachePolicy

N_ROWS = 24
BATCHES = st.lists(st.sets(st.integers(0, N_ROWS - 1), max_size=10), max_size=12)


def row_array(rows: Any) -> np.ndarray:
    return np.array(sorted(rows), np.int64)


def decisions(
    tested: CachePolicy, batches: Sequence[Any], n_ahead: int
) -> Iterator[tuple[int, CacheMoves]]:
    """Run a loop, and yield the number of each batch with its moves."""
    tested.begin()
    n_announced = 0
    for number, rows in enumerate(batches):
        for announced in batches[n_announced : number + n_ahead + 1]:
            tested.announce(row_array(announced))
            n_announced += 1
        yield number, tested.decide(row_array(rows))


def everything(tested: CachePolicy, batches: Sequence[Any], n_ahead: int = 2) -> list[Any]:
    """Return all moves of a loop, and the rows in the slots at its end."""
    found = [[a.tolist() for a in moves] for _, moves in decisions(tested, batches, n_ahead)]
    return [*found, tested.rows_of_slots.tolist()]


def n_hits(tested: CachePolicy, batches: Sequence[Any], n_ahead: int = 0) -> list[int]:
    return [len(moves.hits) for _, moves in decisions(tested, batches, n_ahead)]


class Model:
    """Rows in the slots, as the moves change them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[int, int] = {}
        self.last_used: dict[int, int] = {}

    def move(self, number: int, batch: set[int], moves: CacheMoves) -> None:
        """Check that the moves fit the batch and the slots, and apply them."""
        rows = row_array(batch)
        assert [one.dtype for one in moves] == [np.int32] * 5 + [np.int64, np.int32]
        for positions in (moves.bypassed, moves.admitted, moves.hits):
            assert (np.diff(positions) > 0).all()
        every = np.concatenate([moves.bypassed, moves.admitted, moves.hits])
        assert sorted(every) == list(range(len(rows)))

        assert set(rows[moves.hits]) == batch & set(self.slots)
        for row, slot in zip(rows[moves.hits], moves.hit_slots, strict=True):
            assert self.slots[row] == slot
        assert not batch & set(moves.evicted_rows)
        for row, slot in zip(moves.evicted_rows, moves.evicted_slots, strict=True):
            assert self.slots.pop(row) == slot
        for row, slot in zip(rows[moves.admitted], moves.admitted_slots, strict=True):
            assert 0 <= slot < self.capacity
            self.slots[row] = slot
        assert len(set(self.slots.values())) == len(self.slots)
        # Free slots are filled at once.
        assert len(self.slots) == self.capacity or not len(moves.bypassed)
        self.last_used |= {self.slots[row]: number for row in batch & set(self.slots)}

    def compare(self, tested: CachePolicy) -> None:
        """Compare the attributes of the policy with the model."""
        rows = {slot: row for row, slot in self.slots.items()}
        slots = range(self.capacity)
        assert tested.rows_of_slots.tolist() == [rows.get(slot, -1) for slot in slots]
        assert tested.last_used.tolist() == [self.last_used.get(slot, -1) for slot in slots]
        held = np.flatnonzero(tested.contains(np.arange(N_ROWS)))
        assert held.tolist() == sorted(self.slots)


@given(
    loops=st.lists(BATCHES, min_size=1, max_size=2),
    capacity=st.integers(1, N_ROWS),
    n_ahead=st.integers(0, 4),
    window=st.sampled_from([1, 4, cache_policy._MIN_WINDOW]),
)
def test_moves_are_consistent_and_needed_rows_stay(
    loops: list[list[set[int]]], capacity: int, n_ahead: int, window: int
) -> None:
    tested = CachePolicy(N_ROWS, capacity)
    for batches in loops:
        model = Model(capacity)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_policy, "_MIN_WINDOW", window)
            for number, moves in decisions(tested, batches, n_ahead):
                before = set(model.slots)
                model.move(number, batches[number], moves)
                model.compare(tested)
                announced = batches[number + 1 : number + n_ahead + 1]
                if window >= capacity:
                    check_needed(before, batches[number], set(model.slots), announced)


def check_needed(
    before: set[int], batch: set[int], after: set[int], announced: list[set[int]]
) -> None:
    """Check that no row is needed later than a row that the cache does not hold."""

    def next_use(row: int) -> float:
        return next((i for i, rows in enumerate(announced) if row in rows), math.inf)

    dropped = (before | batch) - after
    # Hits stay, even if they are not needed.
    chosen = after - (before & batch)
    latest = max(map(next_use, chosen), default=-1)
    assert all(next_use(row) >= latest for row in dropped)


def test_a_whole_table_is_never_evicted() -> None:
    tested = CachePolicy(6, 6)
    batches = [{0, 3}, {0, 1, 2}, set(), {5}, range(6)]
    for number, moves in decisions(tested, batches, 1):
        assert not len(moves.bypassed) + len(moves.evicted_rows)
        assert number < 4 or len(moves.hits) == 5
    assert set(tested.rows_of_slots) == set(range(6))


def test_rows_that_are_used_once_do_not_displace_hot_ones() -> None:
    hot = {0, 1, 2, 3}
    batches = [hot | set(range(4 + 10 * i, 14 + 10 * i)) for i in range(50)]
    assert n_hits(CachePolicy(1000, 5), batches)[2:] == [4] * 48


def test_new_hot_rows_displace_old_ones() -> None:
    batches = [{0, 1, 2}] * 1000 + [{3, 4, 5}] * 1000
    assert n_hits(CachePolicy(1000, 2), batches)[-1] == 2


def test_counts_are_kept_from_loop_to_loop() -> None:
    tested = CachePolicy(100, 2)
    n_hits(tested, [{10, 11}] * 5)
    # The rows of the first batch fill the empty cache, and make way for the frequent ones.
    assert n_hits(tested, [{0, 1}, {10, 11}, {2, 3}, {10, 11}]) == [0, 0, 0, 2]


def test_an_abandoned_loop_leaves_no_announced_batches() -> None:
    tested = CachePolicy(100, 2)
    tested.begin()
    for _ in range(3):
        tested.announce(row_array({7, 8}))
    tested.decide(row_array({7, 8}))
    # Rows 7 and 8 are frequent, but no announced batch needs them.
    assert n_hits(tested, [{7, 8}, {1, 2}, {1, 2}, {1, 2}, {1, 2}], 1) == [0, 0, 2, 2, 2]


def test_places_of_announced_rows_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [set(rng.integers(N_ROWS, size=8).tolist()) for _ in range(40)]
    expected = everything(CachePolicy(N_ROWS, 6), batches)
    monkeypatch.setattr(cache_policy, "_MAX_PLACE", 50)
    assert everything(CachePolicy(N_ROWS, 6), batches) == expected


def test_counts_are_scaled_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [set(rng.integers(N_ROWS, size=8).tolist()) for _ in range(40)]
    # Every batch counts twice as much as the one before, so scaled counts are exact.
    monkeypatch.setattr(cache_policy, "_HALF_LIFE", 1e-9)
    expected = everything(CachePolicy(N_ROWS, 6), batches)
    monkeypatch.setattr(cache_policy, "_MAX_USE", 4.0)
    tested = CachePolicy(N_ROWS, 6)
    assert everything(tested, batches) == expected
    assert tested._counts.max() < 32


@pytest.mark.parametrize("capacity", [10, N_ROWS])
def test_the_bookkeeping_has_the_bytes_of_the_plan(capacity: int) -> None:
    tested = CachePolicy(N_ROWS, capacity)
    everything(tested, [{1, 2}] * 3)
    parts = [*vars(tested).values(), *vars(tested._next_uses).values()]
    arrays = [one for one in parts if isinstance(one, np.ndarray)]
    n_announced = tested._next_uses.n_reserved
    assert sum(one.nbytes for one in arrays) == tested.nbytes
    assert tested.nbytes == CachePolicy.nbytes_for(N_ROWS, capacity, n_announced)
