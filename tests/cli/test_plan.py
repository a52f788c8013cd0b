"""``pinfeed plan``: the plan is that of a feeder with the same arguments."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.command import X, run, values
from support.sparse import Sparse

from pinfeed import Config, Feeder, GiB, HDF5Store, MiB, NpyStore, SparseStore, rows
from pinfeed.cli.plan import plan_values
from pinfeed.devices.cpu import PlannedGpu
from pinfeed.errors import DeviceError
from pinfeed.testing import SimDevice

h5py = pytest.importorskip("h5py")

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
RUNS = np.zeros((4, 50, 6, 5), np.float32)


def plan_of(source: Any, **options: Any) -> Any:
    """Return the plan of a feeder as the command prints it."""
    with Feeder(source, **options) as feeder:
        return json.loads(json.dumps(plan_values(feeder.plan)))


@pytest.mark.parametrize(
    ("arguments", "feeder"),
    [
        (["--batch-size", "64"], {"batch_size": 64}),
        (["--batch-size", "64", "--shuffle"], {"batch_size": 64, "shuffle": True}),
        (
            ["--batch-size", "9", "--block-rows", "50"],
            {"batch_size": 9, "rows": rows.block_shuffled(block_rows=50)},
        ),
        (["--cpu-limit", "4MiB"], {"config": Config(cpu_memory_limit=MiB(4))}),
        (
            ["--cpu-limit", "1GiB", "--batch-size", "3"],
            {"config": Config(cpu_memory_limit=GiB(1), preferred_batch_size=3)},
        ),
    ],
    ids=str,
)
def test_plan_equals_the_plan_of_a_feeder(arguments: list[str], feeder: dict[str, Any]) -> None:
    found = values("plan", "x.npy", *arguments)
    assert found["plan"] == plan_of("x.npy", **feeder)
    assert (found["rows"], found["remarks"]) == (500, [])


@no_gpu
def test_a_gpu_limit_plans_for_a_gpu_that_is_not_here() -> None:
    limits = {"cpu_memory_limit": MiB(4), "gpu_memory_limit": MiB(1)}
    found = values("plan", "x.npy", "--cpu-limit", "4MiB", "--gpu-limit", "1MiB", "--shuffle")
    expected = plan_of("x.npy", config=Config(**limits), shuffle=True, device=SimDevice())
    assert found["plan"] == expected
    assert found["device"] == "cuda"
    assert found["plan"]["device_bytes"] > 0
    assert "This machine has no GPU" in run("plan", "x.npy", "--gpu-limit", "1MiB").stdout
    with pytest.raises(DeviceError, match="this machine has no GPU"):
        Feeder(X, batch_size=8, device=PlannedGpu(), route="direct")


@pytest.mark.gpu
def test_plan_on_a_gpu() -> None:
    config = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(1))
    found = values("plan", "x.npy", "--cpu-limit", "64MiB", "--gpu-limit", "1MiB", "--shuffle")
    assert found["plan"] == plan_of("x.npy", config=config, shuffle=True, device="cuda")
    assert found["device"].startswith("cuda")


def test_plan_in_words() -> None:
    result = run("plan", "s-0.npy", "s-1.npy", "--shuffle")
    assert result.exit_code == 0
    for said in (
        "s-0.npy and 1 more: shape (500, 3, 8), float32, 46.9 KiB, npy\n",
        "batches of up to 500 rows",
        "the order of the rows",
        "read through the OS page cache",
    ):
        assert said in result.stdout
    assert values("plan", "s-*.npy")["plan"] == plan_of(NpyStore("s-*.npy"), batch_size=1024)


def test_plan_of_other_formats() -> None:
    pq.write_table(pa.table({"y": X[:, 0, 0], "z": np.arange(500)}), "x.parquet")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a/x", data=X, chunks=(100, 3, 8))
    for name, said in (
        ("x.h5", "x.h5:a/x: shape (500, 3, 8), float32, 46.9 KiB, hdf5, chunks (100, 3, 8)"),
        ("x.h5:a/x", "x.h5:a/x: shape (500, 3, 8)"),
        ("x.parquet:y,z", "x.parquet:y,z: shape (500, 2), float64, 7.8 KiB, parquet"),
    ):
        result = run("plan", name, "--shuffle")
        assert result.exit_code == 0
        assert said in result.stdout.replace("\n  ", " ")
        assert "decoded into RAM" in result.stdout.replace("\n", " ")


def test_plan_of_a_sparse_matrix() -> None:
    Sparse(400, 70, most=30).write_hdf5(Path("x.h5ad"), chunks=(500,), compression="gzip")
    found = values("plan", "x.h5ad:X", "--batch-size", "32", "--shuffle")
    with SparseStore("x.h5ad", "X") as store:
        assert found["plan"] == plan_of(store, batch_size=32, shuffle=True)
    assert found["source"]["shape"] == [400, 70]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--length", "3"], {"axis": 0, "length": 3}),
        (["--axis", "1", "--length", "5"], {"axis": 1, "length": 5}),
        (["--axis", "2,3", "--length", "4,2"], {"axis": (2, 3), "length": (4, 2)}),
    ],
    ids=str,
)
def test_plan_of_windows_along_axes(arguments: list[str], options: dict[str, Any]) -> None:
    np.save("runs.npy", RUNS)
    with h5py.File("runs.h5", "w") as file:
        file.create_dataset("speed", data=RUNS, chunks=(1, 10, 6, 5))
    for name in ("runs.npy", "runs.h5:speed"):
        found = values("plan", name, *arguments, "--batch-size", "16", "--shuffle")
        with HDF5Store("runs.h5", "speed") as store:
            windows: Any = store.windows(**options)
            if name == "runs.npy":
                windows = NpyStore.windows("runs.npy", **options)
            with windows:
                assert found["rows"] == windows.n_rows
                assert found["plan"] == plan_of(windows, batch_size=16, shuffle=True)


def test_windows_that_are_refused() -> None:
    pq.write_table(pa.table({"x": X[:, 0, 0]}), "x.parquet")
    for arguments, said in (
        (["x.npy", "--length", "3", "--axis", "7"], "axis=7: x.npy has 3 axes; expected 0 to 2"),
        (["x.npy", "--length", "60", "--axis", "1"], "expected at least 60 along axis 1"),
        (["x.parquet:x", "--length", "3"], "has no windows along axes; expected an HDF5"),
    ):
        result = run("plan", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
    shown = run("plan", "x.npy", "--length", "2", "--axis", "1").stdout.replace("\n  ", " ")
    assert "; 1,000 windows of length 2 along axis 1" in shown


def test_a_plan_that_does_not_fit() -> None:
    result = run("plan", "x.npy", "--cpu-limit", "1KiB")
    assert result.exit_code == 2
    assert result.stderr.startswith("pinfeed: batches of one row need")
    small = ["--cpu-limit", "3300KiB", "--batch-size"]
    assert values("plan", "x.npy", *small, "400")["remarks"] == [
        "Batches of 400 rows do not fit the limits."
    ]
    assert not values("plan", "x.npy", "--cpu-limit", "64MiB", "--batch-size", "4000")["remarks"], (
        "there are only 500 rows"
    )
