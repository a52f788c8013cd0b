"""Every store works in every place that takes stores, and reads its files wherever they are."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from safetensors.numpy import save_file
from support.stores import gathered

from pinfeed import (
    ArrayStore,
    ArrowStore,
    Feeder,
    HDF5Store,
    MatrixStore,
    NpyStore,
    ParquetStore,
    PinnedStore,
    RaggedStore,
    RemoteStore,
    RowDataset,
    SparseStore,
    ZarrStore,
    concat,
    errors,
    wrap_dataset,
)

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

X = np.arange(1, 25, dtype=np.float32).reshape(12, 2)


def lists(array: np.ndarray) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])


def pinned() -> PinnedStore:
    store = PinnedStore.empty(X.shape, pin=False)
    store.scatter(np.arange(len(X)), X)
    return store


# All of them read files of the current folder.
FILES: dict[str, Callable[[], Any]] = {
    "npy": lambda: NpyStore("x.npy"),
    "shards": lambda: NpyStore(["x-0.npy", "x-1.npy"]),
    "raw": lambda: NpyStore.raw("x.bin", shape=(-1, 2), dtype="f4"),
    "windows": lambda: NpyStore.windows("x.bin", length=2, step=2, dtype="f4"),
    "windows across files": lambda: NpyStore.windows(
        ["x-0.npy", "x-1.npy"], length=1, across_files=True
    ),
    "windows along an axis": lambda: NpyStore.windows("x.npy", axis=1, length=2),
    "safetensors": lambda: NpyStore.safetensors("x.safetensors", "x"),
    "HDF5": lambda: HDF5Store("x.h5", "x"),
    "HDF5 chunks": lambda: HDF5Store("x.h5", "chunks"),
    "Zarr": lambda: ZarrStore("x.zarr"),
    "Zarr read by zarr": lambda: ZarrStore("x-F.zarr"),
    "Parquet": lambda: ParquetStore("x.parquet", "x"),
    "Parquet matrix": lambda: ParquetStore("x.parquet", columns=["a", "b"]),
    "concat": lambda: concat(["x-0.npy", "x-1.npy"]),
    "ragged": lambda: RaggedStore("x.bin.npy", "offsets.npy", layout="padded"),
    "sparse": lambda: SparseStore("x.h5", layout="dense"),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "array": lambda: ArrayStore(X.copy()),
    "pinned": pinned,
    "remote": lambda: RemoteStore(f"file://{os.path.abspath('x.npy')}"),
    "Arrow": lambda: ArrowStore(lists(X)),
    "Arrow chunks": lambda: ArrowStore(pa.chunked_array([lists(X[:5]), lists(X[5:])])),
    "matrix": lambda: MatrixStore({"a": X[:, 0].copy(), "b": X[:, 1].copy()}),
    "concat of arrays": lambda: concat([X[:5], X[5:]]),
    "mixed concat": lambda: concat([ArrayStore(X[:5]), NpyStore("x-1.npy")]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same rows in every format, which is the current one."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    np.save("x.npy", X)
    np.save("x-0.npy", X[:5])
    np.save("x-1.npy", X[5:])
    np.save("x.bin.npy", X.ravel())
    np.save("offsets.npy", np.arange(0, 26, 2))
    X.tofile("x.bin")
    save_file({"x": X}, "x.safetensors")
    with h5py.File("x.h5", "w") as file:
        file["x"] = X
        file.create_dataset("chunks", data=X, chunks=(3, 2))
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": X.shape})
        group["data"] = X.ravel()
        group["indices"] = np.tile(np.arange(2, dtype=np.int32), 12)
        group["indptr"] = np.arange(0, 26, 2)
    zarr.create_array("x.zarr", data=X, chunks=(3, 2))
    zarr.create_array("x-F.zarr", data=X, chunks=(3, 2), order="F", zarr_format=2)
    pq.write_table(pa.table({"x": lists(X), "a": X[:, 0], "b": X[:, 1]}), "x.parquet")
    return folder


def batch_of(feeder: Any) -> np.ndarray:
    """Return the rows of the first batch, without the lengths of ragged rows."""
    with feeder:
        batch = next(iter(feeder))
    values = batch[0] if isinstance(batch, (tuple, list)) else batch
    return values.numpy().reshape(-1, 2)


def in_feeder(store: Any, make: Callable[[], Any]) -> np.ndarray:
    return batch_of(Feeder(store, batch_size=12, device="cpu"))


def in_concat(store: Any, make: Callable[[], Any]) -> np.ndarray:
    with make() as other, concat([store, other]) as joined:
        rows = batch_of(Feeder(joined, batch_size=24, device="cpu"))
    np.testing.assert_array_equal(rows[12:], X)
    return rows[:12]


def in_dataset(store: Any, make: Callable[[], Any]) -> np.ndarray:
    with RowDataset(store) as dataset:
        return batch_of(wrap_dataset(dataset, batch_size=12, device="cpu"))


@pytest.mark.parametrize("place", [in_feeder, in_concat, in_dataset])
@pytest.mark.parametrize("name", [*FILES, *OTHERS])
@pytest.mark.usefixtures("folder")
def test_every_store_works_in_every_place(name: str, place: Callable[..., np.ndarray]) -> None:
    make = (FILES | OTHERS)[name]
    with make() as store:
        np.testing.assert_array_equal(place(store, make), X)
        with pytest.raises(errors.ArgumentError, match=r"give pinfeed.RowDataset\(store\)"):
            wrap_dataset(store, batch_size=4)


@pytest.mark.parametrize("name", FILES)
def test_a_store_keeps_its_files_if_the_folder_changes(name: str, folder: Path) -> None:
    with FILES[name]() as store:
        os.chdir(folder.parent)
        np.testing.assert_array_equal(in_feeder(store, FILES[name]), X)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("HDF5 chunks", "sparse")])
def test_files_that_are_removed_before_they_are_read(name: str, folder: Path) -> None:
    """An HDF5 file that stays open can still be read."""
    with contextlib.closing(FILES[name]()) as store:
        shutil.move(folder, folder.with_name("moved"))
        with pytest.raises(errors.FileMissing, match="no longer exists; it was removed since"):
            in_feeder(store, FILES[name])


def test_a_pipe_in_the_place_of_a_chunk(folder: Path) -> None:
    """A read of a pipe would wait forever."""
    (chunk,) = (folder / "x.zarr/c/1").iterdir()
    chunk.unlink()
    os.mkfifo(chunk)
    with (
        ZarrStore("x.zarr") as store,
        pytest.raises(errors.StoreError, match="is a pipe, a socket or a device"),
    ):
        gathered(store, range(12))
    os.mkfifo("pipe.h5")
    with pytest.raises(errors.StoreError, match="is a pipe, a socket or a device"):
        HDF5Store("pipe.h5")


@pytest.mark.usefixtures("folder")
def test_windows_along_the_rows_need_no_axis() -> None:
    for store in (HDF5Store("x.h5", "x"), HDF5Store("x.h5", "chunks"), ZarrStore("x.zarr")):
        with store, store.windows(length=2, step=3) as windows:
            expected = X.reshape(4, 3, 2)[:, :2]
            np.testing.assert_array_equal(gathered(windows, range(4)), expected)


@pytest.mark.usefixtures("folder")
def test_errors_of_a_sparse_matrix_name_its_file() -> None:
    with h5py.File("x.h5", "r+") as file:
        file["X/indices"][5] = 7
    with (
        SparseStore("x.h5") as store,
        pytest.raises(errors.StoreError, match=r"^x\.h5:/X: an element of the batch has column 7"),
    ):
        in_feeder(store, store)
    with h5py.File("x.h5", "r+") as file:
        file["X/indptr"][5] = 0
    with pytest.raises(errors.StoreError, match=r"^x\.h5:/X: offsets\[5\] is 0"):
        SparseStore("x.h5")
    with h5py.File("x.h5", "r+") as file:
        file["X"].attrs["shape"] = (13, 2)
    with pytest.raises(errors.StoreError, match=r"^x\.h5:/X: shape \(13, 2\) does not match"):
        SparseStore("x.h5")
