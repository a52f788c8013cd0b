"""``pinfeed plan`` for sparse matrices of AnnData files: the plan is that of the same feeder."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command import run, values
from support.sparse import Sparse

from pinfeed import Config, Feeder, HDF5Store, MiB, SparseStore, rows

h5py = pytest.importorskip("h5py")

MATRIX = Sparse(400, 70, most=30)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = MATRIX.write_hdf5(Path("x.h5ad"), chunks=(500,), compression="gzip")
    with h5py.File(path, "a") as file:
        file["layers/counts"] = file["X"]
    os.link("x.h5ad", "x.h5")


@pytest.mark.parametrize("name", ["x.h5ad", "x.h5ad:X", "x.h5:layers/counts"])
def test_plan_of_a_sparse_matrix(name: str) -> None:
    found = values("plan", name, "--batch-size", "32", "--shuffle", "--device", "cpu")
    key = name.partition(":")[2] or "X"
    store: Any = SparseStore(name.partition(":")[0], key)
    with store, Feeder(store, batch_size=32, rows=rows.shuffled(0), device="cpu") as feeder:
        assert found["plan"]["host_bytes"] == feeder.plan.host_bytes
    assert found["source"]["rows"] == 400
    assert found["source"]["row_shape"] == [70]
    assert found["source"]["bytes"] == len(MATRIX.data) * 8


def test_plan_with_the_codes_of_a_column_and_limits() -> None:
    arguments = ["--with", "x.h5ad:obs/kind/codes", "--cpu-limit", "60MiB"]
    found = values("plan", "x.h5ad", *arguments, "--device", "cpu")
    with (
        SparseStore("x.h5ad") as store,
        HDF5Store("x.h5ad", "obs/kind/codes") as kinds,
        Feeder((store, kinds), config=Config(cpu_memory_limit=MiB(60)), device="cpu") as feeder,
    ):
        assert found["plan"]["batch_size"] == feeder.batch_size
    text = run("plan", "x.h5ad", *arguments, "--device", "cpu").stdout.replace("\n  ", " ")
    assert "x.h5ad: 400 sparse rows of 70 columns" in text
    assert "x.h5ad:/obs/kind/codes: 400 rows" in text


def test_what_plan_refuses() -> None:
    np.save("labels.npy", np.zeros(399))
    result = run("plan", "x.h5ad", "--with", "labels.npy")
    assert result.exit_code != 0
    assert "but labels.npy has 399 rows" in result.output.replace("\n", " ")
    result = run("plan", "x.h5ad:Y")
    assert result.exit_code != 0
    assert "has no dataset 'Y'" in result.output.replace("\n", " ")
