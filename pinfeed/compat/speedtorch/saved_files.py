"""Files that tables are saved in: their names, and writing them atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO

from pinfeed.errors import FileMissing

FileName = str | os.PathLike[str]


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Open a file that takes the name ``path`` once its contents are on the disk.

    If writing fails, a file that had this name stays as it was.
    """
    # The target of a symbolic link is replaced, and the link stays.
    path = os.path.realpath(path)
    temporary = f"{path}.{os.getpid()}.writing"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def with_suffix(name: FileName, suffix: str) -> str:
    """Return the name with the suffix, which is added if it is missing, as numpy does."""
    path = os.fspath(name)
    return path if path.endswith(suffix) else path + suffix


def find_file(name: FileName, suffix: str) -> str:
    """Return the path of a saved file: the name with the suffix, or else the name alone.

    Raises:
        FileMissing: If neither exists.
    """
    for candidate in (with_suffix(name, suffix), os.fspath(name)):
        if os.path.isfile(candidate):
            return candidate
    raise FileMissing(f"{os.fspath(name)}: no such file (looked in {os.getcwd()})")
