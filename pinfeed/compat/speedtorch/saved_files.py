"""Names of the files in which tables are saved."""

from __future__ import annotations

import os

from pinfeed.errors import FileMissing

FileName = str | os.PathLike[str]


def with_suffix(name: FileName, suffix: str) -> str:
    """Return the name with the suffix, which is added if it is missing, as numpy does."""
    path = os.fspath(name)
    return path if path.endswith(suffix) else path + suffix


def find_file(name: FileName, suffix: str) -> str:
    """Return the path of a saved file: the name with the suffix, or else the name alone.

    Raises:
        FileMissing: If neither file exists.
    """
    for candidate in (with_suffix(name, suffix), os.fspath(name)):
        if os.path.isfile(candidate):
            return candidate
    raise FileMissing(
        f"{os.fspath(name)}: the file does not exist (working directory {os.getcwd()})"
    )
