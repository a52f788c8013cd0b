"""SaveDirectory: the saves in a checkpoint directory; and the manifest of a save.

Each rank of sharded tables has a directory in the checkpoint directory. A save is complete if all
ranks have it. Its manifest has the sizes and checksums of its files, and descriptions of its
objects. It is written last and checked first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

from pinfeed.errors import CheckpointError, described
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.rank_loop import RankGroup
from pinfeed.training.row_file import checksums, open_plain

MANIFEST = "manifest.json"

_FORMAT = 1
# A manifest has one checksum for every 16 MiB of rows.
_MAX_BYTES = 64 << 20

UNFINISHED = ".writing-"
"""Beginning of the name of a save that is being written."""
_REMOVED = ".removing-"
_RANK_DIRECTORY = re.compile(r"(\d+)-of-(\d+)", re.ASCII)


class SaveDirectory:
    """The saves of this process.

    Args:
        path: The checkpoint directory.
        group: The ranks that save together; None for a process that saves alone.

    Attributes:
        root: Directory of the saves of this process.
        numbers: Numbers of the complete saves of this process, ascending.
    """

    def __init__(self, path: pathlib.Path, group: RankGroup | None = None) -> None:
        self.path = path
        self.root = path if group is None else path / f"{group.rank}-of-{group.size}"
        self._group = group

    @property
    def numbers(self) -> list[int]:
        return save_numbers(self.root)

    def save(self, number: int) -> pathlib.Path:
        """Return the directory of a save."""
        return self.root / f"{number:08d}"

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks.

        It surrounds a save, and the first part of a resume, which does not change anything.
        """
        if self._group is None:
            return contextlib.nullcontext()
        return self._group.loop_lockstep.report_failure()

    def wait(self, step: RankStep) -> None:
        """Wait until all ranks have reached a step."""
        if self._group is not None:
            self._group.loop_lockstep.agree(step)

    def next_save(self) -> tuple[int, list[int]]:
        """Return the number of the next save, and the numbers of the complete saves, ascending."""
        of_ranks = self._numbers_of_ranks(RankStep.SAVE)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        # A number that any rank has is not used again.
        return max(itertools.chain(*of_ranks), default=0) + 1, sorted(complete)

    def newest(self) -> pathlib.Path:
        """Return the directory of the newest complete save.

        Raises:
            CheckpointError: If no save is complete, or ``path`` is a single save.
        """
        path = self.path
        if (path / MANIFEST).is_file():
            raise CheckpointError(
                f"{path} is a single save; expected the directory that checkpoint.save was given; "
                f"give {str(path.parent)!r}"
            )
        of_ranks = self._numbers_of_ranks(RankStep.RESUME)
        complete = set(of_ranks[0]).intersection(*of_ranks)
        if complete:
            return self.save(max(complete))
        if self._group is None:
            raise CheckpointError(
                f"{path} has no complete checkpoint; expected the directory of checkpoint.save"
            )
        size = self._group.size
        others = sorted({other for _, other in _ranks_and_sizes(path)} - {size})
        if others and not any(of_ranks):
            raise CheckpointError(
                f"{path} was saved by {' and by '.join(map(str, others))} ranks and is resumed by "
                f"{size}; expected the same number (to continue with another number, "
                "export() the tables and load the files with ShardedEmbedding.from_pretrained)"
            )
        rank = self._group.rank
        raise CheckpointError(
            f"{path} has no checkpoint that all {size} ranks have completed; "
            f"rank {rank} has {of_ranks[rank]}"
        )

    def sweep(self) -> None:
        """Remove the files of saves whose processes were killed."""
        for child in self.root.iterdir():
            if child.name.startswith((UNFINISHED, _REMOVED)):
                shutil.rmtree(child, ignore_errors=True)

    def remove(self, number: int) -> None:
        """Rename a save and remove it, because its number must never name an incomplete save."""
        directory = self.save(number)
        removed = directory.with_name(f"{_REMOVED}{directory.name}")
        directory.rename(removed)
        shutil.rmtree(removed)

    def _numbers_of_ranks(self, step: RankStep) -> list[list[int]]:
        """Return the numbers of every rank's saves."""
        numbers = self.numbers
        if self._group is None:
            return [numbers]
        lockstep = self._group.loop_lockstep
        n_own = [len(numbers)] * lockstep.size
        n_received = lockstep.agree(step, numbers=len(numbers))[:, 0].tolist()
        own = torch.tensor(numbers * lockstep.size, dtype=torch.int64)[:, None]
        found = lockstep.exchange_rows("control bytes", [own], [n_own], [n_received])[0][:, 0]
        return [of_rank.tolist() for of_rank in found.split(n_received)]


def save_numbers(root: pathlib.Path) -> list[int]:
    """Return the numbers of the complete saves in a directory, ascending.

    Links and everything else that is not a directory are ignored.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        names = [child.name for child in found if child.is_dir(follow_symlinks=False)]
        return sorted(int(name) for name in names if re.fullmatch(r"\d{8}", name, re.ASCII))
    return []


def rank_directories(path: pathlib.Path) -> list[list[pathlib.Path]]:
    """Return the directories of all ranks, for each number of ranks whose directories all exist."""
    # Count the directories, because a name may contain any number of ranks.
    n_ranks = Counter(size for rank, size in _ranks_and_sizes(path) if rank < size)
    sizes = [size for size in sorted(n_ranks) if n_ranks[size] == size]
    return [[path / f"{rank}-of-{size}" for rank in range(size)] for size in sizes]


def sync(directory: pathlib.Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ranks_and_sizes(path: pathlib.Path) -> set[tuple[int, int]]:
    """Return the rank and the number of ranks of each rank directory."""
    found = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(path):
            if match := _RANK_DIRECTORY.fullmatch(name):
                found.add((int(match[1]), int(match[2])))
    return found


def write_file(path: pathlib.Path, fill: Callable[[IO[bytes]], Any]) -> dict[str, Any]:
    """Write a file, sync it to the disk, and return its size and checksums."""
    with open(path, "xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "crc32": checksums(str(path))}


def write_manifest(
    directory: pathlib.Path, files: Mapping[str, Any], objects: Mapping[str, Any]
) -> None:
    """Write the manifest of a directory, and sync it to the disk.

    Args:
        directory: Directory of the files.
        files: Results of ``write_file``, by file name.
        objects: Descriptions of the saved objects as plain values, by name.
    """
    text = json.dumps({"format": _FORMAT, "files": files, "objects": objects}, sort_keys=True)
    outer = json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    write_file(directory / MANIFEST, lambda file: file.write(outer.encode()))


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """Read the manifest of a directory.

    Returns:
        ``files`` with their ``bytes`` and ``crc32``, and ``objects`` with their ``kind``.

    Raises:
        CheckpointError: If the manifest is missing or damaged.
    """
    path = directory / MANIFEST
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_BYTES:
                raise ValueError(f"it has {size} bytes, expected at most {_MAX_BYTES}")
            outer = json.loads(file.read())
        text = outer["body"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        _check_body(body)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {described(error):.200}; "
            f"remove {directory} to return to the previous save, if one exists"
        ) from error
    return body


def _check_body(body: Mapping[str, Any]) -> None:
    """Check the structure of a manifest.

    Raises:
        ValueError: If a value is invalid.
    """
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']}, expected {_FORMAT}")
    if any(os.path.basename(name) != name or name.startswith(".") for name in body["files"]):
        raise ValueError("it names files outside its directory")
    for file in body["files"].values():
        if type(file["bytes"]) is not int or type(file["crc32"]) is not list:
            raise ValueError(f"{file} is not a size with checksums")
    for entry in body["objects"].values():
        if entry["kind"] == "value" and "value" not in entry:
            raise ValueError("a value is missing")


def check_file(
    path: pathlib.Path, expected: Mapping[str, Any], *, is_read_next: bool = False
) -> None:
    """Check that a file has the size and the checksums of its manifest.

    Args:
        path: The file.
        expected: Size and checksums.
        is_read_next: Whether the file is read again soon, so that it stays in the page cache.

    Raises:
        CheckpointError: If the size or a checksum differs, or the file cannot be read.
    """
    try:
        size = os.stat(path).st_size
        found = checksums(str(path), is_read_next=is_read_next) if size == expected["bytes"] else []
    except (OSError, ValueError) as error:
        # A ValueError means that no file can have this name.
        raise CheckpointError(f"{path} cannot be read: {described(error)}") from error
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, expected {expected['bytes']}"
        )
    if found != expected["crc32"]:
        pairs = itertools.zip_longest(found, expected["crc32"])
        # Without a difference, the manifest has further checksums, which are null.
        chunk = next((i for i, (one, other) in enumerate(pairs) if one != other), len(found))
        raise CheckpointError(
            f"{path} is damaged: "
            f"its checksum is wrong in chunk {chunk} of {len(found)} (16 MiB each)"
        )
