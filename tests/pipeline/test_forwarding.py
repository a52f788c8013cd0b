"""A batch with later writes copied over its rows equals one that is gathered now."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed.pipeline.forwarding import (
    SPARE_ROW_NBYTES,
    Overlap,
    PositionRange,
    RecentRows,
    SharedRows,
    Write,
    WriteLog,
    forwards,
)
from pinfeed.pipeline.loop_memory import shared_row_allocations

# Rows of the store: few, so that batches overlap.
N = 12


def rows_of(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


def compared(
    recent: RecentRows,
    number: int,
    rows: Sequence[np.ndarray],
    pending: Collection[int] = (),
    written: Sequence[np.ndarray] | None = None,
) -> SharedRows:
    own = rows if written is None else written
    return recent.add(number, rows, own, pending, [False] * len(rows))[0]


# -- the log ---------------------------------------------------------------------------------------


def test_writes_are_numbered_from_zero_and_kept_in_order() -> None:
    log = WriteLog()
    assert (len(log), log.completed, log.since(0)) == (0, 0, [])
    writes = [log.append(10 + i, [True], [i]) for i in range(4)]
    assert [(write.number, write.batch) for write in writes] == [(i, 10 + i) for i in range(4)]
    assert [write.values for write in writes] == [[0], [1], [2], [3]]
    assert len(log) == 4
    for number in range(6):
        assert log.since(number) == writes[number:]
    log.completed = 3
    assert log.pending_batches() == {13}


def test_forgotten_writes_leave_the_log_and_the_rest_stays() -> None:
    log = WriteLog()
    writes = [log.append(i, [True], []) for i in range(4)]
    log.forget(0)
    assert log.since(0) == writes
    log.forget(2)
    assert (log.since(0), len(log)) == (writes[2:], 2)
    log.forget(1)
    assert log.since(0) == writes[2:]
    log.forget(100)
    assert (log.since(0), len(log)) == ([], 0)
    assert log.append(4, [True], []).number == 4, "numbers continue"
    log.forget(4)
    assert len(log) == 1


# -- the copies ------------------------------------------------------------------------------------


def test_a_row_is_copied_once_if_every_batch_writes_all() -> None:
    overlaps = {
        7: Overlap(PositionRange(0, 2), PositionRange(4, 3)),
        9: Overlap(PositionRange(10, 1), PositionRange(12, 0)),
    }
    log = WriteLog()
    first, _, last = (log.append(i, [True], []) for i in (7, 8, 9))
    assert forwards(log.since(0), 0, 10, overlaps) == [
        (first, PositionRange(0, 2)),
        (last, PositionRange(10, 1)),
    ]
    assert forwards(log.since(1), 0, 10, overlaps) == [(last, PositionRange(10, 1))]


@pytest.mark.parametrize("middle", [(False,), (None,), ()], ids=["a part", "nothing", "no write"])
def test_rows_not_written_in_between_are_copied_from_before(middle: Any) -> None:
    overlaps = {7: Overlap(PositionRange(0, 2), PositionRange(4, 3))}
    log = WriteLog()
    first = log.append(7, [True], [])
    for is_whole in middle:
        log.append(8, [is_whole], [])
    log.append(9, [True], [])
    found = forwards(log.since(0), 0, 10, overlaps)
    assert sorted(found, key=lambda copy: copy[1]) == [
        (first, PositionRange(0, 2)),
        (first, PositionRange(4, 3)),
    ]


def test_a_batch_that_is_written_twice_counts_as_one() -> None:
    overlaps = {7: Overlap(PositionRange(0, 2), PositionRange(4, 3))}
    log = WriteLog()
    writes = [log.append(batch, [True], []) for batch in (7, 8, 8, 9)]
    assert forwards(writes, 0, 10, overlaps) == [(writes[0], PositionRange(0, 2))]


# -- both together ---------------------------------------------------------------------------------

STORES = ("both stores", "the first store", "the second store", "nothing")
BATCHES = st.lists(
    st.tuples(
        st.lists(st.integers(0, N - 1), max_size=8),
        # Each write of the batch; the loop writes a batch twice where it flushes in between.
        st.lists(st.sampled_from(STORES), max_size=2),
        # Writes that are completed before the batch is gathered, and before it is lent.
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=25,
)


class Loop:
    """A loop that gathers ahead, and writes late but in order, on two stores."""

    def __init__(self, ahead: int, scale: int, first: int) -> None:
        self.ahead = ahead
        self.scale = scale
        self.first = first
        self.log: WriteLog = WriteLog()
        self.recent = RecentRows(ahead)
        self.stores = np.zeros((2, N))
        self.truth = np.zeros((2, N))
        self.gathered: deque[tuple[int, np.ndarray, np.ndarray, int, SharedRows]] = deque()
        self.rows: dict[int, np.ndarray] = {}

    def complete(self, n: int) -> None:
        for write in self.log.since(self.log.completed)[:n]:
            put(self.stores, self.rows[write.batch], write.values)
            self.log.completed = write.number + 1

    def gather(self, number: int, rows: np.ndarray) -> None:
        scaled = [rows * self.scale]
        pending = self.log.pending_batches()
        shared, (repeated,) = self.recent.add(number, scaled, scaled, pending, [False])
        assert (repeated is not None) == (len(set(rows.tolist())) < len(rows))
        if repeated is not None:
            assert rows.tolist().count(repeated // self.scale) > 1
        self.rows[number] = rows
        self.gathered.append((number, rows, self.stores[:, rows], self.log.completed, shared))

    def lend(self) -> int:
        number, rows, batch, seen, shared = self.gathered.popleft()
        for write, span in forwards(self.log.since(seen), 0, number, shared.overlaps[0]):
            later, earlier = (shared.positions[slice(*ends)] for ends in (span.later, span.earlier))
            taken = [None if new is None else new[earlier] for new in write.values]
            put(batch, later, taken)
        assert np.array_equal(batch, self.truth[:, rows])
        self.log.forget(min([self.log.completed, *(seen for *_, seen, _ in self.gathered)]))
        return number

    def write(self, number: int, what: str, value: float) -> None:
        rows = self.rows[number]
        if len(set(rows.tolist())) < len(rows):
            return
        values = value + np.arange(len(rows)) / 100
        held = [values if what in (store, STORES[0]) else None for store in STORES[1:3]]
        written = [new is not None for new in held]
        self.log.append(number, [all(written) if any(written) else None], held)
        put(self.truth, rows, held)


def put(stores: np.ndarray, at: np.ndarray, values: Sequence[np.ndarray | None]) -> None:
    for store, new in zip(stores, values, strict=True):
        if new is not None:
            store[at] = new


@settings(max_examples=500)
@given(BATCHES, st.integers(1, 4), st.sampled_from([1, 1 << 52]), st.sampled_from([0, 250]))
def test_a_batch_equals_one_that_is_gathered_now(
    batches: list[Any], ahead: int, scale: int, first: int
) -> None:
    """Writes may be older than any batch that was gathered ahead, and batches are not all written.

    Large rows do not fit into sort keys.
    """
    loop = Loop(ahead, scale, first)
    for i in range(len(batches) + ahead):
        if i < len(batches):
            rows, _, (n, _) = batches[i]
            loop.complete(n)
            loop.gather(first + i, rows_of(rows))
        if i >= ahead:
            _, writes, (_, n) = batches[i - ahead]
            loop.complete(n)
            number = loop.lend()
            for j, what in enumerate(writes):
                loop.write(number, what, i + j / 10)
    loop.complete(100)
    assert np.array_equal(loop.stores, loop.truth)


def test_spans_have_every_pair_of_equal_rows() -> None:
    """A batch in which a row repeats cannot be written, so it shares no rows with later ones."""
    rng = np.random.default_rng(0)
    recent = RecentRows(2)
    batches = [rng.permutation(20_000)[: 1_000 + 500 * i] for i in range(8)]
    batches[4] = np.append(batches[4], batches[4][-1])
    for number, rows in enumerate(batches):
        # Every other batch is written, and its write is completed some batches later.
        pending = {j for j in range(max(0, number - 5), number - 2) if j % 2 == 0}
        shared = compared(recent, number, [rows, rows[:100]], pending)
        for group, of_group in enumerate((rows, rows[:100])):
            overlaps = shared.overlaps[group]
            wanted = pending | set(range(max(0, number - 2), number))
            wanted -= set() if group else {4}
            assert overlaps.keys() <= wanted
            newer: set[int] = set()
            for j in sorted(wanted, reverse=True):
                earlier = batches[j] if not group else batches[j][:100]
                latest, hidden = overlaps.get(j, Overlap(PositionRange(0, 0), PositionRange(0, 0)))
                held = np.isin(of_group, earlier)
                is_new = ~np.isin(of_group, list(newer))
                for span, expected in ((latest, held & is_new), (hidden, held & ~is_new)):
                    at = shared.positions[slice(*span.later)]
                    source = shared.positions[slice(*span.earlier)]
                    assert sorted(at.tolist()) == np.flatnonzero(expected).tolist()
                    assert np.array_equal(of_group[at], earlier[source])
                newer |= set(earlier.tolist())


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("n_rows", [1, 100, 4096])
def test_the_memory_of_recent_rows_is_planned(n_rows: int, ahead: int) -> None:
    recent = RecentRows(ahead)
    for number in range(3 * ahead):
        # The writer is as late as it may be.
        pending = range(number - 2 * max(ahead, 2), number - ahead)
        shared = compared(recent, number, [np.arange(n_rows)], pending)
    allocations = shared_row_allocations(n_rows, ahead, 8 * n_rows, unified=True)
    planned = {item.what: item for item in allocations}
    (kept,) = recent._groups
    nbytes = sum(batch.rows.nbytes + batch.order.nbytes for batch in kept.values())
    assert nbytes <= planned["rows of recent batches"].total
    assert shared.positions.nbytes <= planned["positions of shared rows"].nbytes
    found = shared.positions.nbytes + SPARE_ROW_NBYTES * n_rows
    assert found <= planned["comparison of rows"].total


def test_rows_stay_as_they_are() -> None:
    recent = RecentRows(2)
    one = rows_of([5, 1, 3])
    other = rows_of([3, 3, 0, 5])
    compared(recent, 0, [one])
    shared = compared(recent, 1, [other])
    span = shared.overlaps[0][0].latest
    pairs = zip(
        shared.positions[slice(*span.later)].tolist(),
        shared.positions[slice(*span.earlier)].tolist(),
        strict=True,
    )
    assert sorted(pairs) == [(0, 2), (1, 2), (3, 0)]
    assert (one.tolist(), other.tolist()) == ([5, 1, 3], [3, 3, 0, 5])
    assert shared.positions.dtype == np.int32


def test_later_changes_of_row_indices_change_nothing() -> None:
    recent = RecentRows(1)
    for number, numbers in enumerate([[1, 2, 3], [3, 2, 1], [3, 2, 1]]):
        rows = rows_of(numbers)
        shared = compared(recent, number, [rows])
        rows += 10
    assert shared.overlaps[0][1].latest.n_rows == 3


def test_writes_are_compared_by_identity() -> None:
    """Writes are compared by identity, because their values may be tensors."""
    log = WriteLog()
    write = log.append(0, [True], np.zeros(2))
    assert write in [write]
    assert write != Write(0, 0, [True], np.zeros(2))


class CachingLoop(Loop):
    """A loop that gathers some rows of a batch, and writes others."""

    def gather_some(self, number: int, rows: np.ndarray, written: np.ndarray) -> None:
        pending = self.log.pending_batches()
        scaled = [rows * self.scale], pending, [written * self.scale]
        shared = compared(self.recent, number, *scaled)
        self.rows[number] = written
        self.gathered.append((number, rows, self.stores[:, rows], self.log.completed, shared))


DISTINCT = st.lists(st.integers(0, N - 1), max_size=8, unique=True).map(rows_of)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            DISTINCT,
            DISTINCT,
            st.lists(st.sampled_from(STORES), max_size=2),
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
        ),
        max_size=20,
    ),
    st.integers(1, 4),
    st.sampled_from([1, 1 << 52]),
)
def test_a_batch_that_gathers_and_writes_other_rows(
    batches: list[Any], ahead: int, scale: int
) -> None:
    """The rows that a batch writes may have any order, and may be other rows than it gathers."""
    loop = CachingLoop(ahead, scale, 0)
    for i in range(len(batches) + ahead):
        if i < len(batches):
            rows, written, _, (n, _) = batches[i]
            loop.complete(n)
            loop.gather_some(i, rows, written)
        if i >= ahead:
            _, _, writes, (_, n) = batches[i - ahead]
            loop.complete(n)
            number = loop.lend()
            for j, what in enumerate(writes):
                loop.write(number, what, i + j / 10)
    loop.complete(100)
    assert np.array_equal(loop.stores, loop.truth)
