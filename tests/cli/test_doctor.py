"""``pinfeed doctor``: the machine and, given a file, how the file would be read."""

import os
import re
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.command import ROOT, X, python, run, values

from pinfeed import GiB, MiB
from pinfeed.cli import doctor as doctor_command
from pinfeed.cli.doctor import ReadRates, gpu_problem, host_values
from pinfeed.memory.host import free_host_bytes, host_limits, lock_limit
from pinfeed.native import library
from pinfeed.validation.suggestions import REQUIREMENTS


def test_doctor_agrees_with_the_machine() -> None:
    found = values("doctor")
    limits = host_limits()
    host = found["host"]
    assert host["memory"] == limits[0].total
    assert host["lock_limit"] == lock_limit()
    assert host["cores"] == len(os.sched_getaffinity(0))
    assert [limit["name"] for limit in host["limits"]] == [
        limit.name for limit in limits[1:] if limit.total < limits[0].total
    ]
    assert abs(host["free"] - free_host_bytes()) < limits[0].total / 4, "it changes all the time"
    assert host["compiled_problem"] == library.why_not()
    assert host["packages"]["hdf5"] == version("h5py")
    assert found["gpu"]["torch"] == torch.__version__
    assert found["file"] is None


def test_doctor_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "why_not", lambda: "PINFEED_NATIVE=0 is set")
    monkeypatch.setattr(doctor_command, "core_quota", lambda: 1.5)
    monkeypatch.setitem(REQUIREMENTS, "hdf5", "no-such-package>=1")
    shown = run("doctor").stdout
    for said in (
        "compiled part  not used, because PINFEED_NATIVE=0 is set",
        "limited to the CPU time of 1.5 (control group)",
        "pinned memory  ",
        f"torch          {torch.__version__}",
        'missing        pip install "no-such-package>=1"',
    ):
        assert said in shown


def test_doctor_sees_the_limits_of_the_process() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, 1 << 32))"
    command = "from pinfeed.cli.doctor import host_values; print(host_values(None))"
    shown = python("-c", f"{limit}; {command}").stdout
    assert "'name': 'RLIMIT_DATA', 'total': 4294967296" in shown
    assert 0 < int(re.findall(r"'free': (\d+)", shown)[0]) < 1 << 32


def test_cupy_matches_torch() -> None:
    assert "cuda12" in host_values("12.8")["packages"]
    assert "cuda13" in host_values("13.0")["packages"]
    assert not any(extra.startswith("cuda") for extra in host_values(None)["packages"])


def test_extras_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = {
        name: requirement.partition(";")[0]
        for name, requirement in re.findall(r'^(\w+) = \["(.*)"\]$', section, re.MULTILINE)
    }
    assert extras == REQUIREMENTS


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "said"),
    [
        (None, None, ""),
        ("12.8", None, ""),
        (None, "12.4", "is built without CUDA; run pip install --force-reinstall torch"),
        ("13.0", "12.4", "but the driver supports CUDA 12.4; update the driver"),
        ("12.8", "12.4", "finds no usable GPU; a reason"),
    ],
)
def test_why_there_is_no_gpu(torch_cuda: str | None, driver: str | None, said: str) -> None:
    found = gpu_problem("2.9", torch_cuda, driver, "a reason")
    assert said in found
    assert bool(found) == bool(said)


def test_doctor_of_a_file() -> None:
    np.save("large.npy", np.ones((12, 1 << 20), np.uint8))
    found = values("doctor", "large.npy")["file"]
    assert (found["source"], found["kind"], found["shape"]) == ("large.npy", "npy", [12, 1 << 20])
    assert found["rates"]["nbytes"] == os.path.getsize("large.npy")
    assert found["rates"]["warm"] > 0
    assert found["reads"]["in order"] == found["reads"]["shuffled"]
    assert found["reads"]["in order"][0].startswith("large.npy, 12.0 MiB: read through")
    shown = run("doctor", "large.npy").stdout
    for said in ("\nlarge.npy\n", "uint8, 12.0 MiB", "page cache", " disk "):
        assert said in shown


def test_doctor_says_how_each_order_is_read() -> None:
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(100, 3, 8), compression="gzip")
    found = values("doctor", "x.h5")["file"]
    assert "decoded in sequence" in found["reads"]["in order"][0]
    assert "decoded into RAM during the first epoch" in found["reads"]["shuffled"][0]
    assert found["rates"] is None, "the file is too small to measure"


def test_a_problem_of_the_file_does_not_hide_the_machine() -> None:
    Path("x.npy").write_bytes(b"")
    result = run("doctor", "x.npy")
    assert result.exit_code == 2
    assert result.stdout.startswith("This machine\n")
    assert result.stderr.startswith("pinfeed: x.npy is empty")


def test_rates_are_measured_and_the_page_cache_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel decides what it drops, so the test simulates its answers."""
    Path("x.bin").write_bytes(bytes(MiB(9)))
    monkeypatch.setattr(doctor_command, "_SPAN_BYTES", MiB(8))
    dropped = []

    def drop(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append(length)

    monkeypatch.setattr(os, "posix_fadvise", drop)
    for before, after, n_drops in ((0, 0, 2), (1, 0, 1), (1, 1, 1)):
        dropped.clear()
        answers = iter((before, after))
        monkeypatch.setattr(
            doctor_command, "cached_pages", lambda fd, begin, end, a=answers: np.full(4, next(a))
        )
        found = ReadRates.measured("x.bin")
        assert found is not None
        assert (found.nbytes, found.cached) == (MiB(8), before)
        assert (found.cold is None) == bool(after), "the file stayed in memory"
        assert dropped == [MiB(8)] * n_drops
    monkeypatch.setattr(doctor_command, "can_tell", lambda fd: False)
    unknown = ReadRates.measured("x.bin")
    assert unknown is not None
    assert unknown.cold is unknown.cached is None
    assert ReadRates.measured("x.npy") is None, "too small"
    assert ReadRates.measured(".") is None


def test_doctor_of_a_gpu_that_torch_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "is_available": True,
        "mem_get_info": (GiB(70), GiB(80)),
        "get_device_name": "H100",
        "device_count": 2,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(doctor_command, "driver_cuda", lambda: "13.1")
    monkeypatch.setattr(doctor_command, "pinning_problem", lambda: "CuPy is needed")
    shown = run("doctor").stdout
    for said in (
        "for CUDA 13.0; driver for CUDA 13.1",
        "H100 (one of 2), 80.0 GiB, 70.0 GiB free",
        "CuPy is needed",
        "cupy-cuda13x",
    ):
        assert said in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_why_a_gpu_cannot_read_pinned_memory() -> None:
    assert "PinnedStore needs page-locked memory" in doctor_command.pinning_problem()


@pytest.mark.gpu
def test_doctor_on_a_gpu() -> None:
    found = values("doctor")["gpu"]
    assert found["name"] == torch.cuda.get_device_name()
    assert found["driver_cuda"]
    assert found["total"] >= found["free"] > 0
    assert "PinnedStore" in found["problem"] or not found["problem"]
