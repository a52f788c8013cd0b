"""Every test: no thread and no file descriptor stays behind."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("pinfeed")]
    assert not left, f"threads left behind: {left}"
    if len(os.listdir("/proc/self/fd")) > files:
        gc.collect()  # pytest's exception infos are cycles
    assert len(os.listdir("/proc/self/fd")) <= files, "file descriptors left behind"
