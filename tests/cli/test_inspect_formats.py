"""``pinfeed inspect`` of HDF5, Zarr, Parquet and safetensors files: what their libraries report."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import X, run, values
from support.sparse import Sparse

import pinfeed
from pinfeed.cli.inspect import source_of

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

MATRIX = Sparse(400, 70, most=30)


def parts(name: str) -> dict[str, dict[str, Any]]:
    """Return the values of each part of a file, by the name in the file."""
    return {one["name"]: one for one in values("inspect", name)["sources"]}


def test_datasets_are_those_that_h5py_reports() -> None:
    with h5py.File("x.h5", "w") as file:
        for number, dtype in enumerate(("f4", ">f4", "i1", "bool", "c8")):
            chunks = (2, 3) if number % 2 else None
            file.create_dataset(f"part{number % 2}/{dtype}", (5, 4), dtype, chunks=chunks)
        file["names"] = ["a", "b"]
        file["number"] = 3.5
        file["loop"] = h5py.SoftLink("/")
        file["lost"] = h5py.ExternalLink("lost.h5", "/x")
    found = parts("x.h5")
    assert {name for name, one in found.items() if one["problem"]} == {"names", "number"}
    with h5py.File("x.h5") as file:
        for name, one in found.items():
            assert (tuple(one["shape"]), one["dtype"]) == (file[name].shape, str(file[name].dtype))
            assert one["stored"] == ("chunks (2, 3)" if file[name].chunks else "")
            if one["problem"]:
                with pytest.raises(pinfeed.StoreError):
                    pinfeed.HDF5Store("x.h5", name)
            else:
                pinfeed.HDF5Store("x.h5", name).close()
                assert one["nbytes"] == file[name].nbytes
    assert list(parts("x.h5:part1")) == ["part1/>f4", "part1/bool"]
    assert list(parts("x.h5:/part1/bool")) == ["/part1/bool"]
    result = run("inspect", "x.h5:b")
    assert result.exit_code == 2
    assert "x.h5 has nothing of the name 'b'" in result.stderr
    assert "pinfeed inspect x.h5 lists" in result.stderr


def test_arrays_are_those_that_zarr_reports() -> None:
    group = zarr.open_group("x.zarr", mode="w")
    group.create_array("a/x", shape=(100, 8), chunks=(5, 8), shards=(20, 8), dtype="f4")
    group.create_array("a/y", shape=(100,), chunks=(7,), dtype="i8")
    zarr.create_array("y", shape=(9, 3), chunks=(2, 3), dtype=">f8", zarr_format=2)
    # Other files in the folder are no arrays.
    Path("x.zarr/notes").mkdir()
    found = parts("x.zarr/")
    assert {name: one["stored"] for name, one in found.items()} == {
        "a/x": "chunks (20, 8)",
        "a/y": "chunks (7,)",
    }
    for name, one in found.items():
        assert (tuple(one["shape"]), one["dtype"]) == (group[name].shape, str(group[name].dtype))
        assert one["nbytes"] == group[name].nbytes
    assert parts("x.zarr:a/y") == {"a/y": found["a/y"]}
    (alone,) = parts("y").values()
    assert (alone["name"], alone["kind"], alone["dtype"]) == ("", "zarr", ">f8")
    assert "ZarrStore(path, name) reads an array." in run("inspect", "y").stdout


@pytest.mark.parametrize("kind", ["hdf5", "zarr"])
def test_a_sparse_matrix_is_one_source(kind: str) -> None:
    path = Path("x.h5ad" if kind == "hdf5" else "x.zarr")
    if kind == "zarr":
        MATRIX.write_zarr(path, chunks=(500,))
        MATRIX.write_zarr(path, "layers/counts", chunks=(500,))
    else:
        MATRIX.write_hdf5(path, chunks=(500,), compression="gzip")
        with h5py.File(path, "a") as file:
            file.copy("X", "layers/counts")
            wrong = {"encoding-type": "csc_matrix", "shape": (3, 4)}
            file.create_group("columns").attrs.update(wrong)
    found = parts(str(path))
    matrices = {name: one for name, one in found.items() if one["kind"] == "sparse"}
    assert not any(name.startswith(("X/", "layers/counts/")) for name in found)
    assert {"X", "layers/counts"} <= set(matrices)
    with pinfeed.SparseStore(path, "layers/counts") as store:
        one = matrices["layers/counts"]
        assert one["shape"] == [store.n_rows, store.n_columns]
        assert one["dtype"] == str(store.parts[0].dtype)
        assert one["stored"] == f"sparse, {store.row_lengths.mean:,.1f} elements per row"
    assert parts(f"{path}:layers/counts") == {"layers/counts": one}
    if kind == "hdf5":
        assert "is in the format csc; expected csr" in matrices["columns"]["problem"]


def test_columns_are_those_that_pyarrow_reports() -> None:
    columns = {
        "age": np.arange(1000, dtype=np.int16),
        "x": np.arange(1000.0),
        "e": list(np.zeros((1000, 4), np.float32)),
        "ragged": [[1.0] * (i % 3) for i in range(1000)],
        "text": ["a"] * 1000,
        "gaps": [None, *range(999)],
    }
    pq.write_table(pa.table(columns), "part-0.parquet", row_group_size=300)
    pq.write_table(pa.table(columns), "part-1.parquet")
    found = parts("part-0.parquet")
    assert list(found) == pq.read_schema("part-0.parquet").names
    for name, one in found.items():
        if one["problem"]:
            with pytest.raises(pinfeed.StoreError):
                pinfeed.ParquetStore("part-0.parquet", name)
            assert one["dtype"] == str(pq.read_schema("part-0.parquet").field(name).type)
            continue
        with pinfeed.ParquetStore("part-0.parquet", name) as store:
            assert one["shape"] == [store.n_rows, *store.row_shape]
            assert (one["dtype"], one["nbytes"]) == (str(store.dtype), store.nbytes)
    assert {name for name, one in found.items() if one["problem"]} == {"ragged", "text", "gaps"}
    assert parts("part-0.parquet:x,age")["x,age"]["shape"] == [1000, 2]
    assert source_of(["part-*.parquet:e"]).shape == (2000, 4)
    assert "no column 'y'; expected one of 'age'" in run("plan", "part-0.parquet:y").stderr


def test_a_partitioned_folder_is_one_parquet_source() -> None:
    for year in (2024, 2025):
        Path(f"data/year={year}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [1.0, 2.0]}), f"data/year={year}/part.parquet")
    Path("data/_SUCCESS").touch()
    assert parts("data")["x"]["shape"] == [4]
    assert source_of(["data:x"]).shape == (4,)
    np.save("data/lr=0.1.npy", X)
    assert "\ndata/lr=0.1.npy   " in run("inspect", "data").stdout


def test_tensors_are_those_that_safetensors_reports() -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"w": X, "b": np.array(3, np.float16)}, "m.safetensors")
    found = parts("m.safetensors")
    assert (found["w"]["shape"], found["w"]["dtype"]) == ([500, 3, 8], "float32")
    assert found["w"]["nbytes"] == X.nbytes
    assert found["b"]["problem"] == "m.safetensors:b has a single number; expected an axis of rows"
    assert "m.safetensors has nothing of the name 'q'" in run("plan", "m.safetensors:q").stderr
    with source_of(["m.safetensors:w"]).open() as store:
        assert store.n_rows == 500


def test_a_file_with_several_sources_needs_a_name() -> None:
    with h5py.File("x.h5", "w") as file:
        file["a"] = file["b"] = X
    for command in ("plan", "doctor"):
        result = run(command, "x.h5")
        assert result.exit_code == 2
        assert "x.h5 has 2 sources; expected the name of one, such as x.h5:a" in result.stderr
