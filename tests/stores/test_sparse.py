"""SparseStore: its rows from every kind of source, its arguments, and its files."""

import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sparse import Sparse

from pinfeed import (
    ArgumentError,
    ClosedError,
    HDF5Store,
    PinfeedError,
    RaggedStore,
    RowDataset,
    SparseStore,
    StoreError,
    ZarrStore,
    concat,
)
from pinfeed.errors import FileMissing
from pinfeed.native.library import why_not
from pinfeed.tensors import csr
from pinfeed.tensors.csr import dense

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

MATRIX = Sparse()

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})


def tensor_of(matrix: Sparse) -> torch.Tensor:
    parts = (matrix.indptr, matrix.indices, matrix.data)
    return torch.sparse_csr_tensor(
        *map(torch.from_numpy, parts), size=matrix.shape, check_invariants=True
    )


def old_hdf5(folder: Path) -> Any:
    path = MATRIX.write_hdf5(folder / "old.h5ad")
    with h5py.File(path, "a") as file:
        attributes = file["X"].attrs
        attributes["h5sparse_shape"] = attributes.pop("shape")
        attributes["h5sparse_format"] = attributes.pop("encoding-type").removesuffix("_matrix")
    return path


SOURCES: dict[str, Any] = {
    "scipy": lambda folder: pytest.importorskip("scipy.sparse").csr_matrix(
        (MATRIX.data, MATRIX.indices, MATRIX.indptr), MATRIX.shape
    ),
    "scipy array": lambda folder: pytest.importorskip("scipy.sparse").csr_array(
        (MATRIX.data, MATRIX.indices, MATRIX.indptr), MATRIX.shape
    ),
    "same attributes": lambda folder: MATRIX,
    "torch": lambda folder: tensor_of(MATRIX),
    "h5ad": lambda folder: MATRIX.write_hdf5(folder / "x.h5ad"),
    "h5ad in chunks": lambda folder: MATRIX.write_hdf5(folder / "x.h5ad", chunks=(7,)),
    "compressed h5ad": lambda folder: MATRIX.write_hdf5(
        folder / "x.h5ad", chunks=(50,), compression="gzip"
    ),
    "h5ad of another name": lambda folder: MATRIX.write_hdf5(folder / "x.data"),
    "old h5ad": old_hdf5,
    "zarr": lambda folder: MATRIX.write_zarr(folder / "x.zarr", chunks=(31,)),
    "zarr shards": lambda folder: MATRIX.write_zarr(folder / "x.zarr", chunks=(8,), shards=(64,)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_of_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path)
    rng = np.random.default_rng(1)
    for layout in ("csr", "dense"):
        with SparseStore(source, layout=layout) as store:  # type: ignore[arg-type]
            assert (store.n_rows, store.n_columns) == MATRIX.shape
            assert store.lengths.tolist() == np.diff(MATRIX.indptr).tolist()
            dataset = RowDataset(store)
            for rows in ([], [3], np.arange(60), rng.integers(0, 60, 200)):
                found = dataset[np.asarray(rows, np.int64)]
                assert found.layout is (torch.sparse_csr if layout == "csr" else torch.strided)
                assert found.dtype is torch.float32
                np.testing.assert_array_equal(
                    found.to_dense() if layout == "csr" else found, MATRIX.dense[rows]
                )
            for row in (0, 59):
                np.testing.assert_array_equal(dataset[row], MATRIX.dense[row])


@given(
    n_rows=st.integers(1, 40),
    n_columns=st.integers(1, 30),
    dtype=st.sampled_from(
        [np.float64, np.float16, np.bool_, np.uint16, np.uint32, np.int8, np.complex64, "bf16"]
    ),
    columns=st.sampled_from([np.int32, np.int64]),
    repeats=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_matrices_of_any_kind(
    n_rows: int, n_columns: int, dtype: Any, columns: Any, repeats: bool, seed: int
) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else dtype
    matrix = Sparse(n_rows, n_columns, kind, columns, repeats=repeats)
    if not len(matrix.data):
        return
    rows = np.random.default_rng(seed).integers(0, n_rows, 9)
    *parts, bounds = SparseStore(matrix).read_parts(rows)
    assert bounds.dtype == columns
    lengths = np.diff(matrix.indptr)[rows]
    assert bounds.tolist() == [0, *np.cumsum(lengths)]
    wanted = [np.arange(matrix.indptr[row], matrix.indptr[row + 1]) for row in rows]
    elements = np.concatenate(wanted)
    for found, part in zip(parts, (matrix.data, matrix.indices), strict=True):
        assert found.dtype == part.dtype
        np.testing.assert_array_equal(found, part[elements])
    batch = RowDataset(SparseStore(matrix, layout="dense"))[rows]
    expected = matrix.dense[rows]
    assert batch.numel() == expected.size
    if dtype == "bf16":
        np.testing.assert_array_equal(batch.float(), expected.astype(np.float32))
    else:
        np.testing.assert_array_equal(batch.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.uint16, np.uint32, np.uint64, np.int8])
@pytest.mark.parametrize("repeats", [False, True])
def test_other_devices_add_with_torch(dtype: Any, repeats: bool) -> None:
    matrix = Sparse(50, 13, dtype, repeats=repeats)
    tensors = [torch.from_numpy(part) for part in (matrix.data, matrix.indices, matrix.indptr)]
    # The way of a GPU, on the CPU.
    found = dense(*tensors, 13)
    np.testing.assert_array_equal(found.numpy(), matrix.dense)


def test_a_matrix_with_many_elements_is_made_in_pieces() -> None:
    matrix = Sparse(300, 900, most=800)
    assert len(matrix.data) > 3 * (1 << 15)
    batch = RowDataset(SparseStore(matrix, layout="dense"))[np.arange(300)]
    np.testing.assert_array_equal(batch, matrix.dense)


def test_arrays_in_memory_are_not_copied() -> None:
    store = SparseStore(MATRIX)
    for part, array in zip(store.parts, (MATRIX.data, MATRIX.indices), strict=True):
        assert np.shares_memory(part.array, array)  # type: ignore[attr-defined]
    assert isinstance(store, RaggedStore)
    assert repr(store) == "<SparseStore: 60 x 17, float32, csr>"


def test_longer_arrays_than_the_matrix() -> None:
    class Longer:
        format, shape = "csr", (2, 4)
        data, indices, indptr = np.arange(9.0), np.arange(5), np.array([0, 1, 3])

    assert RowDataset(SparseStore(Longer(), layout="dense"))[[1]].tolist() == [[0, 1, 2, 0]]


# -- files -----------------------------------------------------------------------------------------
def test_layers_and_other_arrays_of_a_file(tmp_path: Path) -> None:
    path = MATRIX.write_hdf5(tmp_path / "x.h5ad")
    other = Sparse(60, 5)
    with h5py.File(path, "a") as file:
        other._write(file.create_group("layers/counts"), {})
        file["obsm/X_pca"] = MATRIX.dense
    with (
        SparseStore(path, "layers/counts", layout="dense") as counts,
        HDF5Store(path, "obs/kind/codes") as kinds,
        HDF5Store(path, "obsm/X_pca") as pca,
    ):
        batch = RowDataset({"counts": counts, "kind": kinds, "pca": pca})[[7, 3]]
    np.testing.assert_array_equal(batch["counts"], other.dense[[7, 3]])
    np.testing.assert_array_equal(batch["pca"], MATRIX.dense[[7, 3]])
    assert batch["kind"].tolist() == [1, 0]


def test_open_groups_stay_open(tmp_path: Path) -> None:
    with h5py.File(MATRIX.write_hdf5(tmp_path / "x.h5ad")) as file:
        for arguments in ((file, "X"), (file["X"],)):
            with SparseStore(*arguments, layout="dense") as store:
                np.testing.assert_array_equal(RowDataset(store)[:], MATRIX.dense)
            assert file["X/data"].shape == MATRIX.data.shape
    group = zarr.open_group(MATRIX.write_zarr(tmp_path / "x.zarr"), mode="r")
    for arguments in ((group, "X"), (group["X"],)):
        with SparseStore(*arguments, layout="dense") as store:
            np.testing.assert_array_equal(RowDataset(store)[:], MATRIX.dense)
    assert group["X/data"].shape == MATRIX.data.shape


@pytest.mark.parametrize("kind", ["h5ad", "compressed h5ad", "zarr"])
def test_a_store_closes_the_files_that_it_opened(kind: str, tmp_path: Path) -> None:
    store = SparseStore(SOURCES[kind](tmp_path))
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.read_parts(np.arange(3))


def test_several_matrices_as_one(tmp_path: Path) -> None:
    first, second = MATRIX, Sparse(40, 17)
    paths = [m.write_hdf5(tmp_path / f"{i}.h5ad") for i, m in enumerate((first, second))]
    joined = concat([SparseStore(path, layout="dense") for path in paths])
    assert (joined.n_rows, joined.n_columns) == (100, 17)
    found = RowDataset(joined)[np.arange(100)]
    np.testing.assert_array_equal(found, np.concatenate([first.dense, second.dense]))
    joined.close()
    for other in (SparseStore(Sparse(9, 16), layout="dense"), SparseStore(second)):
        with pytest.raises(StoreError, match=r"sources\[1\] has layout=.*expected the same"):
            concat([SparseStore(first, layout="dense"), other])


# -- errors ----------------------------------------------------------------------------------------
class Other:
    """The attributes of a matrix in another format, or with parts that do not match."""

    def __init__(self, **changed: Any) -> None:
        vars(self).update(
            {name: getattr(MATRIX, name) for name in ("format", "data", "indices", "indptr")}
        )
        self.shape = MATRIX.shape
        vars(self).update(changed)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "columns first": (Other(format="csc"), {}, "in the format csc; expected csr"),
    "coordinates": (torch.eye(3).to_sparse(), {}, "in the format coo; expected csr"),
    "dense tensor": (torch.eye(3), {}, "expected csr, in which rows are contiguous"),
    "dense array": (np.eye(3), {}, "source is a ndarray; expected a scipy.sparse matrix"),
    "layout": (MATRIX, {"layout": "coo"}, "layout='coo': expected 'csr' or 'dense'"),
    "key": (MATRIX, {"key": "X"}, "key='X' with a Sparse; a key names a matrix in a file"),
    "lengths": (Other(data=MATRIX.data[:-1]), {}, "does not match data (258,)"),
    "rows": (Other(shape=(61, 17)), {}, "shape (61, 17) does not match data (259,), indices"),
    "first offset": (Other(indptr=np.maximum(MATRIX.indptr, 1)), {}, "from 0 to the length"),
    "axes": (Other(shape=(60, 17, 1)), {}, "shape (60, 17, 1) does not match"),
    "two-dimensional data": (Other(data=MATRIX.data[:, None]), {}, "does not match data (259, 1)"),
    "offsets": (
        Other(indptr=np.array([0, 5, 3]), shape=(2, 17)),
        {},
        "offsets[2] is 3, but offsets[1] is 5",
    ),
    "columns": (
        Other(indices=MATRIX.indices.astype(np.float32)),
        {},
        "the columns of the matrix are float32; expected integers such as int32",
    ),
    "no elements": (
        torch.zeros(3, 3).to_sparse_csr(),
        {},
        "the tensor has no elements other than zero; expected at least one",
    ),
    "no elements of scipy": (
        Other(indptr=np.zeros(4, np.int32), shape=(3, 17)),
        {},
        "the Other has no elements other than zero; expected at least one",
    ),
    "slices": (torch.eye(3).expand(2, 3, 3).to_sparse_csr(), {}, "expected a matrix"),
    "missing": ("nowhere.h5ad", {}, "nowhere.h5ad: no such file"),
    "missing group": ("nowhere.zarr", {}, "nowhere.zarr: no such file or Zarr group"),
    "argument": (MATRIX, {"layer": "counts"}, "give the layer as key"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    source, options, message = BAD[name]
    with pytest.raises(PinfeedError, match=re.escape(message)):
        SparseStore(source, **options)


def test_kinds_of_errors() -> None:
    with pytest.raises(ArgumentError):
        SparseStore(MATRIX, layout="x")  # type: ignore[arg-type]
    with pytest.raises(FileMissing):
        SparseStore("nowhere.h5ad")


@pytest.mark.parametrize("column", [17, -1, 2**31 - 1])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_columns_out_of_range_are_refused(column: int, layout: Any) -> None:
    indices = MATRIX.indices.copy()
    row = 30
    indices[MATRIX.indptr[row]] = column
    dataset = RowDataset(SparseStore(Other(indices=indices), layout=layout))
    assert MATRIX.indptr[row + 1] > MATRIX.indptr[row]
    np.testing.assert_array_equal(dataset[[row - 1]].to_dense(), MATRIX.dense[[row - 1]])
    with pytest.raises(StoreError, match=f"has column {column}; expected at least 0 and less"):
        dataset[[row]]


def test_files_that_are_not_sparse_matrices(tmp_path: Path) -> None:
    path = MATRIX.write_hdf5(tmp_path / "x.h5ad")
    with h5py.File(path, "a") as file:
        file["dense"] = MATRIX.dense
        file.create_group("part").attrs.update({"encoding-type": "csr_matrix", "shape": (3, 3)})
        Sparse(30, 9).write_hdf5(tmp_path / "columns.h5ad")
    for key, message in {
        "obs": "is not a sparse matrix; expected a group with the attributes encoding-type",
        "dense": r"'dense' is a dense array.*HDF5Store\(path, 'dense'\)",
        "Y": "has no 'Y'; expected the name of a sparse matrix.*it has 'X', 'dense', 'obs', 'part'",
        "part": "has no data, indices, indptr; expected",
    }.items():
        with pytest.raises(StoreError, match=message):
            SparseStore(path, key)
    with h5py.File(tmp_path / "columns.h5ad", "a") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
    with pytest.raises(StoreError, match=r"columns\.h5ad:/X is in the format csc; expected csr"):
        SparseStore(tmp_path / "columns.h5ad")
    zarr_path = MATRIX.write_zarr(tmp_path / "x.zarr")
    zarr.open_group(zarr_path, mode="a").create_array("dense", data=MATRIX.dense)
    for key, message in {
        "dense": r"is a dense array.*ZarrStore\(path, 'dense'\)",
        "Y": "has no 'Y'.*it has 'X', 'dense'",
    }.items():
        with pytest.raises(StoreError, match=message):
            SparseStore(zarr_path, key)
    with pytest.raises(StoreError, match="is a Zarr group"):
        ZarrStore(zarr_path, "X")


def test_dense_stores_name_the_parts_of_a_sparse_matrix(tmp_path: Path) -> None:
    path = MATRIX.write_hdf5(tmp_path / "x.h5ad")
    with pytest.raises(StoreError, match=r"has no dataset 'X'; expected .*'X/data'"):
        HDF5Store(path, "X")


def test_a_matrix_without_elements(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (3, 4)})
        group.update(
            {"data": np.zeros(0), "indices": np.zeros(0, "i4"), "indptr": np.zeros(4, "i4")}
        )
    with pytest.raises(StoreError, match="X has no elements other than zero"):
        SparseStore(tmp_path / "x.h5ad")


def test_copies_in_other_processes(tmp_path: Path) -> None:
    for source in (SOURCES["compressed h5ad"](tmp_path), MATRIX):
        with SparseStore(source, layout="dense") as store:
            copied = pickle.loads(pickle.dumps(store))
            np.testing.assert_array_equal(RowDataset(copied)[:], MATRIX.dense)
            copied.close()


@pytest.mark.skipif(bool(why_not()), reason="no compiled functions")
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.int64, np.complex64])
def test_compiled_functions_make_rows_dense(dtype: Any, index: Any) -> None:
    matrix = np.arange(1, 61).reshape(5, 12).astype(dtype)
    matrix[np.random.default_rng(0).random((5, 12)) < 0.6] = 0
    matrix[2] = 0
    rows, columns = matrix.nonzero()
    bounds = np.searchsorted(rows, np.arange(6)).astype(index)
    values = matrix[rows, columns]
    out = np.full((5, 12), 7, dtype)
    assert csr._put_compiled(values, columns.astype(index), bounds, out)
    np.testing.assert_array_equal(out, matrix)
    for wrong in (columns[::-1], np.zeros_like(columns), columns + 12, columns - 13):
        assert not csr._put_compiled(values, wrong.astype(index), bounds, out)
