"""``pinfeed doctor`` of HDF5, Zarr and Parquet files, and of sparse matrices."""

from pathlib import Path
from typing import Any

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import X, run, values
from support.sparse import Sparse
from support.unwrapped import unwrapped

import pinfeed
from pinfeed import GiB
from pinfeed.cli import machine, thread_advice
from pinfeed.cli.advice import Ceilings, Data, advise

zarr = pytest.importorskip("zarr")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

MATRIX = Sparse(400, 70, most=30)


def written(name: str) -> None:
    if name == "x.h5ad":
        MATRIX.write_hdf5(Path(name), chunks=(500,), compression="gzip")
    elif name == "x.h5":
        with h5py.File(name, "w") as file:
            file.create_dataset("x", data=X, chunks=(100, 3, 8))
    elif name == "x.zarr":
        zarr.create_array(name, data=X, chunks=(100, 3, 8))
    else:
        pq.write_table(pa.table({"x": X[:, 0, 0], "y": X[:, 0, 1]}), "x.parquet")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "rows", "row_nbytes"),
    [
        ("x.h5", 500, 96),
        ("x.zarr", 500, 96),
        ("x.parquet:x", 500, 4),
        ("x.parquet:x,y", 500, 8),
        ("x.h5ad", 400, None),
    ],
)
def test_doctor_measures_each_format(name: str, rows: int, row_nbytes: int | None) -> None:
    written(name)
    # A row of a sparse matrix has a value and a column for each element.
    expected = row_nbytes or round(len(MATRIX.data) / 400 * 8)
    found = values("doctor", name)
    assert (found["data"]["n_rows"], found["data"]["row_nbytes"]) == (rows, expected)
    assert found["gb_per_s"]["disk"]["sequential"] > 0
    assert found["advice"]["helps"] in ("no", "perhaps")


@pytest.mark.usefixtures("small")
def test_doctor_measures_the_file_of_a_sparse_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    written("x.h5ad")
    monkeypatch.setattr(machine, "PIECE_BYTES", 4096)
    text = unwrapped(run("doctor", "x.h5ad:X", "--batch-size", "32").stdout)
    assert "The disk was measured with x.h5ad" in text
    with pinfeed.SparseStore("x.h5ad") as store:
        mean = f"{store.row_lengths.mean:,.1f}"
    assert f"x.h5ad:X: 400 sparse rows of 70 columns and {mean} elements on average" in text
    assert "batches of 32 rows" in text
    assert "Chunks take additional time to decode" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "chunk_shuffled(store)"}, "Use chunk_shuffled(store)."),
        ({}, "decodes whole chunks for single rows. Use block_shuffled(block_rows="),
    ],
)
def test_advice_for_rows_in_chunks(options: dict[str, Any], said: str) -> None:
    rates = Ceilings(memory=10.0, sequential=2.0, random=0.2)
    data = Data(GiB(400) >> 12, 4096, 1000, is_decoded=True, **options)
    places = {
        "If loading the whole file and indexing are fast enough": (GiB(5000), 0),
        said: (GiB(50), 0),
        "Copy it there once and index it there": (GiB(50), GiB(4000)),
    }
    for words, (free_host, free_gpu) in places.items():
        gpu = "H200" if free_gpu else ""
        advice = advise(data, rates, free_host=free_host, gpu=gpu, free_gpu=free_gpu)
        assert words in " ".join(advice.why)


@pytest.mark.usefixtures("small")
def test_a_transform_of_sparse_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("x.h5ad")
    monkeypatch.setattr(thread_advice, "_SECONDS", 0.2)
    text = "def log(batch):\n    assert batch.shape == (7, 70)\n    return batch.to_dense()\n"
    (folder / "sparse_transform_of_this_test.py").write_text(text)
    arguments = ["--batch-size", "7", "--host-transform", "sparse_transform_of_this_test:log"]
    assert values("doctor", "x.h5ad", *arguments)["transform_threads"]["n_rows"] == 7


def test_doctor_refuses_names_that_do_not_exist() -> None:
    written("x.h5ad")
    for name, said in {
        "x.h5ad:Y": "has no dataset 'Y'",
        "missing.h5": "missing.h5: no such file",
    }.items():
        result = run("doctor", name)
        assert result.exit_code == 3
        assert said in " ".join(result.stderr.split())
