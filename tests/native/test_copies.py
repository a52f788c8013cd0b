"""The compiled copies, compared with numpy."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed.errors import ClosedError
from pinfeed.memory.pages import huge
from pinfeed.native import library as native
from pinfeed.native.engine import Engine
from pinfeed.native.library import Kind, packing, request_each
from pinfeed.native.memory_rows import MemoryPart, MemoryRows
from pinfeed.rows import permutation as permutations

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

ROW_NBYTES = [1, 2, 3, 4, 8, 12, 16, 31, 32, 64, 100, 128, 384, 1000, 4096]


def rows_of(n: int, row_nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, row_nbytes), dtype=np.uint8)


def memory_rows(array: npt.NDArray[Any]) -> MemoryRows:
    found = MemoryRows.of_array(array)
    assert found is not None
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("row_nbytes", ROW_NBYTES)
@pytest.mark.parametrize("stride", [0, 1, 64])
@settings(max_examples=20)
@given(data=st.data())
def test_rows_equal_those_of_numpy(row_nbytes: int, stride: int, data: st.DataObject) -> None:
    array = rows_of(50, row_nbytes + stride)[:, :row_nbytes]
    indices = st.integers(0, 49)
    runs = st.tuples(indices, st.integers(0, 60)).map(lambda run: range(run[0], min(sum(run), 50)))
    rows = np.array(data.draw(st.one_of(st.lists(indices, max_size=60), runs)), np.int64)
    out = np.full((len(rows), row_nbytes), 7, np.uint8)
    memory_rows(array).gather(rows, out)
    np.testing.assert_array_equal(out, array[rows])

    positions = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    scattered = np.full((len(rows) + 2, row_nbytes), 7, np.uint8)
    memory_rows(array).gather(rows, scattered, positions)
    np.testing.assert_array_equal(scattered[positions], array[rows])
    assert (scattered[len(rows) :] == 7).all()


@pytest.mark.parametrize("row_nbytes", [8, 64, 100, 192, 4096])
@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 19), max_size=60))
def test_scattered_rows_equal_those_of_numpy(row_nbytes: int, rows: list[int]) -> None:
    """Of a row that occurs twice, the last value remains."""
    target = np.zeros((20, row_nbytes), np.uint8)
    values = rows_of(len(rows), row_nbytes)
    expected = target.copy()
    expected[rows] = values
    memory_rows(target).scatter(np.array(rows, np.int64), values)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    ("begin", "shape", "expected"),
    [(0, (4, 64), True), (1, (4, 64), False), (0, (4, 96), False), (64, (2, 128), True)],
)
def test_rows_have_whole_lines(begin: int, shape: tuple[int, int], expected: bool) -> None:
    memory = huge(4096)[begin : begin + shape[0] * shape[1]]
    assert memory_rows(memory.reshape(shape)).has_whole_lines == expected


@given(runs=st.lists(st.tuples(st.integers(0, 49), st.integers(0, 9)), max_size=8))
def test_runs_equal_those_of_numpy(runs: list[tuple[int, int]]) -> None:
    array = rows_of(50, 24)
    starts = np.array([start for start, _ in runs], np.int64)
    lengths = np.array([min(length, 50 - start) for start, length in runs], np.int64)
    places = np.cumsum(lengths + 1) - lengths - 1
    out = np.full((int((lengths + 1).sum()), 24), 7, np.uint8)
    expected = out.copy()
    for start, length, place in zip(starts, lengths, places, strict=True):
        expected[place : place + length] = array[start : start + length]
    memory_rows(array).gather_runs(starts, lengths, places, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("row_nbytes", [1, 12, 64, 1000])
@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 40, 700, 2000]), min_size=2, max_size=6),
    stride=st.sampled_from([0, 5]),
    seed=st.integers(0, 99),
)
def test_rows_of_several_parts_equal_those_of_numpy(
    row_nbytes: int, sizes: list[int], stride: int, seed: int
) -> None:
    arrays = [rows_of(n, row_nbytes + stride, n)[:, :row_nbytes] for n in sizes]
    whole = np.concatenate(arrays)
    n_rows = len(whole)
    parts = [MemoryPart(x.ctypes.data, len(x), x.strides[0]) for x in arrays]
    joined = MemoryRows(arrays, row_nbytes, parts)
    rng = np.random.default_rng(seed)
    begin = int(rng.integers(n_rows))
    for rows in (
        rng.integers(n_rows, size=1500),
        np.arange(begin, n_rows),
        np.arange(n_rows)[::-7],
    ):
        out = np.zeros((len(rows), row_nbytes), np.uint8)
        joined.gather(rows, out)
        np.testing.assert_array_equal(out, whole[rows])
        places = rng.permutation(len(rows))
        joined.gather(rows, out, places)
        np.testing.assert_array_equal(out[places], whole[rows])
    out = np.zeros((n_rows, row_nbytes), np.uint8)
    run = [np.array([i], np.int64) for i in (begin, n_rows - begin, begin)]
    joined.gather_runs(*run, out)
    np.testing.assert_array_equal(out[begin:], whole[begin:])
    joined.gather(np.array([-1, n_rows, 1 << 60, -(1 << 60)]), out[:4])


def test_an_index_changed_after_its_check_reads_no_other_memory() -> None:
    array = rows_of(50, 8)
    out = np.empty((3, 8), np.uint8)
    memory_rows(array).gather(np.array([-1, 50, 1 << 60]), out)
    np.testing.assert_array_equal(out, array[[-1, -1, -1]])


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_an_engine_gathers_every_row_of_every_job(n_threads: int, bypass: bool) -> None:
    arrays = [rows_of(3000, row_nbytes) for row_nbytes in ROW_NBYTES]
    rng = np.random.default_rng(1)
    engine = Engine(
        [memory_rows(array) for array in arrays],
        n_threads=n_threads,
        n_jobs=3,
        ring_at=2,
        bypass=bypass,
    )
    waiting: list[tuple[int, Any, list[Any]]] = []
    for n in [0, 1, 700, 3000, 5, 1234, 64, 2000]:
        rows = rng.integers(3000, size=n) if n != 64 else np.arange(100, 164)
        outs = [np.empty((n, array.shape[1]), np.uint8) for array in arrays]
        job = engine.submit(rows.ctypes.data, n, [out.ctypes.data for out in outs], (rows, outs))
        waiting.append((job, rows, outs))
        if len(waiting) == 3:
            check(engine, arrays, *waiting.pop(0))
    for one in waiting:
        check(engine, arrays, *one)
    engine.shutdown()
    with pytest.raises(ClosedError):
        engine.wait(0)


def check(engine: Engine, arrays: list[Any], job: int, rows: Any, outs: list[Any]) -> None:
    result = engine.wait(job)
    assert not result.failed
    assert result.begin_s <= result.end_s
    for array, out in zip(arrays, outs, strict=True):
        np.testing.assert_array_equal(out, array[rows])


@pytest.mark.parametrize("n", [4097, 5000, 65_536, 65_537, 131_072, 10**6 + 3, 10**9, 2**31 - 1])
def test_permutations_equal_those_of_numpy(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = np.unique(np.random.default_rng(n).integers(0, n, 3000))
    compiled = permutations.permutation(n, "1/2")(positions)
    monkeypatch.setattr(permutations, "library", lambda: None)
    np.testing.assert_array_equal(compiled, permutations.permutation(n, "1/2")(positions))


def test_requests_report_what_each_moved(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(200)))
    memory = np.zeros(4 * 100, np.uint8)
    addresses = memory.ctypes.data + 100 * np.arange(4)
    offsets = np.array([10, 150, 300, -2])
    nbytes = np.array([100, 100, 100, 100])
    fd = os.open(path, os.O_RDWR)
    try:
        for kind in (Kind.READ, Kind.READ_CACHED):
            memory[:] = 255
            results = request_each(fd, kind, addresses, offsets, nbytes)
            assert results is not None
            assert results.tolist() == [100, 50, 0, -errno.EINVAL]
            np.testing.assert_array_equal(memory[:150], [*range(10, 110), *range(150, 200)])
        n = 1000
        places = np.random.default_rng(1).permutation(n)
        values = np.arange(n, dtype=np.uint16)
        results = request_each(
            fd, Kind.WRITE, values.ctypes.data + 2 * np.arange(n), 2 * places, np.full(n, 2)
        )
        assert results is not None
        assert (results == 2).all()
        np.testing.assert_array_equal(np.fromfile(path, np.uint16)[places], values)
    finally:
        os.close(fd)


def test_arguments_are_packed_as_the_c_code_reads_them() -> None:
    assert packing(2)(1, -2) == np.array([1, -2], np.int64).tobytes()
