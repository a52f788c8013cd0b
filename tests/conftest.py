"""Every test: no thread and no file descriptor stays behind."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import pytest


def open_files() -> set[str]:
    """What is open, but for the fonts that matplotlib keeps open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {name for name in found if not name.endswith((".ttf", f"/proc/{os.getpid()}/fd"))}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    threads, files = set(threading.enumerate()), open_files()
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.name.startswith("pinfeed")]
    assert not left, f"threads left behind: {left}"
    if open_files() - files:
        gc.collect()  # pytest's exception infos are cycles
    assert not open_files() - files, "file descriptors left behind"
