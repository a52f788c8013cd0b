"""RaggedStore: its rows from every kind of store, its arguments, and its files."""

import contextlib
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ragged import Ragged
from support.stores import saved

from pinfeed import (
    ArgumentError,
    ArrayStore,
    ClosedError,
    Feeder,
    NpyStore,
    PinfeedError,
    PinnedStore,
    RaggedStore,
    ReadError,
    RemoteStore,
    RowDataset,
    StoreError,
)
from pinfeed.errors import FileMissing
from pinfeed.rows.runs import Runs
from pinfeed.stores import array, host_rows

LAYOUTS = ["offsets", "padded"]


class Own(ArrayStore):
    """A store whose rows are not those of its array."""

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        out += 1


def shards(folder: Path, values: np.ndarray) -> str:
    for i, part in enumerate(np.split(values, [1, 2, len(values) // 2])):
        np.save(folder / f"shard-{i}.npy", part)
    return str(folder / "shard-*.npy")


KINDS: dict[str, Any] = {
    "array": lambda folder, values: values,
    "tensor": lambda folder, values: torch.from_numpy(values),
    "strided array": lambda folder, values: np.repeat(values, 2, axis=0)[::2],
    "pinned": lambda folder, values: PinnedStore(values, pin=False),
    "arrow": lambda folder, values: pa.chunked_array([values[:7], values[7:]]),
    "file": lambda folder, values: saved(folder / "values.npy", values),
    "shards": shards,
    "swapped file": lambda folder, values: saved(
        folder / "swapped.npy", values.astype(values.dtype.newbyteorder())
    ),
    "memory map": lambda folder, values: np.load(saved(folder / "v.npy", values), mmap_mode="r"),
    "mapped file": lambda folder, values: NpyStore(saved(folder / "values.npy", values)).map_rows(),
    "mapped shards": lambda folder, values: NpyStore(shards(folder, values)).map_rows(),
    "uncached file": lambda folder, values: NpyStore(
        saved(folder / "values.npy", values), keep_cache=False
    ),
    "remote": lambda folder, values: f"file://{saved(folder / 'values.npy', values)}",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [3, 600])
def test_rows_of_every_kind_of_store(kind: str, longest: int, tmp_path: Path) -> None:
    plain = Ragged(20, longest, gap=2)
    rng = np.random.default_rng(longest)
    with RaggedStore(KINDS[kind](tmp_path, plain.values), plain.offsets) as store:
        for n in (0, 1, 7, 20):
            for rows in (np.arange(n), rng.integers(0, 20, n)):
                for layout in LAYOUTS:
                    for got, want in zip(
                        store.read(rows, layout), plain.batch(rows, layout), strict=True
                    ):
                        assert got.dtype == want.dtype
                        np.testing.assert_array_equal(got, want)
    if isinstance(store.items, (NpyStore, RemoteStore)) and kind != "uncached file":
        with pytest.raises(ClosedError):
            store.read(np.arange(3))
    else:
        store.items.close()


@pytest.mark.parametrize("step", [1, 3, 5])
def test_items_that_are_windows(step: int, tmp_path: Path) -> None:
    series = np.arange(70)
    path = saved(tmp_path / "series.npy", series)
    every = np.lib.stride_tricks.sliding_window_view(series, 3)[::step]
    offsets = [0, 4, 4, 5, 11]
    rows = np.array([3, 0, 1, 2])
    with NpyStore.windows(path, length=3, step=step) as windows:
        values, bounds = RaggedStore(windows, offsets).read(rows, "offsets")
        expected = [every[offsets[row] : offsets[row + 1]] for row in rows]
        np.testing.assert_array_equal(values, np.concatenate(expected))
        np.testing.assert_array_equal(bounds, [0, 6, 10, 10, 11])
        ragged = RaggedStore(windows, offsets)
        with Feeder(ragged, rows=[rows], device="cpu") as feeder:
            [(values, bounds)] = feeder
            np.testing.assert_array_equal(values.numpy(), np.concatenate(expected))


def test_rows_without_compiled_functions(tmp_path: Path, without_native: None) -> None:
    plain = Ragged(40, 30)
    with RaggedStore(saved(tmp_path / "x.npy", plain.values), plain.offsets) as store:
        rows = np.random.default_rng(1).permutation(40)
        np.testing.assert_array_equal(store.read(rows)[0], plain.batch(rows, "offsets")[0])


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.complex64, ml_dtypes.bfloat16, "i1"])
@pytest.mark.parametrize("item_shape", [(), (3,), (2, 2), (0,)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_items_of_every_shape(dtype: Any, item_shape: tuple[int, ...], layout: Any) -> None:
    plain = Ragged(12, 5, item_shape, dtype)
    store = RaggedStore(plain.values, plain.offsets, layout=layout, padding=1)
    assert (store.item_shape, store.dtype) == (item_shape, plain.values.dtype)
    rows = np.array([3, 3, 11, 0])
    for got, want in zip(store.read(rows), plain.batch(rows, layout, 1), strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_of_a_store_with_a_gather_of_its_own() -> None:
    plain = Ragged(9, 4)
    store = RaggedStore(Own(plain.values), plain.offsets)
    np.testing.assert_array_equal(store.read(np.arange(9))[0], plain.values + 1)
    replaced = ArrayStore(plain.values)
    replaced.gather = lambda rows, out: out.fill(7)  # type: ignore[method-assign]
    assert set(RaggedStore(replaced, plain.offsets).read(np.arange(9))[0]) == {7}


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9), st.integers(0, 2)), max_size=12))
@settings(max_examples=50)
def test_runs_of_any_kind(given_runs: list[tuple[int, int, int]]) -> None:
    starts, lengths, gaps = np.array(given_runs, np.int64).reshape(-1, 3).T
    places = np.cumsum(gaps) + np.cumsum(lengths) - lengths
    wanted = Runs(starts, lengths, places)
    source = np.arange(100, dtype=np.int16)
    n = int((places + lengths).max(initial=0))
    want = np.full(n, -1, np.int16)
    for start, length, place in zip(starts, lengths, places, strict=True):
        want[place : place + length] = source[start : start + length]
    for short, piece in ((0, 4), (1000, 4), (1000, 1000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(array, "_SLICED_RUNS", 0)
            patch.setattr(array, "_SHORT_RUN", short)
            patch.setattr(array, "_SHORT_RUN_WITH_GAPS", short)
            patch.setattr(array, "_PIECE_ROWS", piece)
            patch.setattr(host_rows, "_STEP_ROWS", piece)
            for store in (ArrayStore(source), Plain(source)):
                got = np.full(n, -1, np.int16)
                host_rows.run_gather(store)(wanted, got)
                np.testing.assert_array_equal(got, want)
    parts = list(wanted.by_part(np.array([10, 10, 50, 100])))
    rows = [row for number, part in parts for row in part.rows() + [0, 10, 10, 50][number]]
    assert sorted(rows) == sorted(wanted.rows().tolist())
    assert sorted(row for _, part in parts for row in part.positions()) == sorted(
        wanted.positions().tolist()
    )


class Plain(ArrayStore):
    """A store that gathers rows by their indices only."""

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)


# -- offsets and options ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.int64])
def test_offsets_from_a_file(dtype: Any, tmp_path: Path) -> None:
    plain = Ragged(11, 5)
    path = saved(tmp_path / "offsets.npy", plain.offsets.astype(dtype))
    store = RaggedStore(plain.values, path)
    np.testing.assert_array_equal(store.offsets, plain.offsets)
    np.testing.assert_array_equal(store.lengths, np.diff(plain.offsets))
    assert store.offsets.dtype == store.lengths.dtype == np.int64
    assert (store.n_rows, store.n_items, store.writable) == (11, len(plain.values), False)
    assert store.resident_bytes >= 12 * 8
    assert "<RaggedStore: 11 rows of <ArrayStore: " in repr(store)


@pytest.mark.parametrize(("offsets", "warns"), [([5, 5], True), ([0, 10], False), ([2, 9], False)])
def test_lengths_in_place_of_offsets_cause_a_warning(
    offsets: list[int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    RaggedStore(np.arange(10), offsets)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert all(text.startswith("offsets begins at 5, so 10 of 10 items are") for text in messages)


def test_offsets_are_copied() -> None:
    offsets = np.array([0, 2, 3])
    store = RaggedStore(np.arange(3), offsets)
    offsets[:] = 9
    assert store.lengths.tolist() == [2, 1]
    with pytest.raises(ValueError, match="read-only"):
        store.offsets[0] = 1


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "decreasing": (np.arange(3), [0, 2, 1, 0], {}, r"offsets\[2\] is 1, but offsets\[1\] is 2"),
    "too far": (np.arange(3), [0, 3, 4, 5], {}, r"offsets\[2\] is 4, but values has 3 items"),
    "negative": (np.arange(3), [-1, 2], {}, r"offsets\[0\] is -1"),
    "too large": (np.arange(3), np.array([0, 1 << 63], np.uint64), {}, "is too large"),
    "no rows": (np.arange(3), [0], {}, "for at least one row"),
    "floats": (np.arange(3), [0.0, 1.0], {}, "of float64; expected integers"),
    "two axes": (np.arange(3), [[0, 1]], {}, r"shape \(1, 2\)"),
    "no array": (np.arange(3), None, {}, "offsets: got NoneType"),
    "no items": (np.empty(0), [0, 0], {}, "values: shape .* has no rows"),
    "values of a list": ([1, 2], [0, 1], {}, "values is a list; expected one array"),
    "layout": (np.arange(3), [0, 1], {"layout": "ragged"}, "layout='ragged': expected 'offsets'"),
    "padding too large": (
        np.arange(3, dtype="u1"),
        [0, 1],
        {"padding": 256},
        "that uint8 can represent",
    ),
    "padding of a fraction": (np.arange(3), [0, 1], {"padding": 0.5}, "padding=0.5: expected"),
    "padding of a word": (np.arange(3.0), [0, 1], {"padding": "x"}, "padding='x': expected"),
    "lengths": (np.arange(3), [0, 1], {"lengths": [1]}, "give offsets: np.concatenate"),
    "itself": (RaggedStore(np.arange(3), [0, 1]), [0, 1], {}, "values is a RaggedStore; expected"),
    "missing file": ("nowhere.npy", [0, 1], {}, "nowhere.npy: no such file"),
    "missing offsets": (np.arange(3), "nowhere.npy", {}, "nowhere.npy: no such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    values, offsets, options, message = BAD[name]
    with pytest.raises(PinfeedError, match=message):
        RaggedStore(values, offsets, **options)


def test_kinds_of_errors(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        RaggedStore(np.arange(3), [0, 1], layout="x")  # type: ignore[arg-type]
    with pytest.raises(FileMissing):
        RaggedStore(tmp_path / "x.npy", [0, 1])
    with pytest.raises(StoreError):
        RaggedStore(saved(tmp_path / "x.npy", np.arange(3)), [0, 9])


@pytest.mark.parametrize("padding", [-1e9, np.float32(2), float("nan")])
def test_padding_of_floats(padding: Any) -> None:
    store = RaggedStore(np.zeros(3, np.float32), [0, 1, 3], layout="padded", padding=padding)
    np.testing.assert_array_equal(store.read(np.array([0, 1]))[0][0, 1], np.float32(padding))


# -- files -----------------------------------------------------------------------------------------
def test_a_store_that_was_given_stays_open(tmp_path: Path) -> None:
    plain = Ragged(9, 4)
    path = saved(tmp_path / "x.npy", plain.values)
    with NpyStore(path) as items:
        RaggedStore(items, plain.offsets).close()
        np.testing.assert_array_equal(
            RaggedStore(items, plain.offsets).read(np.arange(9))[0], plain.values
        )
    with RaggedStore(path, plain.offsets) as store:
        store.read(np.arange(9))
    store.close()
    with pytest.raises(ClosedError):
        store.read(np.arange(9))


@pytest.mark.parametrize("memory_map", [True, False])
def test_a_file_that_has_shrunk_is_an_error(memory_map: bool, tmp_path: Path) -> None:
    plain = Ragged(60, 90)
    path = saved(tmp_path / "x.npy", plain.values)
    with NpyStore(path) as items, contextlib.closing(items.map_rows()) as mapped:
        store = RaggedStore(mapped if memory_map else items, plain.offsets)
        with open(path, "r+b") as file:
            file.truncate(4096)
        with pytest.raises(ReadError, match=r"shrunk|ended"):
            store.read(np.arange(60)[::-1])


def test_a_pickle_opens_the_file_again(tmp_path: Path) -> None:
    plain = Ragged(9, 4)
    with RaggedStore(saved(tmp_path / "x.npy", plain.values), plain.offsets) as store:
        copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copied.read(np.arange(9))[0], plain.values)
    copied.close()


# -- Arrow -----------------------------------------------------------------------------------------
LISTS = pa.array([[1, 2], [], [3, 4, 5], [6]])
COLUMNS: dict[str, Any] = {
    "one chunk": LISTS,
    "a slice": LISTS[1:],
    "large lists": LISTS.cast(pa.large_list(pa.int16())),
    "several chunks": pa.chunked_array([LISTS[2:], LISTS[:1], LISTS[:0], LISTS[1:3]]),
    "booleans": pa.array([[True], [], [False, True, True]]),
    "several chunks of booleans": pa.chunked_array([[[True]], [[], [False, True]]]),
    "fixed lists": pa.array([[[1.0, 2.0]], [], [[3.0, 4.0]]], pa.list_(pa.list_(pa.float32(), 2))),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_lists_of_an_arrow_column(name: str) -> None:
    column = COLUMNS[name]
    dataset = RowDataset(RaggedStore.from_arrow(column))
    assert [row.tolist() for row in dataset] == column.to_pylist()
    padded = RowDataset(RaggedStore.from_arrow(column, layout="padded", padding=1))
    values, lengths = padded[[1, 0]]
    assert [row[:n].tolist() for row, n in zip(values, lengths, strict=True)] == [
        column.to_pylist()[i] for i in (1, 0)
    ]


def test_one_chunk_is_not_copied() -> None:
    items = pa.array(np.arange(9, dtype=np.float32))
    column = pa.ListArray.from_arrays(pa.array([0, 4, 9], pa.int32()), items)
    [chunk] = RaggedStore.from_arrow(column).items.arrays
    assert np.shares_memory(chunk, items.to_numpy())


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None]), "1 of 2 lists are null"),
        (pa.array([[1, None]]), "has nulls"),
        (pa.array([["a"]]), "a column of string"),
        (pa.array([1, 2]), "got int64; expected a column of lists"),
        ([[1], [2]], "got list; expected a column of lists"),
        (LISTS[:0], "the column has no rows"),
        (pa.array([[], []], pa.list_(pa.int8())), "the column has no rows"),
        ({"a": pa.array([[], []], pa.list_(pa.int8()))}, "the column has no rows"),
    ],
)
def test_columns_that_cannot_be_served(column: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        RaggedStore.from_arrow(column)
