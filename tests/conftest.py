"""Every test: no thread and no file descriptor stays behind, and what is measured on a GPU is not taken for the user's loops."""

import contextlib
import faulthandler
import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pinfeed.devices import route_cache

# With this setting products of cuBLAS, and recurrent layers of cuDNN, add up in one order, run
# after run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True, scope="session")
def _rates_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_cache, "_cache_folder", lambda: tmp_path_factory.getbasetemp())
        yield


@pytest.fixture(autouse=True, scope="session")
def _few_objects() -> None:
    """The collector looks at what tests make, and not at all the modules and cases again and again: that took a fifth of the time."""
    gc.collect()
    gc.freeze()


def open_files() -> set[str]:
    """What is open, but for the fonts that matplotlib keeps open, and for what a driver and a compiler have, where there is a GPU."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if not torch.cuda.is_available() or (
                name.startswith("/") and not name.startswith(("/dev/", "/proc/", "/sys/"))
            ):
                found.add(f"{number} {name}")
    return {name for name in found if not name.endswith((".ttf", f"/proc/{os.getpid()}/fd"))}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("pinfeed")]
    assert not left, f"threads left behind: {left}"
    deadline = time.monotonic() + 30
    while open_files() - files and time.monotonic() < deadline:
        # pytest's exception infos are cycles.
        gc.collect()
        # Queues of worker processes are closed by threads of their own.
        time.sleep(0.01)
    assert not open_files() - files, "file descriptors left behind"


@pytest.fixture
def unhurried() -> None:
    """For tests that take longer than any other may."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def gpu_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process where a test has broken its CUDA context: every later test would fail for it. pytest-xdist starts another process."""
    yield
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(
            f"the GPU failed in {request.node.nodeid}, and with it every test after it in this process: {error}",
            returncode=1,
        )
