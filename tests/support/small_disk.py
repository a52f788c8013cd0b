"""A fixture with a small file system, and a limit that imitates a full disk without a mount."""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", where], capture_output=True
        ).returncode
    ):
        pytest.skip(
            "no file system can be mounted here; test_no_room_for_a_file does the same with a limit"
        )
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """Limit the size of files, to imitate a full disk without a mount."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill(directory: Path, left: int) -> None:
    """Fill the file system until ``left`` bytes are free."""
    (directory / "ballast").write_bytes(bytes(max(0, shutil.disk_usage(directory).free - left)))
