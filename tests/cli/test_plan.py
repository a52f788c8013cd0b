"""``pinfeed plan``: the plan of a feeder over files."""

import json
import re
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import X, no_gpu, run, values

from pinfeed import Config, Feeder, GiB, MiB, NpyStore, rows
from pinfeed.cli.plan import plan_values
from pinfeed.cli.report import json_of
from pinfeed.devices.cpu import PlannedGpu
from pinfeed.errors import DeviceError
from pinfeed.testing import SimDevice


@pytest.mark.parametrize(
    ("arguments", "feeder"),
    [
        (["--batch-size", "64"], {"batch_size": 64}),
        (
            ["--batch-size", "64", "--shuffle", "--seed", "3"],
            {"batch_size": 64, "shuffle": True, "seed": 3},
        ),
        (
            ["--batch-size", "9", "--block-rows", "50", "--depth", "0"],
            {"batch_size": 9, "rows": rows.block_shuffled(block_rows=50), "depth": 0},
        ),
        (["--cpu-limit", "4MiB"], {"config": Config(cpu_memory_limit=MiB(4))}),
        (
            ["--cpu-limit", "4MiB", "--depth", "5"],
            {"config": Config(cpu_memory_limit=MiB(4)), "depth": 5},
        ),
        (
            ["--cpu-limit", "1GiB", "--batch-size", "3"],
            {"config": Config(cpu_memory_limit=GiB(1), preferred_batch_size=3)},
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])
def test_plan_equals_the_plan_of_a_feeder(
    arguments: list[str], feeder: dict[str, Any], device: str
) -> None:
    """Without a GPU, the plan is that of a feeder on a device with memory of its own."""
    if device == "cuda" and "config" in feeder:
        limits = {
            "cpu_memory_limit": feeder["config"].cpu_memory_limit,
            "preferred_batch_size": feeder["config"].preferred_batch_size,
        }
        arguments, feeder = (
            [*arguments, "--gpu-limit", "1MiB"],
            {**feeder, "config": Config(gpu_memory_limit=MiB(1), **limits)},
        )
    with Feeder("x.npy", device="cpu" if device == "cpu" else SimDevice(), **feeder) as expected:
        found = values("plan", "x.npy", "--device", device, *arguments)
        assert found["plan"] == json.loads(json_of(plan_values(expected.plan)))
    assert found["device"] == device
    assert found["source"]["rows"] == 500
    assert (found["plan"]["device_bytes"] > 0) == (device == "cuda")


def test_plan_in_words() -> None:
    result = run("plan", "s-0.npy", "s-1.npy", "--shuffle", "--device", "cpu")
    assert result.exit_code == 0
    for said in (
        "s-0.npy and 1 more shard: 500 rows of shape (3, 8), float32, 46.9 KiB",
        "shuffled",
        "the order of the rows",
        "the plan uses batches of",
    ):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_of_parallel_sources() -> None:
    """The plan for sharded inputs and labels is that of a feeder over a tuple."""
    np.save("y.npy", np.arange(500))
    with (
        NpyStore(["s-0.npy", "s-1.npy"]) as store,
        Feeder((store, "y.npy"), batch_size=32, device="cpu") as expected,
    ):
        found = values(
            "plan", "s-0.npy", "s-1.npy", "--with", "y.npy", "--batch-size", "32", "--device", "cpu"
        )
        assert found["plan"] == json.loads(json_of(plan_values(expected.plan)))
    assert [(source["rows"], source["dtype"]) for source in (found["source"], *found["with"])] == [
        (500, "float32"),
        (500, "int64"),
    ]
    assert values("plan", "x.npy")["with"] == []
    shown = run("plan", "x.npy", "--with", "s-*.npy", "--with", "y.npy").stdout
    assert shown.startswith("x.npy: 500 rows")
    assert "\nwith s-0.npy and 1 more shard: 500 rows" in shown
    assert "\nwith y.npy: 500 rows of shape (), int64" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_plan_advises_blocks_for_the_largest_rows() -> None:
    np.save("large.npy", np.zeros((40_000, 64), np.float32))
    np.save("labels.npy", np.zeros(40_000))
    options = ["--with", "labels.npy", "--shuffle", "--cpu-limit", "6MiB"]
    said = values("plan", "large.npy", *options)["remarks"]
    assert any("With --block-rows 1024," in remark for remark in said)


def test_plan_remarks_that_a_random_order_is_slow() -> None:
    np.save("large.npy", np.zeros((40_000, 64), np.float32))
    said = values("plan", "large.npy", "--shuffle", "--cpu-limit", "6MiB")["remarks"]
    assert any("With --block-rows 1024," in remark for remark in said)
    for options in (["--block-rows", "1024"], ["--shuffle", "--cpu-limit", "1GiB"]):
        limit = [] if "--cpu-limit" in options else ["--cpu-limit", "6MiB"]
        said = values("plan", "large.npy", *options, *limit)["remarks"]
        assert not any("--block-rows" in remark for remark in said)


def test_plan_of_other_formats() -> None:
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 24),
            "y": X[:, 0, 0],
            "z": np.arange(500),
        }
    )
    pq.write_table(table, "x.parquet")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("a/x", data=X, chunks=(100, 3, 8))
    for name, said in (
        ("x.h5", "x.h5:/a/x: 500"),
        ("x.h5:/a/x", "x.h5:/a/x: 500"),
        ("x.parquet:x", "x.parquet['x']: 500"),
        ("x.parquet:y,z", "x.parquet[2 columns]: 500 rows of shape (2,), float64"),
    ):
        result = run("plan", name, "--shuffle", "--device", "cpu")
        assert result.exit_code == 0
        assert said in result.stdout.replace("\n  ", " ")
        assert "decoded into RAM" in result.stdout.replace("\n", " ")
    result = run("plan", "x.parquet")
    assert result.exit_code == 3
    assert "expected one of them: x.parquet:x, x.parquet:y" in " ".join(result.stderr.split())
    with h5py.File("y.h5", "w") as file:
        file["a"] = file["b"] = X
    pq.write_table(pa.table({"x": [1, 2], "word": ["a", "b"]}), "y.parquet")
    for name in ("y.h5", "y.parquet"):
        said = " ".join(run("plan", name).stderr.split())
        assert f"on the command line, give {name}:NAME; pinfeed inspect {name} lists" in said
    result = run("bench", "x.h5:a/x")
    assert "is not a .npy file" in " ".join(result.stderr.split())


def test_parallel_sources_have_equally_many_rows() -> None:
    for command in ("plan", "bench"):
        result = run(command, "x.npy", "--with", "s-0.npy")
        assert result.exit_code == 3
        assert (
            "unequal numbers of rows: x.npy has 500, s-0.npy has 300; expected equal numbers"
            in result.stderr
        )


def test_labels_among_the_shards_are_refused() -> None:
    np.save("y.npy", np.arange(500))
    result = run("plan", "x.npy", "y.npy")
    assert result.exit_code == 3
    assert "give another source, such as labels, with --with FILE" in result.stderr


def test_a_gpu_limit_does_not_change_the_plan_for_the_cpu() -> None:
    for options in ([], ["--batch-size", "7"], ["--cpu-limit", "8MiB"]):
        plain = values("plan", "x.npy", "--device", "cpu", *options)
        limited = values("plan", "x.npy", "--device", "cpu", "--gpu-limit", "1MiB", *options)
        assert limited["plan"] | {"gpu_memory_limit": None} == plain["plan"]
        assert limited["remarks"][-1].startswith(
            "Batches stay in host memory (cpu), so --gpu-limit has no effect."
        )


@no_gpu
def test_plan_for_cuda_without_a_gpu() -> None:
    assert (
        "This machine has no GPU"
        in run("plan", "x.npy", "--device", "cuda", "--batch-size", "8").stdout
    )
    result = run("plan", "x.npy", "--device", "cuda", "--cpu-limit", "1GiB")
    assert result.exit_code == 3
    assert "give gpu_memory_limit (--gpu-limit)" in result.stderr
    with pytest.raises(DeviceError, match="this machine has no GPU"):
        Feeder(X, batch_size=8, device=PlannedGpu(), route="direct")


def test_a_plan_that_does_not_fit_is_a_finding() -> None:
    found = values("plan", "x.npy", "--cpu-limit", "1KiB", status=1)
    assert found["plan"] is None
    assert "the plan does not fit: batches of one row need" in found["findings"][0]
    assert "! the plan does not fit" in run("plan", "x.npy", "--cpu-limit", "1KiB").stdout


def test_a_batch_that_does_not_fit_is_a_finding() -> None:
    (finding,) = values(
        "plan", "x.npy", "--cpu-limit", "3200KiB", "--depth", "1", "--batch-size", "400", status=1
    )["findings"]
    assert re.fullmatch(r"batches of 400 rows do not fit the limits; \d+ rows fit", finding)
    assert not values("plan", "x.npy", "--cpu-limit", "8MiB", "--batch-size", "4000")["findings"], (
        "there are only 500 rows"
    )


@pytest.mark.gpu
def test_plan_on_a_gpu() -> None:
    config = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(1))
    with Feeder("x.npy", config=config, shuffle=True, device="cuda") as feeder:
        found = values(
            "plan",
            "x.npy",
            "--cpu-limit",
            "64MiB",
            "--gpu-limit",
            "1MiB",
            "--shuffle",
            "--device",
            "cuda",
        )
        assert found["plan"] == json.loads(json_of(plan_values(feeder.plan)))
        assert found["device"] == feeder.device
