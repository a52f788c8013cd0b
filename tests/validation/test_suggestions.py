"""Objects and files that are no source: each is refused with advice, and the advice works."""

import collections
import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    NpyStore,
    ParquetStore,
    RowDataset,
    StoreError,
    wrap_loader,
)
from pinfeed.validation import suggestions

# The threads of pyarrow, which live as long as the process, are not left behind by a test.
pyarrow.csv.read_csv(io.BytesIO(b"a\n1\n"))

X = np.arange(12, dtype=np.float32).reshape(4, 3)


class Samples(Dataset[np.ndarray]):
    def __getitem__(self, index: int) -> np.ndarray:
        return X[index]


class Endless(IterableDataset[np.ndarray]):
    """It has no rows by index."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(X)


class Duck:
    """A data set that has no base class."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> np.ndarray:
        return X[index]


@dataclasses.dataclass
class Lazy:
    """An array of another library, as Zarr's: a dataclass with a shape, a dtype and slices."""

    inner: Any
    chunks: tuple[int, ...] = (2, 3)

    @property
    def shape(self) -> tuple[int, ...]:
        return X.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return X.dtype

    def __getitem__(self, index: Any) -> Any:
        return X[index]


def of(package: str, name: str) -> Any:
    """Return an object of a class that another library has under this name."""
    return type(name, (), {"__module__": f"{package}.inside"})()


def refusal(source: Any) -> str:
    with pytest.raises(StoreError) as caught:
        Feeder(source, batch_size=1, device="cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (pandas.Series([1.0, 2.0]), "give series.to_numpy()"),
        (of("polars", "LazyFrame"), "give frame.collect()"),
        (of("zarr", "Group"), "give a dict of its arrays"),
        (
            Lazy(X),
            (
                "source: got Lazy; expected a path, a numpy array, a CPU tensor, an Arrow table, a "
                "DataFrame or a Store; copy it in pieces"
            ),
        ),
        ({"x": X, "y": Lazy(X)}, "source['y']: got Lazy; "),
        (of("cupy", "ndarray"), "it is already on the GPU"),
        (of("scipy", "csr_matrix"), "give pinfeed.SparseStore(matrix.tocsr())"),
        (Samples(), "give pinfeed.wrap_loader(DataLoader(dataset, batch_size=...))"),
        (Endless(), "give pinfeed.wrap_loader(DataLoader(dataset, batch_size=...))"),
        (Duck(), "for a Dataset of samples, give pinfeed.wrap_loader(DataLoader"),
        (TensorDataset(torch.zeros(4, 3)), "give dataset.tensors"),
        (DataLoader(TensorDataset(torch.zeros(4, 3))), "give pinfeed.wrap_loader(loader)"),
        (RowDataset(X), "give the source of the dataset"),
        (Feeder(X, batch_size=1, device="cpu"), "it is already a feeder"),
        (wrap_loader([], device="cpu"), "it is already a feeder"),
        (HostEmbedding(4, 3), "give table.store"),
        ((row for row in X), "give np.stack(list(rows))"),
        (map(int, [1]), "give np.stack(list(rows))"),
        (collections.deque([X]), "give np.stack(list(rows))"),
        ({1.0, 2.0}, "give np.stack(list(rows))"),
        (
            [1, 2, 3],
            (
                "source[0]: got int; expected a path, a numpy array, a CPU tensor, an Arrow table, "
                "a DataFrame or a Store; for a list of numbers"
            ),
        ),
        (3.5, "source: got float"),
        (range(5), "np.asarray(list)"),
        (None, "source: got NoneType"),
        (b"x.npy", "expected a path as a str"),
        (ArrayStore, "ArrayStore is a class; give an instance"),
        (np.ndarray, "ndarray is a class"),
        (torch.zeros(4, 3, device="meta"), "on meta; expected a tensor with data"),
        (
            torch.eye(4).to_sparse(),
            "got a torch.sparse_coo tensor of torch.float32; expected a dense tensor",
        ),
        (torch.eye(4).to_sparse(), "or tensor.to_dense()"),
        (
            torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "pad the rows with tensor.to_padded_tensor(0)",
        ),
        (np.array([X[0], None], dtype=object), "np.stack(list(array)) if each object is a row"),
        (np.array([["a", "bb"]]), "text: convert it, np.unique(array, return_inverse=True)[1]"),
        (
            np.zeros(4, [("a", "f4")]),
            "save each field as a separate array, and give a dict of them",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_an_object_that_is_no_source(source: Any, hint: str) -> None:
    assert hint in refusal(source)


def test_the_advice_names_a_section_of_the_guide() -> None:
    section = re.search("'(.*)' in the guide", suggestions._COPY)
    assert section is not None
    guide = Path(__file__).parents[2] / "docs" / "formats.md"
    assert f"## {section[1]}\n" in guide.read_text()


def test_a_sparse_matrix_may_be_read_by_a_store() -> None:
    matrix = type("csr_matrix", (), {"__module__": "scipy.sparse"})()
    assert "matrix.toarray() if that fits" in suggestions.of_object(matrix)


def test_the_advice_for_a_dataframe_works() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    with Feeder(np.ascontiguousarray(frame.to_numpy()), batch_size=2, device="cpu") as feeder:
        assert next(iter(feeder)).tolist() == [[1, 3], [2, 4]]
    with Feeder(
        {name: frame[name].to_numpy() for name in frame}, batch_size=2, device="cpu"
    ) as feeder:
        assert next(iter(feeder))["b"].tolist() == [3, 4]


def test_a_list_of_rows_is_no_list_of_sources() -> None:
    rows = list(np.zeros((100, 3)))
    message = (
        "source is a list of 100 arrays of shape (3,), which means 100 sources of 3 rows; expected "
        "one array; if each array is a row, give np.stack(source)"
    )
    assert message in refusal(rows)
    with Feeder(tuple(rows), batch_size=3, device="cpu") as feeder:
        assert len(next(iter(feeder))) == 100
    with Feeder(list(np.zeros((3, 100))), batch_size=3, device="cpu") as feeder:
        assert len(next(iter(feeder))) == 3


def test_a_store_that_is_a_dataclass_is_a_store() -> None:
    @dataclasses.dataclass
    class Mine(ArrayStore):
        values: Any

        def __post_init__(self) -> None:
            ArrayStore.__init__(self, self.values)

    with Feeder(Mine(X), batch_size=4, device="cpu") as feeder:
        np.testing.assert_array_equal(next(iter(feeder)).numpy(), X)


def test_a_dataclass_of_arrays_is_a_structure() -> None:
    @dataclasses.dataclass
    class Pair:
        x: Any
        y: Any

    with Feeder(Pair(X, X[:, 0].copy()), batch_size=4, device="cpu") as feeder:
        assert next(iter(feeder)).y.tolist() == [0, 3, 6, 9]


# ---- files ---------------------------------------------------------------------------------------

TABLE = pyarrow.table({"a": [1.0, 2.0], "b": [3.0, 4.0]})


def arrow(path: Path) -> None:
    pyarrow.feather.write_feather(TABLE, path, compression="uncompressed")


def arrow_stream(path: Path) -> None:
    with pyarrow.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def folder_with(name: str) -> Callable[[Path], None]:
    """Return a function that makes a folder with an empty file."""

    def make(path: Path) -> None:
        path.mkdir()
        (path / name).touch()

    return make


WRITE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "x.pq": (
        lambda path: pyarrow.parquet.write_table(TABLE, path),
        "a Parquet file: give pinfeed.ParquetStore.columns(path)",
    ),
    "x.arrow": (
        arrow,
        "an Arrow file: give pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()",
    ),
    "x.ipc": (
        arrow_stream,
        "a stream of Arrow tables: give datasets.Dataset.from_file(path), or pyarrow.ipc",
    ),
    "x.csv": (
        lambda path: pyarrow.csv.write_csv(TABLE, path),
        "a table as text: give pyarrow.csv.read_csv(path) if its first line names the columns",
    ),
    "dataset": (
        lambda path: datasets.Dataset(TABLE).save_to_disk(path),
        "it looks like a Hugging Face dataset: give datasets.load_from_disk(path)",
    ),
    "splits": (
        lambda path: datasets.DatasetDict(train=datasets.Dataset(TABLE)).save_to_disk(path),
        "it looks like a DatasetDict: give datasets.load_from_disk(path)[split]",
    ),
    "array": (folder_with("zarr.json"), "it looks like a Zarr array: give pinfeed.ZarrStore(path)"),
    "x.npz": (
        lambda path: np.savez(path, x=X),
        "a .npz archive: save each array alone, np.save(name, np.load(path)[name])",
    ),
    "x.pt": (
        lambda path: torch.save(torch.zeros(3), path),
        "a file of torch.save: load it with torch.load(path, weights_only=True)",
    ),
    "x.safetensors": (
        lambda path: path.write_bytes(bytes(64)),
        "give pinfeed.NpyStore.safetensors(path, name)",
    ),
    "x.h5": (
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)),
        "an HDF5 file: give pinfeed.HDF5Store(path, name)",
    ),
    "x.hdf5": (
        lambda path: path.write_bytes(bytes(512)),
        "an HDF5 file: give pinfeed.HDF5Store(path, name)",
    ),
    "x.zarr": (
        Path.mkdir,
        "is a directory (it looks like a Zarr array: give pinfeed.ZarrStore(path)",
    ),
}


@pytest.mark.parametrize("name", WRITE)
def test_a_file_of_another_format(tmp_path: Path, name: str) -> None:
    write, hint = WRITE[name]
    write(tmp_path / name)
    assert hint in refusal(str(tmp_path / name))
    assert hint in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.pq", pyarrow.parquet.read_table),
        ("x.pq", ParquetStore.columns),
        ("x.arrow", lambda path: pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()),
        ("x.ipc", lambda path: pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()),
        ("x.ipc", datasets.Dataset.from_file),
        ("x.csv", pyarrow.csv.read_csv),
        ("dataset", datasets.load_from_disk),
        ("splits", lambda path: datasets.load_from_disk(path)["train"]),
    ],
)
def test_the_advice_for_a_file_of_columns_works(
    tmp_path: Path, name: str, read: Callable[[str], Any]
) -> None:
    WRITE[name][0](tmp_path / name)
    with Feeder(read(str(tmp_path / name)), batch_size=2, device="cpu") as feeder:
        assert next(iter(feeder))["b"].tolist() == [3, 4]


def test_the_advice_for_a_lazy_array_works(tmp_path: Path) -> None:
    lazy = Lazy(X)
    store = NpyStore.create(tmp_path / "x.npy", lazy.shape, dtype=lazy.dtype)
    for i in range(0, lazy.shape[0], 3):
        piece = np.asarray(lazy[i : i + 3])
        store.scatter(np.arange(i, i + len(piece)), piece)
    store.close()
    with Feeder(tmp_path / "x.npy", batch_size=4, device="cpu") as feeder:
        np.testing.assert_array_equal(next(iter(feeder)).numpy(), X)


@dataclasses.dataclass
class Structure:
    """A structure of tensors that has a shape and a dtype of its own, as a TensorDict has."""

    x: Any
    y: Any
    shape = (6,)
    dtype = None

    def __getitem__(self, index: Any) -> "Structure":
        return Structure(self.x[index], self.y[index])


def test_a_structure_of_arrays_with_a_shape_is_walked() -> None:
    with Feeder(Structure(np.arange(6.0), torch.arange(6)), batch_size=3, device="cpu") as feeder:
        first = next(iter(feeder))
    assert (type(first), first.x.tolist(), first.y.tolist()) == (Structure, [0, 1, 2], [0, 1, 2])
