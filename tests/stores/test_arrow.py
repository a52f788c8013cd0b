"""Rows of Arrow columns, of tables and of Hugging Face datasets, bit for bit."""

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import (
    Array2D,
    Dataset,
    DatasetDict,
    Features,
    Image,
    List,
    Value,
    concatenate_datasets,
)
from support.stores import gathered

from pinfeed import ArrowStore, Feeder, errors, wrap_dataset
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

ARROW_DTYPES = sorted(
    name for name in DTYPES if name != "bfloat16" and not name.startswith("complex")
)


def fixed(array: np.ndarray) -> pa.Array:
    """Return a column of the rows of ``array``, whose type has their length."""
    column = pa.array(array.reshape(-1))
    for length in array.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def lists(array: np.ndarray) -> pa.Array:
    """Return a column of the rows of ``array``, as lists that are equally long."""
    column = pa.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        n = int(np.prod(array.shape[:axis]))
        column = pa.ListArray.from_arrays(
            pa.array(np.arange(n + 1) * array.shape[axis], pa.int32()), column
        )
    return column


def cut(column: pa.Array) -> pa.ChunkedArray:
    """Return uneven chunks, one of them empty, that begin in the middle of their buffers."""
    ends = [0, 1, 1, 5, 6, len(column)]
    return pa.chunked_array([column.slice(a, b - a) for a, b in itertools.pairwise(ends)])


class ArrowTests(ReadOnlyStoreTests):
    @pytest.fixture(params=ARROW_DTYPES)
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]


class TestOneChunk(ArrowTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> ArrowStore:
        return ArrowStore(fixed(array))


class TestChunksOfLists(ArrowTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> ArrowStore:
        return ArrowStore(cut(lists(array)))


class TestChunksOfAMemoryMappedFile(ArrowTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> ArrowStore:
        table = pa.table({"x": cut(fixed(array))})
        with (
            pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        with pa.memory_map(str(tmp_path / "x.arrow")) as source:
            return ArrowStore(pa.ipc.open_file(source).read_all()["x"])


class TestIndices(ArrowTests):
    """Rows are found by indices, as after a shuffle of a dataset."""

    def make(self, array: np.ndarray, tmp_path: Path) -> ArrowStore:
        where = np.random.default_rng(0).permutation(len(array)).astype(np.uint64)
        shuffled = np.empty_like(array)
        shuffled[where] = array
        return ArrowStore(cut(fixed(shuffled)), indices=cut(pa.array(where)))


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fixed, lists, lambda array: cut(lists(array))])
def test_nothing_is_copied(make: Any) -> None:
    array = np.arange(4 << 18, dtype=np.float64).reshape(-1, 4)
    column, before = make(array), pa.total_allocated_bytes()
    store = ArrowStore(column)
    assert pa.total_allocated_bytes() == before
    leaf = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    assert np.shares_memory(store.arrays[0], leaf.values.to_numpy())  # type: ignore[arg-type]


def test_columns_outlive_the_table() -> None:
    store = ArrowStore(pa.table({"x": pa.array(np.arange(1000))})["x"])
    out = np.empty(2, np.int64)
    store.gather(np.array([999, 5]), out)
    assert out.tolist() == [999, 5]


def test_tensor_columns() -> None:
    array = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    store = ArrowStore(pa.FixedShapeTensorArray.from_numpy_ndarray(array).slice(2))
    out = np.empty((2, 2, 3), np.float32)
    store.gather(np.array([5, 0]), out)
    np.testing.assert_array_equal(out, array[[7, 2]])
    permuted = pa.FixedShapeTensorArray.from_numpy_ndarray(array.transpose(0, 2, 1))
    with pytest.raises(errors.StoreError, match="permuted axes"):
        ArrowStore(permuted)


def test_many_booleans_in_a_row() -> None:
    """There are more bits than are unpacked at a time, and they begin at any bit."""
    array = np.random.default_rng(0).integers(0, 2, (5, 300_001)).astype(bool)
    store = ArrowStore(fixed(array).slice(1))
    out = np.empty((3, 300_001), bool)
    store.gather(np.array([3, 0, 2]), out)
    np.testing.assert_array_equal(out, array[[4, 1, 3]])


def test_more_rows_of_many_chunks_than_are_combined_at_a_time() -> None:
    array = np.arange(1500 * 600, dtype=np.float64).reshape(1500, 600)
    store = ArrowStore(pa.chunked_array([fixed(array[i : i + 7]) for i in range(0, 1500, 7)]))
    rows = np.random.default_rng(0).permutation(1500)
    out = np.empty_like(array)
    store.gather(rows, out)
    assert out.nbytes > 4 << 20
    np.testing.assert_array_equal(out, array[rows])


# ---- tables and datasets -------------------------------------------------------------------------


def dataset(n: int = 30) -> Dataset:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(n, 3)).astype("float32"),
        "image": rng.integers(0, 256, (n, 2, 3), np.uint8),
        "half": rng.normal(size=n).astype("float16"),
        "label": rng.integers(10, size=n),
        "flag": rng.integers(2, size=n).astype(bool),
    }
    features = Features(
        {
            "x": List(Value("float32")),
            "image": Array2D((2, 3), "uint8"),
            "half": Value("float16"),
            "label": Value("int64"),
            "flag": Value("bool"),
        }
    )
    return Dataset.from_dict(columns, features=features)


def saved(data: Dataset, path: Path) -> Dataset:
    data.save_to_disk(path, num_shards=3)
    return Dataset.load_from_disk(path)


VIEWS: dict[str, Any] = {
    "whole": lambda data, path: data,
    "from disk": saved,
    "shuffled": lambda data, path: saved(data, path).shuffle(seed=1),
    "selected": lambda data, path: data.select([5, 3, 3, 29, 0]),
    "a range": lambda data, path: data.select(range(4, 20)).select([2, 1]),
    "filtered": lambda data, path: data.filter(lambda row: row["label"] > 4),
    "concatenated": lambda data, path: concatenate_datasets(
        [data.shuffle(seed=2), data.select([7, 8])]
    ),
    "split": lambda data, path: data.train_test_split(0.3, seed=0)["test"],
    "two columns": lambda data, path: data.with_format(columns=["label", "x"]),
    "selected columns": lambda data, path: data.select_columns(["flag", "image"]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_dataset(view: Any, tmp_path: Path) -> None:
    """Its rows are ``dataset[i]``, whatever the order of the dataset."""
    data = view(dataset(), tmp_path / "data")
    with Feeder(data, batch_size=4, shuffle=True, seed=3, device="cpu") as feeder:
        for batch in feeder.batches():
            want = [data[i] for i in batch.rows.tolist()]
            assert list(batch.data) == list(want[0])
            for name, tensor in batch.data.items():
                assert tensor.tolist() == [row[name] for row in want]
                assert tensor.dtype == getattr(
                    torch, data.features[name].dtype if name != "x" else "float32"
                )


def test_parts_of_a_structure() -> None:
    data, weights = dataset(), np.linspace(0, 1, 30)
    with Feeder(
        (data, {"w": weights, "again": data.data.column("label")}), batch_size=8, device="cpu"
    ) as feeder:
        rows, others = next(iter(feeder))
    assert rows["label"].tolist() == others["again"].tolist() == data["label"][:8]
    np.testing.assert_array_equal(others["w"], weights[:8])


def test_a_table() -> None:
    array = np.arange(20.0).reshape(10, 2)
    table = pa.table({"x": cut(fixed(array)), "y": pa.array(np.arange(10), pa.int8())})
    with Feeder(table.slice(2), batch_size=8, device="cpu") as feeder:
        (batch,) = feeder
    np.testing.assert_array_equal(batch["x"], array[2:])
    assert (batch["y"].tolist(), batch["y"].dtype) == (list(range(2, 10)), torch.int8)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_format(kind: str) -> None:
    """A format that gives the stored values is accepted; a format that converts them is not."""
    data = dataset().select_columns(["x", "label"]).with_format(kind)
    with Feeder(data, batch_size=5, device="cpu") as feeder:
        batch = next(iter(feeder))
    for name, tensor in batch.items():
        want = torch.as_tensor(data[:5][name])
        assert torch.equal(tensor, want)
        assert tensor.dtype == want.dtype
    wide = Dataset.from_dict({"d": np.zeros((3, 2))}).with_format(kind)
    with pytest.raises(
        errors.StoreError,
        match=rf"source\['d'\]: with_format\('{kind}'\) converts float64 to float32",
    ):
        Feeder(wide, batch_size=1, device="cpu")


REFUSED: dict[str, tuple[Any, str]] = {
    "nulls": (pa.array([1, None]), "has nulls.*fill them"),
    "nulls in lists": (pa.array([[1.0, None], [2.0, 3.0]]), "has nulls"),
    "null lists": (pa.array([[1.0], None], pa.list_(pa.float64(), 1)), "has nulls"),
    "ragged": (
        pa.array([[1], [2, 3]]),
        r"lists of different lengths \(rows of shape \(1,\) and \(2,\)\).*pad them",
    ),
    "ragged chunks": (pa.chunked_array([[[1]], [[2, 3]]]), "lists of different lengths"),
    "ragged inside": (pa.array([[[1], [2]], [[3], [4, 5]]]), "lists of different lengths"),
    "bytes": (pa.array([b"a"]), "a column of binary"),
    "dictionary": (pa.array([1, 2]).dictionary_encode(), "decode it"),
    "dates": (pa.array(np.zeros(2, "M8[s]")), 'cast it to "int64"'),
    "struct": (pa.array([{"a": 1}]), "flatten it"),
    "decimal": (pa.array([1.5]).cast(pa.decimal128(5, 2)), 'cast it to "float64"'),
    "extension": (
        pa.array([1, 0], pa.int8()).cast(pa.bool8()),
        "a column of extension<arrow.bool8>",
    ),
    "nothing but nulls": (pa.nulls(2), "has nulls"),
    "empty": (pa.array([], pa.int8()), "the column has no rows"),
    "no chunks": (pa.chunked_array([], pa.int8()), "the column has no rows"),
}


@pytest.mark.parametrize(("column", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_columns_are_refused(column: Any, message: str) -> None:
    """The error names the column, and says what to do."""
    with pytest.raises(errors.StoreError, match=rf"source\['bad'\].* {message}"):
        Feeder(pa.table({"bad": column}), batch_size=1, device="cpu")


def test_unsupported_datasets_are_refused() -> None:
    data = dataset()
    with pytest.raises(errors.StoreError, match=r"the dataset has a transform.*reset_format"):
        Feeder(data.with_transform(lambda rows: rows), batch_size=1)
    splits = DatasetDict({"train": data, "test": data})
    with pytest.raises(errors.StoreError, match=r"a DatasetDict.*such as dataset\['train'\]"):
        Feeder(splits, batch_size=1)
    Feeder(splits["train"], batch_size=1, device="cpu").close()
    with pytest.raises(errors.StoreError, match="columns have the same name: a, a"):
        Feeder(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), batch_size=1)
    with pytest.raises(errors.StoreError, match="IterableDataset; expected a path"):
        Feeder(data.to_iterable_dataset(), batch_size=1)
    with pytest.raises(errors.StoreError, match="got ndarray; expected a pyarrow"):
        ArrowStore(np.zeros(3))


def test_only_booleans_take_memory() -> None:
    for column in (pa.array(np.arange(9.0)), pa.chunked_array([np.arange(500.0)] * 2)):
        assert ArrowStore(column).resident_bytes == 0
    assert ArrowStore(pa.chunked_array([[True] * 500] * 2)).resident_bytes == 1000


def test_a_pickled_column_has_its_own_addresses() -> None:
    store = ArrowStore(pa.chunked_array([[1, 2, 3], [4, 5]]))
    wanted = np.array([4, 0, 3])
    first = gathered(store, wanted)
    copied = pickle.loads(pickle.dumps(store))
    del store
    np.testing.assert_array_equal(gathered(copied, wanted), first)
    assert first.tolist() == [5, 1, 4]


def test_images_are_refused_with_advice() -> None:
    """The advice of the error is followed."""
    pillow = pytest.importorskip("PIL.Image")
    images = [pillow.new("L", (2, 2), color) for color in (3, 5)]
    data = Dataset.from_dict({"image": images}, Features({"image": Image()}))
    with pytest.raises(errors.StoreError, match=r"give pinfeed\.wrap_dataset\(dataset, transform"):
        Feeder(data, batch_size=1)
    with wrap_dataset(
        data, lambda sample: np.array(sample["image"]), batch_size=2, device="cpu"
    ) as feeder:
        assert next(iter(feeder))[:, 0, 0].tolist() == [3, 5]


def test_nothing_is_written() -> None:
    with Feeder(pa.table({"x": pa.array([1, 2])}), batch_size=2, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(errors.WriteBackError, match=r"source\['x'\], which is read-only"):
                batch.write_back(batch.data)
    with pytest.raises(errors.WriteBackError, match="read-only"):
        ArrowStore(pa.array([1])).scatter(np.array([0]), np.array([2]))


def test_pyarrow_is_loaded_by_whoever_has_a_table() -> None:
    code = (
        "import sys, numpy, pinfeed\n"
        "from pinfeed.pipeline.store_tree import StoreTree\n"
        "StoreTree({'x': numpy.zeros((4, 2))}).close()\n"
        "assert 'pyarrow' not in sys.modules\n"
        "sys.modules['pyarrow'] = None\n"
        "try: pinfeed.ArrowStore(None)\n"
        "except pinfeed.errors.MissingDependency as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == 'column: pyarrow is needed; pip install "pyarrow>=15"\n'
