"""``pinfeed plan --length``: the plan is that of a feeder over windows along the same axes."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import X, run, values

from pinfeed import Feeder, HDF5Store, NpyStore, ZarrStore

zarr = pytest.importorskip("zarr")

# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

RUNS = np.zeros((4, 50, 6, 5), np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the same array to files of each format."""
    monkeypatch.chdir(tmp_path)
    np.save("runs.npy", RUNS)
    with h5py.File("runs.h5", "w") as file:
        for name in ("speed", "heat"):
            file.create_dataset(name, data=RUNS, chunks=(1, 10, 6, 5), compression="gzip")


def plain(source: Any, **options: Any) -> dict[str, Any]:
    first = source[0] if isinstance(source, tuple) else source
    with Feeder(source, batch_size=16, device="cpu", **options) as feeder:
        return {
            "rows": first.n_rows,
            "host_bytes": feeder.plan.host_bytes,
            "depth": feeder.plan.depth,
        }


def planned(*arguments: str) -> dict[str, Any]:
    found = values("plan", *arguments, "--batch-size", "16", "--device", "cpu")
    return {
        "rows": found["source"]["rows"],
        "host_bytes": found["plan"]["host_bytes"],
        "depth": found["plan"]["depth"],
    }


WINDOWS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "first axis": (["--length", "3"], {"axis": 0, "length": 3}),
    "times": (
        ["--axis", "1", "--length", "5", "--stride", "2", "--step", "3"],
        {"axis": 1, "length": 5, "stride": 2, "step": 3},
    ),
    "tiles": (
        ["--axis", "2,3", "--length", "4,2", "--step", "2"],
        {"axis": (2, 3), "length": (4, 2), "step": 2},
    ),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_plan_of_windows_of_each_format(kind: str) -> None:
    arguments, options = WINDOWS[kind]
    with HDF5Store("runs.h5", "speed") as store:
        expected = plain(store.windows(**options), shuffle=True)
    assert planned("runs.h5:speed", *arguments, "--shuffle") == expected
    windows: Any = NpyStore.windows("runs.npy", **options)
    with windows:
        assert planned("runs.npy", *arguments) == plain(windows)
    found = values("plan", "runs.npy", *arguments)["windows"]
    assert found == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in ({"stride": 1, "step": 1} | options).items()
    }


def test_plan_of_windows_of_a_zarr_array() -> None:
    zarr.create_array("runs.zarr", data=RUNS, chunks=(1, 10, 6, 5))
    with ZarrStore("runs.zarr") as store:
        expected = plain(store.windows(axis=1, length=5))
    assert planned("runs.zarr", "--axis", "1", "--length", "5") == expected


def test_plan_of_windows_of_two_sources() -> None:
    with HDF5Store("runs.h5", "speed") as speed, HDF5Store("runs.h5", "heat") as heat:
        expected = plain((speed.windows(axis=1, length=5), heat.windows(axis=1, length=5)))
    arguments = ["runs.h5:speed", "--with", "runs.h5:heat", "--axis", "1", "--length", "5"]
    assert planned(*arguments) == expected
    shown = run("plan", *arguments).stdout
    assert "184 rows of shape (5, 6, 5)" in shown.replace("\n  ", " ")
    assert "windows  along axis 1: length 5, stride 1, step 1, cut from 46.9 KiB" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--length", "0"], 3, "length=0: expected a whole number, at least 1"),
        (["--length", "3", "--step", "0"], 3, "step=0: expected a whole number, at least 1"),
        (["--length", "3", "--axis", "7"], 3, "axis=7: runs.npy has 4 axes; expected 0 to 3"),
        (["--length", "60", "--axis", "1"], 3, "expected at least 60 along axis 1"),
        (["--length", "3,4", "--axis", "1,2,3"], 3, "expected one value for each axis"),
        (["--length", "long"], 2, "'long' is not a list of numbers"),
        (["--stride", "2"], 2, "--stride needs the length of windows; give --length"),
        (["--length", "3", "--offsets", "runs.npy"], 2, "--length and --offsets conflict"),
        (["--length", "3", "--weights", "1"], 2, "--length and --weights conflict"),
    ],
    ids=str,
)
def test_windows_that_do_not_fit(arguments: list[str], status: int, said: str) -> None:
    result = run("plan", "runs.npy", *arguments)
    assert result.exit_code == status
    assert said in " ".join(result.stderr.split())


def test_files_without_windows() -> None:
    pq.write_table(pa.table({"x": X[:, 0, 0]}), "x.parquet")
    result = run("plan", "x.parquet", "--length", "3")
    assert result.exit_code == 3
    assert "x.parquet['x'] has no windows along axes; expected an HDF5" in result.stderr
