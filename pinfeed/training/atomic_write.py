"""Atomic writes: a file appears under its name only when it is complete and on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` when the block ends without an error.

    The data goes to another name in the same directory, is synced to the disk and then renamed.
    If the block raises, that file is removed and ``path`` does not change.

    Args:
        path: File to create or replace. A link is itself replaced; pass ``os.path.realpath(path)``
            to replace its target.

    Yields:
        The file, open for writing bytes.

    Raises:
        OSError: If the file cannot be written, synced or renamed.
    """
    unfinished = f"{os.fspath(path)}.{os.getpid()}.writing"
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(unfinished)
