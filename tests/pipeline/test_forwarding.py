"""Forwarding finds the rows written after a gather, as a model that compares every pair does."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed.errors import WriteBackError
from pinfeed.pipeline.forwarding import Write, WriteLog, WrittenRows, newest

# Rows of the store: few, so that batches overlap.
N = 12
UNIQUE = st.lists(st.integers(0, N - 1), unique=True)
REPEATED = st.lists(st.integers(0, N - 1), max_size=20)


def rows_of(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


@settings(deadline=None)
@given(written=UNIQUE, batch=REPEATED)
def test_overlap_is_every_pair_of_equal_rows(written: list[int], batch: list[int]) -> None:
    dst_pos, src_pos = WrittenRows(rows_of(written)).overlap(rows_of(batch))
    assert dst_pos.dtype == src_pos.dtype == np.intp
    pairs = [
        (i, j) for i, wanted in enumerate(batch) for j, row in enumerate(written) if wanted == row
    ]
    assert list(zip(dst_pos.tolist(), src_pos.tolist(), strict=True)) == pairs


@settings(deadline=None)
@given(
    written=st.lists(st.integers(0, 2**63 - 1), unique=True),
    batch=st.lists(st.integers(0, 2**63 - 1)),
    both=st.data(),
)
def test_overlap_of_large_row_numbers(
    written: list[int], batch: list[int], both: st.DataObject
) -> None:
    if written:
        batch += both.draw(st.lists(st.sampled_from(written)))
    dst_pos, src_pos = WrittenRows(rows_of(written)).overlap(rows_of(batch))
    assert (
        [batch[i] for i in dst_pos]
        == [written[j] for j in src_pos]
        == [row for row in batch if row in written]
    )


@pytest.mark.parametrize(
    ("written", "batch"), [([], []), ([], [1, 2]), ([1, 2], []), ([1, 2], [0, 3]), ([0], [N - 1])]
)
def test_no_overlap(written: list[int], batch: list[int]) -> None:
    dst_pos, src_pos = WrittenRows(rows_of(written)).overlap(rows_of(batch))
    assert len(dst_pos) == len(src_pos) == 0


def test_overlap_leaves_the_rows_as_they_are() -> None:
    written, batch = rows_of([5, 1, 3]), rows_of([3, 3, 0, 5])
    write = WrittenRows(written)
    dst_pos, src_pos = write.overlap(batch)
    assert (dst_pos.tolist(), src_pos.tolist()) == ([0, 1, 3], [2, 2, 0])
    assert (written.tolist(), batch.tolist()) == ([5, 1, 3], [3, 3, 0, 5])
    assert write.rows is written


@settings(deadline=None)
@given(st.lists(st.integers(0, N - 1), min_size=2))
def test_a_row_that_is_there_twice_is_refused_by_name(rows: list[int]) -> None:
    twice = {row for row in rows if rows.count(row) > 1}
    if not twice:
        WrittenRows(rows_of(rows))
        return
    with pytest.raises(WriteBackError) as refusal:
        WrittenRows(rows_of(rows))
    found = re.match(
        rf"write_back of {len(rows)} rows in which row (\d+) occurs more than once; "
        "expected every row once",
        str(refusal.value),
    )
    assert found is not None
    assert int(found[1]) in twice


# -- the log ---------------------------------------------------------------------------------------


def test_writes_are_numbered_from_zero_and_kept_in_order() -> None:
    log = WriteLog()
    assert (len(log), log.completed, log.since(0)) == (0, 0, [])
    writes = [log.append([WrittenRows(rows_of([i]))], [i]) for i in range(4)]
    assert [write.number for write in writes] == [0, 1, 2, 3]
    assert [write.values for write in writes] == [[0], [1], [2], [3]]
    assert len(log) == 4
    for number in range(6):
        assert log.since(number) == writes[number:]


def test_what_is_forgotten_is_gone_and_the_rest_stays() -> None:
    log = WriteLog()
    writes = [log.append([WrittenRows(rows_of([i]))], []) for i in range(4)]
    log.forget(0)
    assert log.since(0) == writes
    log.forget(2)
    assert (log.since(0), len(log)) == (writes[2:], 2)
    log.forget(1)
    assert log.since(0) == writes[2:]
    log.forget(100)
    assert (log.since(0), len(log)) == ([], 0)
    assert log.append([WrittenRows(rows_of([0]))], []).number == 4, "numbers continue"
    log.forget(4)
    assert len(log) == 1


def test_a_refused_write_takes_no_number() -> None:
    log = WriteLog()
    log.append([WrittenRows(rows_of([0]))], [])
    with pytest.raises(WriteBackError, match="row 3 occurs more than once"):
        log.append([WrittenRows(rows_of([3, 3]))], [])
    assert len(log) == 1
    assert log.append([WrittenRows(rows_of([3]))], []).number == 1


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["write", "write the first store", "write the second store"]), UNIQUE
        ),
        st.tuples(st.just("gather"), REPEATED),
        st.tuples(st.just("complete"), st.none()),
        st.tuples(st.just("lend"), st.none()),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(EVENTS)
def test_a_batch_with_later_writes_copied_over_is_as_if_gathered_now(
    events: list[tuple[str, Any]],
) -> None:
    """Every batch equals the final store, for writes that are completed late but in order."""
    log = WriteLog()
    stores = np.zeros((2, N))
    truth = np.zeros((2, N))
    pending: list[Write] = []
    gathered: list[tuple[np.ndarray, np.ndarray, int]] = []
    for value, (event, rows) in enumerate(events, 1):
        if event.startswith("write"):
            values = value + np.arange(len(rows)) / 100
            held = [
                None if event == f"write the {other} store" else values
                for other in ("second", "first")
            ]
            pending.append(log.append([WrittenRows(rows_of(rows), whole=event == "write")], held))
            put(truth, rows_of(rows), np.arange(len(rows)), held)
        elif event == "complete" and pending:
            write = pending.pop(0)
            put(stores, write.groups[0].rows, np.arange(len(write.groups[0].rows)), write.values)
            log.completed = write.number + 1
        elif event == "gather":
            gathered.append((rows_of(rows), stores[:, rows_of(rows)], log.completed))
        elif event == "lend" and gathered:
            wanted, batch, seen = gathered.pop(0)
            for write, dst_pos, src_pos in newest(log.since(seen), 0, wanted):
                put(batch, dst_pos, src_pos, write.values)
            assert np.array_equal(batch, truth[:, wanted])
            log.forget(min([log.completed, *(seen for *_, seen in gathered)]))


def put(
    stores: np.ndarray, at: np.ndarray, src_pos: np.ndarray, values: list[np.ndarray | None]
) -> None:
    for store, new in zip(stores, values, strict=True):
        if new is not None:
            store[at] = new[src_pos]


def test_a_row_is_copied_once_where_every_write_is_whole() -> None:
    log = WriteLog()
    for i in range(3):
        log.append([WrittenRows(rows_of([0, 10 + i, [4, 3, 3][i]]))], [])
    found = newest(log.since(0), 0, rows_of([4, 0, 3, 0]))
    assert [(write.number, dst.tolist(), src.tolist()) for write, dst, src in found] == [
        (0, [0], [2]),
        (2, [1, 2, 3], [0, 2, 0]),
    ]
