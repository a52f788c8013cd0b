"""Matrices of columns of Parquet files: equal to numpy's, in pieces, with nulls and folders."""

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pinfeed
from pinfeed import Feeder, ParquetStore, errors
from pinfeed.stores import chunked, parquet, parquet_files
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

NAMES = ["a", "b.c", "flag", "small", "big"]


def table(n: int, *, nulls: bool = False, seed: int = 0) -> pa.Table:
    """Return columns of several dtypes, some of them with nulls, and one of text."""
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.3 if nulls else np.zeros(n, bool)
    columns = {
        "text": pa.array(["x"] * n, pa.string()),
        "big": pa.array(rng.integers(-(2**40), 2**40, n), mask=mask),
        "a": pa.array(rng.normal(size=n), mask=mask[::-1]),
        "b.c": pa.array(rng.normal(size=n).astype("float32")),
        "flag": pa.array(rng.integers(2, size=n).astype(bool), mask=mask),
        "small": pa.array(rng.integers(-100, 100, n, dtype="int8")),
        "b": pa.array([{"c": None}] * n, pa.struct([("c", pa.int64())])),
    }
    return pa.table(columns)


def expected(data: pa.Table, names: list[str], dtype: Any, missing: Any = None) -> np.ndarray:
    """Return the matrix that a loop over the values makes."""
    found = np.empty((data.num_rows, len(names)), dtype)
    for number, name in enumerate(names):
        values = data[name].combine_chunks().to_numpy(zero_copy_only=False)
        is_null = data[name].is_null().to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            for i in range(data.num_rows):
                found[i, number] = missing if is_null[i] else values[i]
    return found


def gathered(store: pinfeed.Store, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


def same(found: np.ndarray, want: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    assert found.tobytes() == want.tobytes()


class TestMatrix(ReadOnlyStoreTests):
    row_shapes = ((1,), (7,))

    @pytest.fixture(params=[name for name in sorted(DTYPES) if name[0] in "uif"] + ["bool"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]

    def make(self, array: np.ndarray, tmp_path: Path) -> ParquetStore:
        names = [f"c{number}" for number in range(array.shape[1])]
        data = pa.table(dict(zip(names, map(pa.array, array.T.copy()), strict=True)))
        pq.write_table(data, tmp_path / "x.parquet", row_group_size=4)
        return ParquetStore(tmp_path / "x.parquet", columns=names)


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_rows_of_any_files(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, row groups, pieces, columns and rows are any; some files and groups are empty."""
    counts = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    group_rows = data.draw(st.integers(1, 40))
    names = data.draw(st.permutations(NAMES))[: data.draw(st.integers(1, len(NAMES)))]
    dtype = data.draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"]))
    missing = data.draw(st.sampled_from([math.nan, 0, -1.5]))
    if not sum(counts):
        return
    # Small limits divide row groups, passes over their columns and pieces.
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_CHUNK_BYTES", data.draw(st.sampled_from([40, 200, 1 << 20])))
        patch.setattr(parquet, "DECODED_BYTES", data.draw(st.sampled_from([1, 1 << 18, 1 << 24])))
        patch.setattr(parquet_files, "_MATRIX_PIECE_BYTES", 1)
        patch.setattr(parquet_files, "_LEAST_PIECE_ROWS", data.draw(st.integers(1, 50)))
        decoder = data.draw(st.sampled_from([1, 1000]))
        patch.setattr(parquet.ParquetShard, "decoder_nbytes", lambda *_: decoder)
        parts = [table(n, nulls=True, seed=n) for n in counts]
        files = [tmp_path / f"{number}.parquet" for number in range(len(parts))]
        for part, file in zip(parts, files, strict=True):
            pq.write_table(part, file, row_group_size=group_rows)
        want = expected(pa.concat_tables(parts), list(names), DTYPES[dtype], missing)
        with ParquetStore(files, columns=names, dtype=dtype, missing=missing) as store:
            same(gathered(store, np.arange(len(want))), want)
            for _ in range(4):
                rows = data.draw(st.lists(st.integers(0, len(want) - 1), max_size=30))
                same(gathered(store, rows), want[np.array(rows, np.int64)])


def test_a_name_that_is_also_the_path_of_a_field(tmp_path: Path) -> None:
    """The field has nulls, and the column has none."""
    pq.write_table(table(9), tmp_path / "x.parquet")
    store = ParquetStore(tmp_path / "x.parquet", columns=["b.c"])
    same(gathered(store, range(9)), expected(table(9), ["b.c"], "float32"))


def large(path: Path, n: int = 5000, n_columns: int = 3) -> tuple[ParquetStore, np.ndarray]:
    """Return a store of one row group, which it keeps in pieces, and its rows."""
    array = np.arange(n * n_columns, dtype=np.float64).reshape(n, n_columns)
    names = [f"c{number}" for number in range(n_columns)]
    data = pa.table(dict(zip(names, map(pa.array, array.T.copy()), strict=True)))
    pq.write_table(data, path, row_group_size=n, use_dictionary=False)
    return ParquetStore(path, columns=names), array


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each opening of a row group adds its number and its columns."""
    opened = []
    read = parquet.ParquetShard.read

    def counting(self: Any, group: int, names: Any, n_rows: int, **options: bool) -> Any:
        opened.append((group, len(names)))
        return read(self, group, names, n_rows, **options)

    monkeypatch.setattr(parquet.ParquetShard, "read", counting)
    return opened


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(parquet.ParquetShard, "decoder_nbytes", lambda *_: 1000)


def test_pieces_in_sequence_are_copied_in_the_second_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    store, array = large(tmp_path / "x.parquet")
    assert len(store.bounds) == 7
    assert store.chunk_nbytes < array.nbytes // 5
    opened = counted(monkeypatch)
    counts = []
    with Feeder(store, batch_size=100, device="cpu") as feeder:
        for _ in range(3):
            found = np.concatenate([batch.numpy() for batch in feeder])
            same(found, array)
            counts.append(len(opened))
    assert set(opened) == {(0, 3)}
    # The second epoch decodes the group once, into a copy.
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 0]


def test_a_whole_row_group_is_decoded_some_columns_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    monkeypatch.setattr(parquet, "DECODED_BYTES", 2000)
    store, array = large(tmp_path / "x.parquet")
    opened = counted(monkeypatch)
    with Feeder(store, batch_size=100, shuffle=True, seed=3, device="cpu") as feeder:
        assert "decoded into RAM during the first epoch" in str(feeder.plan).replace("\n    ", " ")
        for _ in range(2):
            for batch in feeder.batches():
                same(batch.data.numpy(), array[batch.rows])
    assert opened == [(0, 2), (0, 1)]


def test_pieces_keep_a_loop_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is one row group that is larger than the limit."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(parquet, "_CHUNK_BYTES", 500_000)
    monkeypatch.setattr(chunked, "_KEPT_BYTES", 1_000_000)
    store, array = large(tmp_path / "x.parquet", 200_000, 6)
    limit = pinfeed.MiB(8)
    assert array.nbytes > limit
    order = pinfeed.rows.block_shuffled(seed=1, block_rows=10_000, window_blocks=4)
    config = pinfeed.Config(cpu_memory_limit=limit, preferred_batch_size=2000)
    for rows in (pinfeed.rows.sequential(), order):
        with Feeder(store, rows=rows, config=config, device="cpu") as feeder:
            assert feeder.plan.host_bytes <= limit
            for batch in feeder.batches():
                same(batch.data.numpy(), array[batch.rows])


@pytest.mark.parametrize("depth", [0, 2])
def test_ranks_and_resume(tmp_path: Path, depth: int) -> None:
    data = table(500)
    pq.write_table(data, tmp_path / "x.parquet", row_group_size=60)
    want = expected(data, ["big", "a"], np.float64)
    options = {"shuffle": True, "seed": 4, "depth": depth, "device": "cpu"}

    def feeder(rank: int) -> Feeder[Any]:
        store = ParquetStore(tmp_path / "x.parquet", columns=["big", "a"])
        ranks = pinfeed.Ranks("drop", rank=rank, world_size=2)
        return Feeder(store, batch_size=30, ranks=ranks, **options)

    seen = []
    for rank in range(2):
        with feeder(rank) as one, feeder(rank) as other:
            batches = one.batches()
            for _ in range(3):
                batch = next(batches)
                same(batch.data.numpy(), want[batch.rows])
                seen.append(batch.rows)
            other.load_state_dict(one.state_dict())
            rest = list(other.batches())
            for batch, again in zip(batches, rest, strict=True):
                assert batch.data.equal(again.data)
                same(again.data.numpy(), want[again.rows])
                seen.append(again.rows)
    assert sorted(np.concatenate(seen)) == list(range(500))


def test_one_column_with_a_dtype_is_an_array(tmp_path: Path) -> None:
    data = table(50, nulls=True)
    pq.write_table(data, tmp_path / "x.parquet", row_group_size=20)
    store = ParquetStore(tmp_path / "x.parquet", "big", dtype="float32", missing=math.nan)
    assert store.row_shape == ()
    same(gathered(store, range(50)), expected(data, ["big"], "float32", math.nan)[:, 0])


# ---- files and folders ---------------------------------------------------------------------------


def partitioned(path: Path) -> tuple[Path, dict[str, pa.Table]]:
    """Return a partitioned data set as other libraries write it, and its files."""
    files = {
        "year=2023/month=11/part-0.parquet": table(7, seed=1),
        "year=2023/month=2/part-0.parquet": table(5, seed=2),
        "year=__HIVE_DEFAULT_PARTITION__/month=3/part-0.parquet": table(3, seed=3),
    }
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True)
        pq.write_table(data, path / name)
    (path / "_delta_log").mkdir()
    for name in ("_delta_log/1.parquet", "_metadata.parquet", ".a.parquet", "_SUCCESS"):
        (path / name).write_text("")
    return path, files


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    path, files = partitioned(tmp_path / "data.parquet")
    want = np.concatenate([expected(data, ["a", "small"], "float64") for data in files.values()])
    for source in (path, [path / name for name in files], str(path / "*" / "*" / "*.parquet")):
        with ParquetStore(source, columns=["a", "small"]) as store:
            same(gathered(store, range(15)), want)
    with Feeder({"x": ParquetStore(path, "small")}, batch_size=15, device="cpu") as feeder:
        (batch,) = feeder
    assert batch["x"].tolist() == want[:, 1].tolist()


def test_keys_of_folders_are_columns(tmp_path: Path) -> None:
    path, files = partitioned(tmp_path)
    store = ParquetStore(path, columns=["month", "a", "year"], dtype="float64", missing=-1)
    want = np.empty((15, 3))
    want[:, 0] = [11] * 7 + [2] * 5 + [3] * 3
    want[:, 1] = np.concatenate([data["a"].to_numpy() for data in files.values()])
    want[:, 2] = [2023] * 12 + [-1] * 3
    same(gathered(store, range(15)), want)
    rows = [14, 0, 7, 6]
    same(gathered(store, rows), want[rows])
    only = ParquetStore(path, columns=["month"])
    assert only.dtype == np.int64
    assert gathered(only, range(15))[:, 0].tolist() == want[:, 0].tolist()


def test_a_key_of_folders_is_an_array_of_its_numbers(tmp_path: Path) -> None:
    path, _ = partitioned(tmp_path)
    store = ParquetStore(path, "month")
    assert store.dtype == np.int64
    assert gathered(store, range(15)).tolist() == [11] * 7 + [2] * 5 + [3] * 3
    # The year of the last file, which has three rows, is missing.
    with pytest.raises(errors.StoreError, match="'year' has 3 missing values"):
        ParquetStore(path, "year")
    with pytest.raises(errors.StoreError, match=r"no column 'z'; expected one of.*'month'"):
        ParquetStore(path, "z")


def test_keys_of_folders_that_are_no_numbers(tmp_path: Path) -> None:
    for name in ("country=de", "country=fr"):
        (tmp_path / name).mkdir()
        pq.write_table(table(3), tmp_path / name / "x.parquet")
    with pytest.raises(errors.StoreError, match="have country=de; expected a number; leave"):
        ParquetStore(tmp_path, columns=["a", "country"])
    with pytest.raises(errors.StoreError, match=r"no column 'z'; expected one of.*'country'"):
        ParquetStore(tmp_path, columns=["a", "z"])


def test_files_with_different_types(tmp_path: Path) -> None:
    """A file may have whole numbers, and another one only nulls."""
    columns = [pa.array([1, 2]), pa.array([0.5, 1.5], pa.float32()), pa.nulls(2)]
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet")
    store = ParquetStore(tmp_path, columns=["x"], missing=9)
    assert store.dtype == np.float64
    assert gathered(store, range(6))[:, 0].tolist() == [1, 2, 0.5, 1.5, 9, 9]


def test_numbers_that_are_too_large_become_infinite(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1e300, -1e300, 0.1]}), tmp_path / "x.parquet")
    store = ParquetStore(tmp_path / "x.parquet", columns=["x"], dtype="float32")
    same(gathered(store, range(3))[:, 0], np.array([np.inf, -np.inf, 0.1], "float32"))


def test_a_store_is_pickled_as_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    store, array = large(tmp_path / "x.parquet")
    same(gathered(store, [3]), array[[3]])
    copied = pickle.loads(pickle.dumps(store))
    store.close()
    same(gathered(copied, [4999, 0]), array[[4999, 0]])
    with pytest.raises(errors.ClosedError):
        gathered(store, [1])


def test_a_file_that_changes_between_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    store, _ = large(tmp_path / "x.parquet")
    gathered(store, [0])
    large(tmp_path / "x.parquet", 4000)
    with pytest.raises(errors.ReadError, match="has changed since it was opened"):
        gathered(store, [1000])


# ---- what is refused -----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nulls": ({"columns": ["a"]}, r"column 'a' has \d+ missing values.*missing=float\(\"nan\"\)"),
    "text": ({"columns": ["a", "text"]}, "'text': a column of string; expected numbers"),
    "lists": ({"columns": ["lists"]}, "expected one number in each row.*source of its own"),
    "no column": ({"columns": ["a", "z"]}, "no column 'z'; expected one of 'text', 'big'"),
    "integers": ({"columns": ["big"], "dtype": "int32"}, "'big' of int64 does not fit.*wider"),
    "floats": ({"columns": ["a"], "dtype": "int64"}, "'a' of float64 does not fit"),
    "twice": ({"columns": ["a", "a"]}, "same name: a, a; name each column once"),
    "dtype": ({"columns": ["a"], "dtype": "f99"}, "dtype='f99' is unknown"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_columns_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    data = table(50, nulls=True).append_column("lists", pa.array([[1.0]] * 50))
    pq.write_table(data, tmp_path / "x.parquet")
    with pytest.raises(errors.StoreError, match=message):
        ParquetStore(tmp_path / "x.parquet", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of them"),
        ({"column": "a", "columns": ["a"]}, "expected one of them"),
        ({"columns": "a"}, r'such as columns=\["age", "income"\]'),
        ({"columns": []}, "columns has no names"),
        ({"columns": ["a"], "missing": "0"}, "missing='0'; expected a number"),
        ({"columns": ["small"], "missing": math.nan}, "missing=nan is not a number of int8"),
        ({"columns": ["small"], "missing": 300}, "missing=300 is not a number of int8"),
        ({"columns": ["small"], "missing": 0.5}, "missing=0.5 is not a number of int8"),
        ({"columns": ["b.c"], "missing": 1e300}, r"missing=1e\+300 is not a number of float32"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    pq.write_table(table(5), tmp_path / "x.parquet")
    with pytest.raises(errors.ArgumentError, match=message):
        ParquetStore(tmp_path / "x.parquet", **options)


def test_nulls_that_the_metadata_does_not_show(tmp_path: Path) -> None:
    data = pa.table({"x": [1.0, None]})
    pq.write_table(data, tmp_path / "x.parquet", write_statistics=False)
    store = ParquetStore(tmp_path / "x.parquet", columns=["x"])
    with pytest.raises(errors.StoreError, match="column 'x' has 1 missing values"):
        gathered(store, [0])
