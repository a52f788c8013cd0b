"""Trials of drivers in a separate process, with drivers in C that copy host memory.

The process finds them by ``LD_LIBRARY_PATH``.
"""

import ctypes
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pinfeed.devices import batch_copy_trial, route
from pinfeed.devices.batch_copy_trial import _is_of_driver, driver_name, is_safe

DRIVER = r"""
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuInit(unsigned flags) { INIT; return flags; }
int cuDeviceGet(int* device, int index) { *device = index; return index == 1 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = context; return !device; }
int cuCtxSetCurrent(void* context) { return !context; }
int cuMemAlloc_v2(void** at, size_t size) { *at = malloc(size); return 0; }
int cuMemHostRegister_v2(void* at, size_t size, unsigned flags) { return flags != 3; }
int cuMemHostUnregister(void* at) { return 0; }
int cuStreamCreate(void** stream, unsigned flags) { *stream = stream; return flags != 1; }
int cuStreamSynchronize(void* stream) { SYNC; return 0; }
int cuMemcpyBatchAsync(void** targets, void** sources, size_t* sizes, size_t n,
                       void* attributes, size_t* first, size_t n_attributes,
                       size_t* failed, void* stream)
{
    static int n_calls;
    n_calls++;
    COPY;
    if (n != 1024 || n_attributes != 1 || !stream)
        return 1;
    for (size_t i = 0; i < n; i++)
        memcpy(targets[i], sources[i], sizes[i]);
    return 0;
}
"""
CDLL = ctypes.CDLL
UsesDriver = Callable[..., Path]


@pytest.fixture
def use_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UsesDriver]:
    """Return a function that compiles a driver, which a trial then uses."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jan 1\n")
    monkeypatch.setattr(batch_copy_trial, "_VERSION_FILE", version)
    monkeypatch.setattr(route, "_cache_folder", lambda: tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)

    def use(init: str = "", sync: str = "", copy: str = "") -> Path:
        is_safe.cache_clear()
        macros = [f"-DINIT={init}", f"-DSYNC={sync}", f"-DCOPY={copy}"]
        options = ["-O2", "-shared", "-fPIC", "-w", "-o", library]
        subprocess.run([compiler, *macros, *options, source], check=True)
        opened = CDLL(str(library))
        monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": opened}.__getitem__)
        return library

    yield use
    is_safe.cache_clear()


NAME = "NVIDIA driver 580.159.04 (CUDA 13.1)"


def test_a_good_driver_is_tried_once(
    use_driver: UsesDriver, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library = use_driver()
    assert driver_name() == NAME
    assert is_safe(1, "a GPU")
    known = json.loads((tmp_path / "routes.json").read_text())
    assert known[f"batched copies, a GPU, {NAME}"] == {"failure": ""}
    # Another process would not find a driver.
    library.unlink()
    is_safe.cache_clear()
    assert is_safe(1, "a GPU")
    assert caplog.records == []


HANGS = "for (;;) pause()"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ({"sync": HANGS}, "it did not end in time"),
        ({"copy": f"if (n_calls > 20) {HANGS}"}, "it did not end in time"),
        ({"copy": "raise(SIGSEGV)"}, "a signal ended it (Segmentation fault)"),
        ({"copy": "if (n_calls > 100) abort()"}, "a signal ended it (Aborted)"),
        ({"copy": "if (n_calls > 100) return 0"}, "RuntimeError: cuMemcpyBatchAsync copied wrong"),
        ({"copy": "return 801"}, "RuntimeError: cuMemcpyBatchAsync failed with CUDA error 801"),
        ({"sync": "return 700"}, "RuntimeError: cuStreamSynchronize failed with CUDA error 700"),
    ],
)
def test_a_driver_with_a_fault_is_not_used(
    fault: dict[str, str],
    failure: str,
    use_driver: UsesDriver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if HANGS in str(fault):
        monkeypatch.setattr(batch_copy_trial, "_COPIES_LIMIT_S", 0.2)
    library = use_driver(**fault)
    for _ in range(3):
        assert not is_safe(1, "a GPU")
    # Another process warns too, and does not repeat the trial.
    library.unlink()
    is_safe.cache_clear()
    assert not is_safe(1, "a GPU")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    for record in caplog.records:
        assert f"batched copies by cuMemcpyBatchAsync of the {NAME} failed" in record.getMessage()
        assert f"a trial: {failure}" in record.getMessage()
        assert str(library.parent / "routes.json") in record.getMessage()


def test_another_driver_and_another_gpu_are_tried(use_driver: UsesDriver, tmp_path: Path) -> None:
    use_driver(copy="abort()")
    assert not is_safe(1, "a GPU")
    use_driver()
    assert not is_safe(1, "a GPU")
    assert is_safe(1, "another GPU")
    is_safe.cache_clear()
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  590.44.01\n")
    assert is_safe(1, "a GPU")
    assert driver_name() == "NVIDIA driver 590.44.01 (CUDA 13.1)"


@pytest.mark.parametrize(
    ("program", "fault", "reason"),
    [
        ("", {}, "sys.executable, which is '', does not start Python"),
        ("/bin/missing", {}, "FileNotFoundError"),
        # The program of an application that has Python in it.
        ("/bin/true", {}, "/bin/true did not run it"),
        ("/bin/false", {}, "it ended with exit status 1"),
        (sys.executable, {"init": "return 100"}, "cuInit failed with CUDA error 100"),
        (sys.executable, {"init": HANGS}, "it did not end in time"),
        # The operating system kills processes if memory is short.
        (sys.executable, {"copy": "if (n_calls > 100) raise(SIGKILL)"}, "ended it (Killed)"),
        (sys.executable, {"copy": "if (n_calls > 100) raise(SIGTERM)"}, "ended it (Terminated)"),
    ],
)
def test_a_trial_is_not_remembered_unless_it_ends_by_the_driver(
    program: str,
    fault: dict[str, str],
    reason: str,
    use_driver: UsesDriver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    library = use_driver(**fault)
    if HANGS in str(fault):
        monkeypatch.setattr(batch_copy_trial, "_LIMIT_S", 0.2)
    monkeypatch.setattr(sys, "executable", program)
    for _ in range(2):
        assert not is_safe(1, "a GPU")
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert reason in caplog.text
    assert not library.with_name("routes.json").exists()


def test_an_error_of_the_machine_is_not_one_of_the_driver() -> None:
    assert not _is_of_driver(1, "MemoryError: Unable to allocate 32.0 MiB")
    assert _is_of_driver(1, "RuntimeError: cuMemcpyBatchAsync copied wrong bytes")


def test_a_frozen_application_is_not_started(
    use_driver: UsesDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    use_driver()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not is_safe(1, "a GPU")
    assert "does not start Python" in caplog.text


def test_an_application_with_python_in_it_is_started_once(
    use_driver: UsesDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It runs its own program, with a feeder of long rows, instead of the trial."""
    caplog.set_level(logging.INFO)
    use_driver()
    application, starts = tmp_path / "application", tmp_path / "starts"
    code = (
        "import sys; from pinfeed.devices.batch_copy_trial import _run_trial; "
        f"sys.executable = '{application}'; _run_trial(1)"
    )
    application.write_text(f'#!/bin/sh\necho >> {starts}\nexec {sys.executable} -c "{code}"\n')
    application.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(application))
    assert not is_safe(1, "a GPU")
    assert f"which is '{application}', does not start Python" in caplog.text
    assert starts.read_text() == "\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python knows no PYTHONSAFEPATH")
def test_files_of_the_current_folder_are_no_modules_of_a_trial(
    use_driver: UsesDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver()
    (tmp_path / "numpy.py").write_text("raise SystemExit('this is not numpy')")
    monkeypatch.chdir(tmp_path)
    assert is_safe(1, "a GPU")


def test_a_machine_without_a_driver_has_no_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(batch_copy_trial, "_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert driver_name() == "NVIDIA driver of unknown version (CUDA 0.0)"
