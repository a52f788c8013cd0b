"""``pinfeed doctor``: the machine, its disk, and whether pinfeed would help."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command import ROOT, no_gpu, python, run, values
from support.unwrapped import unwrapped

from pinfeed import GiB, MiB
from pinfeed.cli import machine, thread_advice
from pinfeed.cli.advice import Ceilings, Data, advise, spelled
from pinfeed.cli.cache_advice import advise_on_cache
from pinfeed.cli.machine import Gpu, Host, Package, gpu_problem, packages
from pinfeed.errors import RowIndexError
from pinfeed.memory.host import free_host_bytes, host_limits, lock_limit
from pinfeed.validation.requirements import REQUIREMENTS, install_line


def test_the_disk_is_measured_on_a_scratch_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SPAN_BYTES", MiB(8))
    before = sorted(folder.iterdir())
    found, problem = machine.measure_disk(None, 0, 4096, str(folder))
    assert sorted(folder.iterdir()) == before
    assert found is not None
    assert not problem
    assert found.nbytes == MiB(8)
    assert found.sequential > 0
    assert found.random is not None


def test_the_disk_is_measured_on_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SPAN_BYTES", MiB(8))
    np.save("large.npy", np.ones((12, 1 << 20), np.uint8))
    found, _ = machine.measure_disk("large.npy", 128, 1 << 20, None)
    assert found is not None
    assert (found.what, found.nbytes, found.random) == ("large.npy", MiB(8), None), (
        "too few rows for a random order"
    )
    assert ("dropped from the page cache" in str(found)) == found.cold


def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SPAN_BYTES", MiB(8))
    found, _ = machine.measure_disk(None, 0, 4096, "/dev/shm")
    assert found is not None
    assert not found.cold
    assert "but 100% stayed in the page cache" in str(found)


def test_a_folder_that_cannot_be_written() -> None:
    found, problem = machine.measure_disk(None, 0, 4096, "/proc")
    assert found is None
    assert problem.startswith("the disk could not be measured: no scratch file in /proc (")
    assert problem.endswith("; give a writable folder with --dir")


@pytest.mark.usefixtures("small")
def test_doctor_agrees_with_memory() -> None:
    found = values("doctor")
    limits = host_limits()
    assert found["host"]["memory"] == limits[0].total
    assert found["host"]["lock_limit"] == lock_limit()
    assert found["host"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert [limit["name"] for limit in found["host"]["limits"]] == [
        limit.name for limit in limits[1:] if limit.total < limits[0].total
    ]
    assert abs(found["host"]["free"] - free_host_bytes()) < limits[0].total / 4, (
        "the free memory changes all the time"
    )
    assert found["gpu"]["torch"] == torch.__version__
    assert found["gb_per_s"]["memory_copy"] > 0
    assert found["gb_per_s"]["disk"]["sequential"] > 0
    assert found["data"] is found["advice"] is None


def test_doctor_sees_the_limits_of_the_process() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, 1 << 32))"
    done = python("-c", f"{limit}; from pinfeed.cli.machine import Host; print(Host.now())")
    assert "Limit(name='RLIMIT_DATA', total=4294967296" in done.stdout
    assert 0 < int(re.findall(r"Host\(.*? free=(\d+)", done.stdout)[0]) < 1 << 32


@pytest.mark.usefixtures("small")
def test_doctor_of_a_file() -> None:
    np.save("ids.npy", np.tile(np.arange(0, 500, 25), 40))
    result = run("doctor", "x.npy", "--batch-size", "10", "--ids", "ids.npy")
    assert result.exit_code == 0, result.output
    for said in (
        "This machine",
        "Highest rates",
        "Optional packages",
        "Route",
        "Would pinfeed help?",
        "x.npy: 500 rows",
        "batches of 10 rows",
        "Would a GPU cache help?  Yes",
        "ids.npy: 800 row indices, in batches of 10.",
        "HostEmbedding(device_cache=0.05)",
    ):
        assert said in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "pip install" not in line) <= 80
    table = ("--rows", "1000000000", "--row-bytes", "1MiB", "--batch-size", "2")
    found = values("doctor", *table, "--ids", "ids.npy")
    assert found["data"]["nbytes"] == 1_000_000_000 << 20
    assert found["data"]["batch_ms"]["memory"] > 0
    assert found["advice"]["helps"] == "yes"
    assert (found["cache"]["helps"], found["cache"]["n_read"]) == ("yes", 800)


def test_doctor_says_whether_a_cache_helps() -> None:
    rng = np.random.default_rng(0)
    data = Data(n_rows=5_000, row_nbytes=400, batch_size=500)
    np.save("uniform.npy", rng.integers(0, 5_000, 30_000, np.int32))
    np.save("pairs.npy", np.minimum(rng.zipf(1.5, (20_000, 2)), 5_000) - 1)
    uniform = advise_on_cache("uniform.npy", data)
    pairs = advise_on_cache("pairs.npy", data)
    assert (uniform.helps, uniform.best, uniform.n_read) == ("no", None, 30_000)
    assert "as for uniform row indices" in " ".join(uniform.text(data).split())
    np.save("long.npy", rng.integers(0, 5_000, 200_000, np.int32))
    long = advise_on_cache("long.npy", data)
    assert long.n_read < long.n_ids == 200_000
    assert f"the first {long.n_read:,} of 200,000 row indices" in long.text(data)
    assert (pairs.helps, pairs.n_read) == ("yes", 40_000)
    assert pairs.best in pairs.sizes
    assert "\n     5%   97.7 KiB" in pairs.text(data)
    assert pairs.values(data)["sizes"][1]["nbytes"] == 100_000
    np.save("few.npy", np.zeros(4_000, np.int64))
    few = advise_on_cache("few.npy", data)
    assert few.helps == "unknown"
    assert "too few" in few.text(data)


def test_files_without_row_indices_of_the_table() -> None:
    data = Data(n_rows=5_000, row_nbytes=400, batch_size=500)
    with pytest.raises(RowIndexError, match=r"--ids x\.npy: dtype is float32; expected integers"):
        advise_on_cache("x.npy", data)
    np.save("ids.npy", np.arange(4_000, 6_000))
    with pytest.raises(RowIndexError, match=r"--ids ids\.npy: row 5499 is out of range"):
        advise_on_cache("ids.npy", data)
    result = run("doctor", "--ids", "ids.npy")
    assert result.exit_code == 2
    assert "--ids: row indices of which rows?" in result.output


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module is hidden, as if it was not installed.
    monkeypatch.setitem(sys.modules, "fsspec", None)
    found = {package.name: package for package in packages(Gpu("", 0, 0, 0, "2.9", None, None, ""))}
    assert not found["fsspec"].here
    assert found["matplotlib"].here
    assert "CuPy" not in found, "not needed without a GPU"
    assert {"h5py", "zarr", "pyarrow", "safetensors"} <= found.keys()
    assert install_line(found["matplotlib"].extra, found["fsspec"].extra) == (
        'pip install "matplotlib>=3.9" "fsspec>=2024.2"'
    )


@no_gpu
@pytest.mark.parametrize(("built", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_cupy_matches_torch(built: str, extra: str) -> None:
    cupy = packages(Gpu("H200", 1, GiB(140), GiB(139), "2.9", built, "13.0", ""))[0]
    assert (cupy.name, cupy.extra, cupy.here) == ("CuPy", extra, False)
    assert "PinnedStore needs page-locked memory" in cupy.problem


def test_extras_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = {
        name: requirement.partition(";")[0]
        for name, requirement in re.findall(r'^(\w+) = \["(.*)"\]$', section, re.MULTILINE)
    }
    assert extras == REQUIREMENTS
    for package in packages(Gpu("", 0, 0, 0, "2.9", None, None, "")):
        assert REQUIREMENTS[package.extra].startswith(package.name)


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "said"),
    [
        (None, None, ""),
        ("12.8", None, ""),
        (None, "12.4", "is built without CUDA; run pip install --force-reinstall torch"),
        (
            "13.0",
            "12.4",
            "is built for CUDA 13.0, but the driver supports CUDA 12.4; update the driver",
        ),
        ("12.8", "12.4", "finds no usable GPU; a reason"),
    ],
)
def test_why_there_is_no_gpu(torch_cuda: str | None, driver: str | None, said: str) -> None:
    found = gpu_problem("2.9", torch_cuda, driver, "a reason")
    assert said in found
    assert bool(found) == bool(said)


RATES = Ceilings(memory=10.0, sequential=2.0, random=0.2, link=50.0)


@pytest.mark.parametrize(
    ("nbytes", "gpu", "helps", "said"),
    [
        (GiB(40), "H200", "no", "fits on the GPU, which has 100.0 GiB free. Copy it there once"),
        (GiB(90), "H200", "perhaps", "would fit on the GPU"),
        (GiB(200), "H200", "perhaps", "fits in memory (500.0 GiB free), but not on the GPU"),
        (GiB(400), "H200", "yes", "streams it from the disk and copies batches to the GPU"),
        (
            GiB(40),
            "",
            "perhaps",
            "this machine has no GPU. If numpy.load and indexing are fast enough, keep them",
        ),
        (GiB(400), "", "yes", "streams it from the disk in the background"),
    ],
)
def test_doctor_says_whether_pinfeed_helps(nbytes: int, gpu: str, helps: str, said: str) -> None:
    data = Data(n_rows=nbytes >> 12, row_nbytes=4096, batch_size=1000)
    advice = advise(data, RATES, free_host=GiB(500), gpu=gpu, free_gpu=GiB(100) if gpu else 0)
    assert advice.helps == helps
    assert said in " ".join(advice.why)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (12_345.6, "12,346 ms"),
        (9.96, "10 ms"),
        (9.94, "9.9 ms"),
        (0.01234, "0.012 ms"),
        (0.0000123, "less than 0.001 ms"),
    ],
)
def test_milliseconds_as_people_read_them(ms: float, text: str) -> None:
    assert spelled(ms) == text


def test_times_of_a_batch() -> None:
    data = Data(n_rows=1 << 30, row_nbytes=1000, batch_size=1000)
    assert RATES.batch_ms(data.batch_nbytes) == pytest.approx(
        {"memory": 0.1, "disk in sequence": 0.5, "disk at random": 5, "link": 0.02}
    )
    why = advise(data, RATES, free_host=GiB(1), gpu="", free_gpu=0).why
    assert "at least 0.5 ms in sequential" in why[1]
    assert "fully random order (shuffle=True), a batch takes 5 ms" in why[2]
    assert why[2].endswith("Use block_shuffled(block_rows=263).")
    unmeasured = advise(data, Ceilings(10.0), free_host=GiB(1), gpu="", free_gpu=0)
    assert "The disk was not measured" in unmeasured.why[1]


def test_cores_and_limits_in_words() -> None:
    host = Host.now()
    assert host.usable_cores <= host.cores
    assert host.core_quota is None or host.core_quota > 0
    assert Package("a", "b", "c", here=True).problem == ""


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
def test_doctor_on_a_gpu() -> None:
    found = values("doctor", "--rows", "100000", "--row-bytes", "512", "--batch-size", "4096")
    assert found["gpu"]["name"] == torch.cuda.get_device_name()
    assert found["gpu"]["driver_cuda"]
    assert min(found["gb_per_s"]["link"].values()) > 0
    assert found["advice"]["helps"] == "no"
    assert (
        "Rows of this size in a PinnedStore take the" in found["route"]
        or "With CuPy" in found["route"]
    )
    assert run("doctor", "x.npy").exit_code == 0


FUNCTIONS = """
import threading

def waiting(batch):
    threading.Event().wait(0.001)
    return batch

def computing(batch, generator):
    sum(range(20_000))
    return batch
"""


@pytest.mark.usefixtures("small")
def test_doctor_times_a_transform(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_advice, "_SECONDS", 0.5)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    (folder / "transforms_of_this_test.py").write_text(FUNCTIONS)
    options = ["x.npy", "--batch-size", "7", "--host-transform"]
    found = values("doctor", *options, "transforms_of_this_test:waiting")["transform_threads"]
    assert (found["n_rows"], found["n_cores"], found["n_threads"]) == (7, 3, 3)
    assert found["seconds"] >= 0.001
    assert found["lock_share"] < 0.5
    text = run("doctor", *options, "transforms_of_this_test:computing").stdout
    assert "Would transform_threads help?" in text
    assert "transforms_of_this_test:computing takes" in unwrapped(text)
    assert values("doctor")["transform_threads"] is None


def test_advice_on_threads_is_that_of_the_measurement() -> None:
    found = thread_advice.ThreadAdvice("a:f", 256, 0.012, 0.1, 4, n_threads=4, gain=3.4)
    assert found.helps == "yes"
    assert "4 threads make 3.4 times as many calls" in unwrapped(found.text)
    assert "Use transform_threads=4" in unwrapped(found.text)
    slow = thread_advice.ThreadAdvice("a:f", 256, 0.012, 0.98, 4)
    assert slow.helps == "no"
    assert "only one thread can hold the lock" in unwrapped(slow.text)
    assert "one core" in unwrapped(thread_advice.ThreadAdvice("a:f", 2, 1.0, 0.0, 1).text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host-transform", "os:getcwd"], "on which rows? Give FILE"),
        (["x.npy", "--host-transform", "os"], "expected MODULE:FUNCTION"),
        (["x.npy", "--host-transform", "os:no_such"], "no_such"),
        (["x.npy", "--host-transform", "no_such_module:f"], "No module named"),
        (["x.npy", "--host-transform", "os:sep"], "it is no function"),
    ],
)
def test_a_transform_that_is_not_found_is_refused(options: list[str], words: str) -> None:
    found = run("doctor", *options)
    assert found.exit_code == 2
    assert words in unwrapped(found.stderr)
