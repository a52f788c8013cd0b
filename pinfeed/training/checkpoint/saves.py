"""The saves in a checkpoint directory: their numbers, and how they appear and disappear."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

from pinfeed.errors import CheckpointError
from pinfeed.training.checkpoint import manifest
from pinfeed.training.distributed.checkpoint import LocalSave

UNFINISHED = ".writing-"
"""Beginning of the name of a save that is being written."""
_REMOVED = ".removing-"


def save_numbers(root: pathlib.Path) -> list[int]:
    """Return the numbers of the complete saves, ascending.

    Links and everything else that is not a directory are ignored.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        names = [child.name for child in found if child.is_dir(follow_symlinks=False)]
        return sorted(int(name) for name in names if _is_number(name))
    return []


def newest_save(path: pathlib.Path, location: LocalSave) -> pathlib.Path:
    """Return the directory of the last complete save.

    Raises:
        CheckpointError: If no save is complete, or ``path`` is a single save.
    """
    root = location.directory(path)
    if (path / manifest.NAME).is_file():
        raise CheckpointError(
            f"{path} is a single save; expected the directory that checkpoint.save was given; "
            f"give {str(path.parent)!r}"
        )
    return root / save_name(location.newest(path, save_numbers(root)))


def save_name(number: int) -> str:
    """Return the name of a save's directory."""
    return f"{number:08d}"


def sweep(root: pathlib.Path) -> None:
    """Remove the files of saves whose processes were killed."""
    for child in root.iterdir():
        if child.name.startswith((UNFINISHED, _REMOVED)):
            shutil.rmtree(child, ignore_errors=True)


def remove(directory: pathlib.Path) -> None:
    """Rename a save and remove it, because its number must never name an incomplete save."""
    removed = directory.with_name(f"{_REMOVED}{directory.name}")
    directory.rename(removed)
    shutil.rmtree(removed)


def sync(directory: pathlib.Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) == 8
