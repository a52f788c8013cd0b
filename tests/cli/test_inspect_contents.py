"""``pinfeed inspect`` of HDF5, Zarr and Parquet files: it prints what their libraries report."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import run, values
from support.sparse import Sparse

import pinfeed
from pinfeed.cli.contents import contents_of

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

MATRIX = Sparse(400, 70, most=30)


def inspected(name: str, status: int = 0) -> dict[str, Any]:
    """Return the values of the one file that ``inspect`` reports."""
    (file,) = values("inspect", name, status=status)["files"]
    return dict(file)


def by_name(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found}


@pytest.fixture
def hdf5() -> None:
    """Write datasets of many kinds to x.h5."""
    rng = np.random.default_rng(0)
    with h5py.File("x.h5", "w") as file:
        for number, dtype in enumerate(("f4", "f8", ">f4", "i1", "u2", "bool", "c8")):
            shape = tuple(rng.integers(1, 9, rng.integers(1, 5)).tolist())
            chunks = tuple(rng.integers(1, n + 1).item() for n in shape)
            filters: dict[str, Any] = [
                {},
                {"chunks": chunks},
                {"chunks": chunks, "compression": "gzip", "shuffle": True},
                {"chunks": chunks, "compression": "lzf", "fletcher32": True},
            ][number % 4]
            file.create_dataset(f"part{number % 2}/{dtype}", shape, dtype, **filters)
        file["names"] = ["a", "b"]
        file["number"] = 3.5
        file["loop"] = h5py.SoftLink("/")
        file["lost"] = h5py.ExternalLink("lost.h5", "/x")


@pytest.mark.usefixtures("hdf5")
def test_datasets_are_those_that_h5py_reports() -> None:
    found = inspected("x.h5")
    assert (found["kind"], found["bytes"]) == ("hdf5", os.path.getsize("x.h5"))
    arrays = by_name(found["arrays"])
    with h5py.File("x.h5") as file:
        names: list[str] = []
        file.visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
        )
        assert sorted(arrays) == sorted(names)
        for name, one in arrays.items():
            dataset = file[name]
            assert tuple(one["shape"]) == dataset.shape
            assert one["dtype"].startswith(dataset.dtype.name)
            assert ("big-endian" in one["dtype"]) == (name == "part0/>f4")
            assert (one["chunks"] and tuple(one["chunks"])) == dataset.chunks
            assert one["compression"] == (dataset.compression or "")
            if not dataset.dtype.hasobject:
                assert one["bytes"] == dataset.nbytes
            if one["problem"]:
                with pytest.raises(pinfeed.StoreError):
                    pinfeed.HDF5Store("x.h5", name)
            else:
                pinfeed.HDF5Store("x.h5", name).close()
    assert {name for name, one in arrays.items() if one["problem"]} == {"names", "number"}


@pytest.mark.usefixtures("hdf5")
def test_text_names_datasets_and_the_call_that_reads_one() -> None:
    result = run("inspect", "x.h5")
    assert result.exit_code == 0
    assert "7 datasets" in result.stdout.splitlines()[0]
    assert 'HDF5Store(path, "part0/>f4") reads a dataset.' in result.stdout
    assert "Not sources\n- x.h5:/names has text" in result.stdout
    several = run("inspect", "x.h5:part0", "x.h5:part1")
    assert several.stdout.count("reads a dataset.") == 2
    inside = inspected("x.h5:part1")
    assert sorted(by_name(inside["arrays"])) == ["part1/bool", "part1/f8", "part1/i1"]
    assert [one["name"] for one in inspected("x.h5:/part1/f8")["arrays"]] == ["/part1/f8"]


def test_arrays_are_those_that_zarr_reports() -> None:
    group = zarr.open_group("x.zarr", mode="w")
    group.create_array("a/x", shape=(100, 8), chunks=(5, 8), shards=(20, 8), dtype="f4")
    group.create_array("a/y", shape=(100,), chunks=(7,), dtype="i8", compressors=None)
    zarr.create_array("y.zarr", shape=(9, 3), chunks=(2, 3), dtype=">f8", zarr_format=2)
    # Other files in the folder are no arrays.
    Path("x.zarr/notes").mkdir()
    found = inspected("x.zarr/")
    assert (found["kind"], found["bytes"], found["matrices"]) == ("zarr", None, [])
    arrays = by_name(found["arrays"])
    assert sorted(arrays) == ["a/x", "a/y"]
    for name, one in arrays.items():
        array = group[name]
        assert one == {
            "name": name,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "chunks": list(array.chunks),
            "shards": array.shards and list(array.shards),
            "compression": "zstd" if array.compressors else "",
            "bytes": array.nbytes,
            "problem": "",
        }
    assert inspected("x.zarr:a/y")["arrays"] == [arrays["a/y"]]
    (alone,) = inspected("y.zarr")["arrays"]
    assert (alone["name"], alone["dtype"]) == ("", "float64, big-endian")
    assert "ZarrStore(path) reads an array." in run("inspect", "y.zarr").stdout


@pytest.mark.parametrize("kind", ["hdf5", "zarr"])
def test_a_sparse_matrix_is_one_line(kind: str) -> None:
    path = Path("x.h5ad" if kind == "hdf5" else "x.zarr")
    if kind == "zarr":
        MATRIX.write_zarr(path, chunks=(500,))
        MATRIX.write_zarr(path, "layers/counts", chunks=(500,))
    else:
        MATRIX.write_hdf5(path, chunks=(500,), compression="gzip")
        with h5py.File(path, "a") as file:
            file.copy("X", "layers/counts")
    found = inspected(str(path))
    assert not [one for one in found["arrays"] if "X/" in one["name"] or "counts/" in one["name"]]
    matrices = by_name(found["matrices"])
    assert sorted(matrices) == ["X", "layers/counts"]
    with pinfeed.SparseStore(path, "layers/counts") as store:
        one = matrices["layers/counts"]
        assert one["shape"] == [store.n_rows, store.n_columns]
        assert one["dtype"] == str(store.parts[0].dtype)
        assert one["elements"] == store.n_items
        assert one["elements_per_row"] == pytest.approx(store.row_lengths.mean)
        assert one["bytes"] == round(store.n_rows * store.mean_row_nbytes)
    assert inspected(f"{path}:layers/counts")["matrices"] == [one]
    assert "SparseStore(path) reads a sparse matrix." in run("inspect", str(path)).stdout


def test_a_matrix_in_another_format_is_no_source() -> None:
    with h5py.File("x.h5ad", "w") as file:
        file.create_group("X").attrs.update({"encoding-type": "csc_matrix", "shape": (3, 4)})
        file["obs"] = np.arange(3)
    (one,) = inspected("x.h5ad")["matrices"]
    assert "X is in the format csc; expected csr" in one["problem"]
    assert "format csc" in values("inspect", "x.h5ad:X", status=1)["findings"][0]


def test_columns_are_those_that_pyarrow_reports() -> None:
    columns = {
        "age": np.arange(1000, dtype=np.int16),
        "x": np.arange(1000.0),
        "e": list(np.zeros((1000, 4), np.float32)),
        "ragged": [[1.0] * (i % 3) for i in range(1000)],
        "text": ["a"] * 1000,
        "gaps": [None, *range(999)],
    }
    pq.write_table(pa.table(columns), "x.parquet", row_group_size=300, compression="zstd")
    found = inspected("x.parquet")
    metadata = pq.read_metadata("x.parquet")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert found["rows"] == metadata.num_rows
    assert found["row_groups"] == {
        "count": len(groups),
        "most_rows": max(group.num_rows for group in groups),
        "most_bytes": max(group.total_byte_size for group in groups),
    }
    assert found["bytes"] == os.path.getsize("x.parquet")
    assert found["matrix"] == {"columns": ["age", "x"], "dtype": "float64"}
    arrays = by_name(found["arrays"])
    assert list(arrays) == metadata.schema.to_arrow_schema().names
    for name, one in arrays.items():
        if one["problem"]:
            with pytest.raises(pinfeed.StoreError):
                pinfeed.ParquetStore("x.parquet", name)
            assert one["dtype"] == str(pq.read_schema("x.parquet").field(name).type)
            continue
        with pinfeed.ParquetStore("x.parquet", name) as store:
            assert one["shape"] == [store.n_rows, *store.row_shape]
            assert (one["dtype"], one["bytes"]) == (str(store.dtype), store.nbytes)
        assert one["compression"] == "zstd"
    assert {name for name, one in arrays.items() if one["problem"]} == {"ragged", "text", "gaps"}
    text = run("inspect", "x.parquet").stdout
    assert 'ParquetStore(path, columns=["age", "x"]) reads 2 columns' in text
    assert "1,000 rows in 4 row groups" in text
    assert [one["name"] for one in inspected("x.parquet:x,age")["arrays"]] == ["x", "age"]


def test_long_lists_are_shortened_for_people() -> None:
    pq.write_table(pa.table({f"x{i}": np.arange(3) for i in range(50)}), "x.parquet")
    text = run("inspect", "x.parquet").stdout
    assert "… and 10 more (--json lists all)" in text
    assert "columns=[...]) reads 50 columns as a matrix of int64." in text


@pytest.mark.parametrize("name", ["x.h5", "x.hdf5", "x.h5ad", "x.parquet", "x.zarr"])
def test_missing_and_damaged_files(name: str) -> None:
    (finding,) = values("inspect", name, status=1)["findings"]
    assert f"{name}: no such file" in finding
    if name == "x.zarr":
        Path(name).mkdir()
    else:
        Path(name).write_bytes(b"\x89HDF\r\n\x1a\nPAR1" + bytes(64))
    (finding,) = values("inspect", name, status=1)["findings"]
    assert "cannot open it" in finding
    result = run("inspect", name)
    assert result.exit_code == 1
    assert result.stdout.startswith("! ")
    assert not result.stderr
    assert run("inspect", name, "x.npy").stdout.splitlines()[2].endswith("damaged")


def test_damage_in_the_middle_of_an_hdf5_file_is_reported() -> None:
    with h5py.File("x.h5", "w") as file:
        for i in range(20):
            file[f"group{i}/data"] = np.zeros(4)
    content = bytearray(Path("x.h5").read_bytes())
    content[1000:] = b"\xff" * (len(content) - 1000)
    Path("x.h5").write_bytes(content)
    (finding,) = values("inspect", "x.h5", status=1)["findings"]
    assert "expected an undamaged HDF5 file" in finding


def test_names_that_do_not_exist() -> None:
    with h5py.File("x.h5", "w") as file:
        file["a"] = np.zeros(4)
        file["empty"] = np.zeros((0, 3))
        file.create_group("nothing")
    pq.write_table(pa.table({"x": [1, 2]}), "x.parquet")
    for name, said in {
        "x.h5:b": "has no dataset 'b'; expected the name of one of its datasets: 'a'",
        "x.h5:empty": "has no rows",
        "x.h5:nothing": "x.h5:nothing has no arrays; expected at least one",
        "x.parquet:y": "has no column 'y'; expected one of 'x'",
    }.items():
        result = values("inspect", name, status=1)
        assert said in result["findings"][0], name


def test_a_pipe_is_not_opened() -> None:
    os.mkfifo("x.h5")
    with pytest.raises(pinfeed.StoreError, match="is a pipe"):
        contents_of("x.h5", "hdf5", None)
