"""The cache policy compared with a model: consistent moves, and the rows that it should keep."""

from collections.abc import Iterator, Sequence
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


def row_array(rows: Any) -> np.ndarray:
    return np.array(sorted(rows), np.int64)


class Moves(CacheMoves):
    """The moves of a batch, and the used parts of their memory."""

    def __init__(self, tested: CachePolicy, batch: Any) -> None:
        rows = row_array(batch)
        super().__init__(len(rows))
        tested.decide(rows, self)
        self.positions, self.slots, _ = np.split(
            self.positions, [len(rows), len(rows) + self.n_hits + self.n_admitted]
        )
        self.rows, self.evicted, _ = np.split(self.rows, [len(rows), len(rows) + self.n_evicted])

    @property
    def all(self) -> list[Any]:
        arrays = self.positions, self.slots, self.rows, self.evicted, self.counts
        return [array.tolist() for array in arrays]


def decisions(tested: CachePolicy, batches: Sequence[Any]) -> Iterator[Moves]:
    """Run a loop, and yield the moves of each batch."""
    tested.begin()
    for rows in batches:
        yield Moves(tested, rows)


def everything(tested: CachePolicy, batches: Sequence[Any]) -> list[Any]:
    """Return all moves of a loop, and the rows in the slots at its end."""
    return [*(moves.all for moves in decisions(tested, batches)), tested.rows_of_slots.tolist()]


def n_hits(tested: CachePolicy, batches: Sequence[Any]) -> list[int]:
    return [moves.n_hits for moves in decisions(tested, batches)]


class Model:
    """Rows in the slots, as the moves change them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[int, int] = {}
        self.last_used: dict[int, int] = {}

    def move(self, number: int, batch: set[int], moves: Moves) -> None:
        """Check that the moves fit the batch and the slots, and apply them."""
        rows = row_array(batch)
        n_held = moves.n_hits + moves.n_admitted
        slots, moved, evicted = moves.slots, moves.rows, moves.evicted
        assert sorted(moves.positions) == list(range(len(rows)))
        for ascending in np.split(moves.positions, [moves.n_hits, n_held]):
            assert (np.diff(ascending) > 0).all()
        assert moved.tolist() == rows[moves.positions].tolist()

        hits, admitted, _ = np.split(moved, [moves.n_hits, n_held])
        assert set(hits) == batch & set(self.slots)
        assert [self.slots[row] for row in hits] == slots[: moves.n_hits].tolist()
        assert not batch & set(evicted)
        freed = [self.slots.pop(row) for row in evicted]
        assert freed == slots[n_held - moves.n_evicted :].tolist()
        # Free slots are filled at once, in their order.
        n_free = min(len(rows) - moves.n_hits, self.capacity - len(self.slots) - len(freed))
        first = len(self.slots) + len(freed)
        assert [*range(first, first + n_free), *freed] == slots[moves.n_hits :].tolist()
        self.slots |= zip(admitted.tolist(), slots[moves.n_hits :].tolist(), strict=True)
        self.last_used |= dict.fromkeys(slots.tolist(), number)

    def compare(self, tested: CachePolicy) -> None:
        """Compare the rows of the policy with the model."""
        rows = {slot: row for row, slot in self.slots.items()}
        assert tested.rows_of_slots.tolist() == [rows[slot] for slot in range(len(rows))]
        assert tested.last_used.tolist() == [self.last_used[slot] for slot in range(len(rows))]
        held = np.flatnonzero(tested.contains(np.arange(N_ROWS)))
        assert held.tolist() == sorted(self.slots)


@given(loops=st.lists(BATCHES, min_size=1, max_size=2), capacity=st.integers(1, N_ROWS))
def test_moves_are_consistent(loops: list[list[set[int]]], capacity: int) -> None:
    tested, again = CachePolicy(N_ROWS, capacity), CachePolicy(N_ROWS, capacity)
    for batches in loops:
        model = Model(capacity)
        found = []
        for number, moves in enumerate(decisions(tested, batches)):
            model.move(number, batches[number], moves)
            model.compare(tested)
            found.append(moves.all)
        assert everything(again, batches) == [*found, tested.rows_of_slots.tolist()]


def test_a_whole_table_is_never_evicted() -> None:
    tested = CachePolicy(6, 6)
    batches = [{0, 3}, {0, 1, 2}, set(), {5}, range(6)]
    found = list(decisions(tested, batches))
    assert not any(moves.n_evicted for moves in found)
    assert found[-1].n_hits == 5
    assert set(tested.rows_of_slots) == set(range(6))


def test_rows_that_are_used_once_do_not_displace_hot_ones() -> None:
    hot = {0, 1, 2, 3}
    batches = [hot | set(range(4 + 10 * i, 14 + 10 * i)) for i in range(50)]
    assert n_hits(CachePolicy(1000, 5), batches)[2:] == [4] * 48


def test_new_hot_rows_displace_old_ones() -> None:
    batches = [{0, 1, 2}] * 1000 + [{3, 4, 5}] * 1000
    assert n_hits(CachePolicy(1000, 2), batches)[-1] == 2


@pytest.mark.parametrize("capacity", [1, 7])
def test_hot_rows_displace_the_rows_of_any_slots(capacity: int) -> None:
    """A batch of more rows than the hand passes, in a cache of fewer."""
    others = set(range(100, 400))
    hot = set(range(400, 400 + capacity))
    batches = [others, *[hot, hot | others] * 20]
    assert n_hits(CachePolicy(500, capacity), batches)[-1] == capacity


def test_the_hand_continues_in_the_next_batch() -> None:
    old = set(range(100))
    new = range(100, 200)
    batches = [old, *({row} for row in new for _ in range(3))]
    tested = CachePolicy(200, 100)
    n_hits(tested, batches)
    # Each new row finds an old one that was used less, where the hand is.
    assert set(tested.rows_of_slots) == set(new)


def test_counts_are_kept_from_loop_to_loop() -> None:
    tested = CachePolicy(100, 2)
    n_hits(tested, [{10, 11}] * 5)
    # The rows of the first batch fill the empty cache, and make way for the frequent ones.
    assert n_hits(tested, [{0, 1}, {10, 11}, {2, 3}, {10, 11}]) == [0, 0, 0, 2]


class PlainPolicy:
    """The policy in Python, without scaled counts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counts: dict[int, np.float32] = {}
        self.slots: list[int] = []
        self.hand = 0
        self.use = 1.0

    def decide(self, batch: list[int]) -> list[int]:
        """Return the rows in the slots after the batch."""
        missed = [row for row in batch if row not in self.slots]
        for row in batch:
            self.counts[row] = self.counts.get(row, np.float32(0)) + np.float32(self.use)
        offered = None
        for row in missed:
            if len(self.slots) < self.capacity:
                self.slots.append(row)
                continue
            for _ in range(2):
                held = self.slots[self.hand]
                if held not in batch and (
                    offered is None or self.counts[held] < self.counts[self.slots[offered]]
                ):
                    offered = self.hand
                self.hand = (self.hand + 1) % self.capacity
            if offered is not None and self.counts[self.slots[offered]] < self.counts[row]:
                self.slots[offered] = row
                offered = None
        self.use *= 1 + len(batch) / (92 * self.capacity)
        return self.slots


@pytest.mark.parametrize(("n_rows", "capacity", "size"), [(300, 2, 184), (40, 10, 7)])
def test_decisions_equal_those_of_the_plain_policy(n_rows: int, capacity: int, size: int) -> None:
    """In a cache of two rows, uses double in each batch, and counts are scaled by powers of two."""
    rng = np.random.default_rng(0)
    tested, plain = CachePolicy(n_rows, capacity), PlainPolicy(capacity)
    tested.begin()
    for _ in range(100):
        batch = np.sort(rng.choice(n_rows, size, replace=False))
        Moves(tested, batch)
        assert tested.rows_of_slots.tolist() == plain.decide(batch.tolist())


def test_counts_never_overflow() -> None:
    # Each batch counts more than twice as much as the one before, and float32 ends at 2**128.
    others = [set(range(100, 400)), set(range(400, 700))]
    hot = [{0, 1}] * 200 + [{2, 3}] * 5
    batches = [rows | others[i % 2] for i, rows in enumerate(hot)]
    assert n_hits(CachePolicy(1000, 2), batches)[-1] == 2


@pytest.mark.parametrize("capacity", [10, N_ROWS])
def test_the_bookkeeping_has_the_bytes_of_the_plan(capacity: int) -> None:
    tested = CachePolicy(N_ROWS, capacity)
    everything(tested, [{1, 2}] * 3)
    arrays = [one for one in vars(tested).values() if isinstance(one, np.ndarray) and one.ndim]
    assert sum(one.nbytes for one in arrays) == tested.nbytes == 4 * N_ROWS + 16 * capacity
