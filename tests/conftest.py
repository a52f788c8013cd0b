"""Checks after every test that no thread and no file descriptor remains.

The functions import torch themselves, because the process that only distributes the tests loads
this file, too.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from hypothesis import settings
from support.programs import Programs, served

# An example takes as long as the machine is busy.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# With this setting, cuBLAS products and cuDNN's recurrent layers add in one order in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Otherwise, workers and programs compile each module again: a third of their start-up time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell starts programs in the background with interrupts ignored, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a sweep as slow, except each ``n``-th one."""
    seen: Counter[str] = Counter()
    for item in items:
        if sweep := item.get_closest_marker("sweep"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % sweep.args[0]:
                item.add_marker("slow")
            seen[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without the garbage collector, which finds nothing among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the compiled functions off, as an installation without a C compiler."""
    from pinfeed.native import library

    monkeypatch.setenv(library.SWITCH, "0")
    for function in (library.library, library.why_not):
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in (library.library, library.why_not):
        function.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def _fork_server() -> None:
    """Start the processes that multiprocessing keeps for all later ones, by default since 3.14."""
    if sys.version_info >= (3, 14):
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Run programs in processes that need not load torch again."""
    with served() as programs:
        yield programs


@functools.cache
def gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU from a test that does not need one, so that a Config estimates its steps."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def open_files() -> set[str]:
    """Return the open file descriptors.

    The fonts that matplotlib keeps open are left out, and the files of a GPU's driver and compiler.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if not gpu_is_here() or (
                name.startswith("/") and not name.startswith(("/dev/", "/proc/", "/sys/"))
            ):
                found.add(f"{number} {name}")
    return {name for name in found if not name.endswith((".ttf", f"/proc/{os.getpid()}/fd"))}


_frozen = {"modules": 0, "tests": 0}


def freeze_objects() -> None:
    """Freeze what stays until the end, which the collector would examine again in each test.

    These are modules, test cases, reports of tests, and caches. The collector took a fifth of the
    time, because some tests load large libraries, such as the compiler of torch.
    """
    _frozen["tests"] += 1
    if len(sys.modules) > _frozen["modules"] + 100 or _frozen["tests"] > 100:
        gc.collect()
        gc.freeze()
        _frozen.update(modules=len(sys.modules), tests=0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    freeze_objects()
    threads = set(threading.enumerate())
    files = open_files()
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("pinfeed")]
    assert not left, f"threads left behind: {left}"
    deadline = time.monotonic() + 30
    while (opened := open_files() - files) and time.monotonic() < deadline:
        # The exception infos of pytest are reference cycles.
        gc.collect()
        # Separate threads close the queues of worker processes.
        time.sleep(0.01)
    assert not opened, f"file descriptors left behind: {opened}"


@pytest.fixture
def unhurried() -> None:
    """Lift the time limit of a test."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """End the process if a test has broken its CUDA context, because every later test would fail.

    pytest-xdist then starts another process.
    """
    yield
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(
            f"the GPU failed in {item.nodeid}, and would fail in every later test of this "
            f"process: {error}",
            returncode=1,
        )
