"""ParquetStore: rows of columns of Parquet files, bit for bit; columns that cannot be served."""

import decimal
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pinfeed import Feeder, ParquetStore, errors
from pinfeed.stores import parquet_files
from pinfeed.stores.arrow import rows_of_chunk, values_of
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

X = np.arange(1200, dtype=np.float32).reshape(200, 6)


def column(array: np.ndarray, *, fixed: bool = True) -> pa.Array:
    """Return a column of the rows of ``array``."""
    made = pa.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        n = array.shape[axis]
        offsets = np.arange(int(np.prod(array.shape[:axis])) + 1, dtype=np.int32) * n
        if fixed:
            made = pa.FixedSizeListArray.from_arrays(made, n)
        else:
            made = pa.ListArray.from_arrays(offsets, made)
    return made


def written(path: Path, rows_of_group: int = 70, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_of_group)
    return path


def gathered(store: ParquetStore, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


class TestColumn(ReadOnlyStoreTests):
    row_shapes = ((), (2, 3, 4))

    @pytest.fixture(params=[name for name in sorted(DTYPES) if name[0] in "uif"] + ["bool"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]

    def make(self, array: np.ndarray, tmp_path: Path) -> ParquetStore:
        made = column(array)
        return ParquetStore(written(tmp_path / "x.parquet", 4, y=made, x=made), "x")


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_lists_of_one_length(tmp_path: Path, dtype: str) -> None:
    array = (X % 3).astype(dtype).reshape(200, 2, 3)
    store = ParquetStore(written(tmp_path / "x.parquet", x=column(array, fixed=False)), "x")
    assert (store.row_shape, store.dtype) == ((2, 3), np.dtype(dtype))
    np.testing.assert_array_equal(gathered(store, [199, 0, 3, 3]), array[[199, 0, 3, 3]])
    np.testing.assert_array_equal(gathered(store, range(200)), array)


def test_shards(tmp_path: Path) -> None:
    for i, (start, stop) in enumerate([(0, 90), (90, 90), (90, 200)]):
        written(tmp_path / f"x-{i}.parquet", x=column(X[start:stop]), y=np.arange(start, stop))
    store = ParquetStore(tmp_path / "x-*.parquet", "x")
    assert store.bounds.tolist() == [0, 70, 90, 160, 200]
    assert repr(store) == "ParquetStore(x-0.parquet and 2 more['x'])"
    np.testing.assert_array_equal(gathered(store, [199, 0, 89, 90]), X[[199, 0, 89, 90]])
    store.close()
    files = [tmp_path / "x-2.parquet", tmp_path / "x-0.parquet"]
    for source in (str(tmp_path / "x-*.parquet"), ParquetStore.columns(files)):
        with Feeder(source, batch_size=200, device="cpu") as feeder:
            batch = next(iter(feeder))
        np.testing.assert_array_equal(batch["x"].numpy(), X[batch["y"].numpy()])
        assert batch["y"].tolist() == (
            list(range(200)) if isinstance(source, str) else [*range(90, 200), *range(90)]
        )


def test_names_with_a_common_beginning(tmp_path: Path) -> None:
    """The name of a column may also be the beginning of the path of another one."""
    columns = {"a": column(X), "a.b": np.arange(200), "c.list": X[:, 0]}
    path = written(tmp_path / "x.parquet", **columns)
    stores = ParquetStore.columns(path)
    assert list(stores) == list(columns)
    np.testing.assert_array_equal(gathered(stores["a"], [199, 3]), X[[199, 3]])
    assert gathered(stores["a.b"], [199, 3]).tolist() == [199, 3]
    assert gathered(stores["c.list"], [199, 3]).tolist() == [1194, 18]


def test_a_store_is_pickled_as_its_path(tmp_path: Path) -> None:
    store = ParquetStore(written(tmp_path / "x.parquet", x=column(X)), "x")
    copied = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(gathered(copied, [3, 199]), X[[3, 199]])
    store.close()
    with pytest.raises(errors.ClosedError, match="open it again"):
        gathered(store, [1])


def test_a_file_that_changes(tmp_path: Path) -> None:
    store = ParquetStore(written(tmp_path / "x.parquet", x=column(X)), "x")
    written(tmp_path / "x.parquet", x=column(X[:100]))
    with pytest.raises(errors.ReadError, match="has changed since it was opened"):
        gathered(store, [1])
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(errors.FileMissing, match="removed since it was opened"):
        gathered(store, [1])


def test_nulls_and_lengths_that_the_metadata_does_not_show(tmp_path: Path) -> None:
    lists = [[1.0, 2.0]] * 3 + [[1.0], [1.0, 2.0, 3.0]]
    table = pa.table({"nulls": [1.0, 2.0, None, 4.0, 5.0], "lists": lists})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=5, write_statistics=False)
    store = ParquetStore(tmp_path / "x.parquet", "nulls")
    with pytest.raises(errors.StoreError, match="has nulls, but tensors have no nulls"):
        gathered(store, [0])
    store = ParquetStore(tmp_path / "x.parquet", "lists")
    with pytest.raises(errors.StoreError, match=r"RaggedStore\(values, offsets\)"):
        gathered(store, [0])


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        (pa.array([1.0, None]), r"has nulls.*fillna.*dropna"),
        (pa.array([[1.0, 2.0], [1.0, None]]), "has nulls"),
        (pa.array([[1.0, 2.0], None]), "lists of different lengths, or null lists"),
        (pa.array([[1.0, 2.0], []]), "lists of different lengths"),
        (pa.array([[1.0, 2.0], [1.0]]), r"lists of different lengths.*RaggedStore\(values, off"),
        (pa.array(["a", "b"]), "a column of string; expected numbers"),
        (pa.array(["a", "b"]).dictionary_encode(), r"ParquetStore.text\(path, name\)"),
        (pa.array([1, 2], pa.timestamp("s")), 'cast it to "int64"'),
        (pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]), 'cast it to "float64"'),
        (pa.array([{"a": 1}, {"a": 2}]), "flatten it into columns of its fields"),
        (pa.array([], pa.float32()), "has no rows"),
    ],
    ids=str,
)
def test_columns_that_cannot_be_served(tmp_path: Path, values: pa.Array, hint: str) -> None:
    path = written(tmp_path / "x.parquet", x=values)
    for opened in (lambda: ParquetStore(path, "x"), lambda: Feeder(path, batch_size=1)):
        with pytest.raises(errors.StoreError, match=hint):
            opened()


def test_files_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet", x=column(X), y=np.arange(200))
    with pytest.raises(errors.StoreError, match="has no column 'z'; expected one of 'x', 'y'"):
        ParquetStore(path, "z")
    with pytest.raises(errors.ArgumentError, match="expected the name of a column"):
        ParquetStore(path, 3)  # type: ignore[arg-type]
    other = written(tmp_path / "b.parquet", x=np.arange(3))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        ParquetStore([path, other], "x")
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, ["x", "x"]), tmp_path / "c.parquet")
    with pytest.raises(errors.StoreError, match="columns have the same name"):
        ParquetStore.columns(tmp_path / "c.parquet")
    with pytest.raises(errors.FileMissing, match="no such file"):
        Feeder(tmp_path / "d.parquet", batch_size=1)
    with pytest.raises(errors.FileMissing, match="no file matches"):
        Feeder(str(tmp_path / "d-*.parquet"), batch_size=1)
    (tmp_path / "d.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(errors.StoreError, match="pyarrow cannot open it"):
        Feeder(tmp_path / "d.parquet", batch_size=1)
    (tmp_path / "e.parquet").mkdir()
    with pytest.raises(errors.FileMissing, match=r"is a directory without \.parquet files"):
        ParquetStore(tmp_path / "e.parquet", "x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(errors.MissingDependency, match=r'pip install "pyarrow>=15"'):
        ParquetStore(path, "x")


def test_a_row_group_is_decoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow takes several times the memory of what it decodes at once."""
    monkeypatch.setattr(parquet_files, "_PIECE_BYTES", 7 * 24)
    lengths: list[int] = []

    def rows_of_piece(piece: Any, name: str) -> Any:
        lengths.append(len(piece))
        return rows_of_chunk(piece, name)

    store = ParquetStore(written(tmp_path / "x.parquet", 90, x=column(X)), "x")
    monkeypatch.setattr(parquet_files, "rows_of_chunk", rows_of_piece)
    np.testing.assert_array_equal(gathered(store, np.arange(200)), X)
    assert lengths == [7] * 12 + [6] + [7] * 12 + [6] + [7] * 2 + [6]


def test_reading_does_not_import_pandas(tmp_path: Path) -> None:
    """pyarrow's own conversion to numpy imports pandas, whose memory no limit counts."""
    path = written(tmp_path / "x.parquet", x=column(X, fixed=False))
    program = (
        "import sys\n"
        "import numpy as np\n"
        "from pinfeed.stores.parquet import ParquetStore\n"
        "store = ParquetStore(sys.argv[1], 'x')\n"
        "store.gather(np.arange(3), np.empty((3, *store.row_shape), store.dtype))\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, path], check=True)


def test_rows_on_the_memory_of_an_arrow_array_are_read_only() -> None:
    values = values_of(column(X[:, 0]).slice(2, 5))
    np.testing.assert_array_equal(values, X[2:7, 0])
    assert not values.flags.writeable
