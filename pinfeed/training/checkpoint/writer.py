"""save(): write everything that a run needs to continue; SaveDirectory: its complete saves.

Each rank of sharded tables has a directory in the checkpoint directory. A save is complete if all
ranks have it. Its manifest has the sizes and checksums of its files, and descriptions of its
objects. It is written last and checked first.
"""

from __future__ import annotations

import contextlib
import functools
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

from pinfeed.errors import ArgumentError, CheckpointError, described
from pinfeed.stores.paths import Path
from pinfeed.tensors import rng_state
from pinfeed.training.checkpoint.entries import (
    Entry,
    entry_for,
    rank_group,
    resumable_parts,
    tables_of,
)
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.rank_loop import RankGroup
from pinfeed.training.row_file import checksums, write_rows
from pinfeed.validation.arguments import check_path, whole_number

MANIFEST = "manifest.json"
FORMAT = 1
"""Format of a manifest."""

_UNFINISHED = ".writing-"
"""Beginning of the name of a save that is being written."""
_REMOVED = ".removing-"
_RANK_DIRECTORY = re.compile(r"(\d+)-of-(\d+)", re.ASCII)


def save(path: Path, *, keep: int = 1, **objects: Any) -> pathlib.Path:
    """Save everything that a run needs to continue.

    In a training step, it saves all changes of the loop so far, and the batch of the step counts as
    done. Save the loop together with its tables or stores. After ``break``, the resumed loop
    continues in the same epoch. The random generators of torch, numpy and Python are always saved.
    Rows are written in chunks, which take 16 MiB of memory. With sharded tables, all ranks call
    this at once, and each rank saves its part.

    Args:
        path: Directory, which is created if it does not exist. Only one process at a time may save
            there.
        keep: Number of complete saves to keep, including this one.
        objects: Objects by any names: tables (HostEmbedding), RowOptimizers, CombinedOptimizers,
            Feeders, the loops of ``train_rows``, Stores, and every object with ``state_dict`` and
            ``load_state_dict`` (modules, optimizers, schedulers). Also tensors, numpy arrays and
            plain values (None, bool, int, float, str, and lists and dicts of these). Tensors and
            arrays are copied first. numpy numbers, also in lists and dicts, are saved as Python
            numbers, which ``resume`` returns.

    Returns:
        The directory of this save.

    Raises:
        ArgumentError: If an object cannot be saved, or ``path`` is not a path.
        StoreError: If a table or its optimizer state is in an existing file that was not resumed.
        OSError: If the file system refuses. The previous save is not changed.
    """
    check_path(path)
    whole_number(keep, "keep")
    for value in objects.values():
        for changing in tables_of(value) or [value]:
            if hasattr(changing, "flush_writes"):
                # Writes of a running loop may be pending.
                changing.flush_writes()
    if pathlib.Path(path).exists() and not pathlib.Path(path).is_dir():
        raise ArgumentError(
            f"{os.fspath(path)!r} is a file; expected a directory, or a new name for one"
        )
    saves = SaveDirectory(pathlib.Path(path), rank_group(objects.values()))
    with saves.report_failure():
        return _save(saves, keep, objects)


def _save(saves: SaveDirectory, keep: int, objects: Mapping[str, Any]) -> pathlib.Path:
    entries = {name: entry_for(name, value) for name, value in objects.items()}
    for value in objects.values():
        for part in resumable_parts(value):
            part.require_resumed()
    root = saves.root
    root.mkdir(parents=True, exist_ok=True)
    for parent in {saves.path.parent, root.parent}:
        _sync(parent)
    saves.sweep()
    before = saves.numbers
    number, complete = saves.next_save()
    final = saves.save(number)
    unfinished = root / f"{_UNFINISHED}{os.getpid()}"
    unfinished.mkdir()
    try:
        _write_files(unfinished, entries)
        _sync(unfinished)
        unfinished.rename(final)
        _sync(root)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    # All ranks must have the new save before any of them removes an old one.
    saves.wait(RankStep.SAVE)
    kept = [*complete, number][-keep:]
    for old in sorted(set(before).difference(kept)):
        saves.remove(old)
    return final


def _write_files(directory: pathlib.Path, entries: Mapping[str, Entry]) -> None:
    """Write the files of all objects and of the random generators, then the manifest."""
    files = {"random.pt": _write_state(directory / "random.pt", rng_state.capture())}
    for entry in entries.values():
        for name, store in entry.stores.items():
            rows = functools.partial(write_rows, store)
            files[name] = _write_file(directory / name, rows)
        if entry.state is not None:
            # The state has no name here, because a name would keep it while the next one is made.
            files[entry.file] = _write_state(directory / entry.file, entry.state())
            _check_loadable(directory / entry.file)
    _write_manifest(directory, files, {name: entry.saved for name, entry in entries.items()})


def _write_state(path: pathlib.Path, state: Any) -> dict[str, Any]:
    return _write_file(path, functools.partial(torch.save, state))


def _check_loadable(path: pathlib.Path) -> None:
    """Check that ``resume`` can load a file.

    Raises:
        ArgumentError: If ``resume`` could not load it.
    """
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise ArgumentError(
            f"{path.stem}: its state_dict has a value other than tensors and plain values "
            f"({described(error)})"
        ) from error


def _write_file(path: pathlib.Path, fill: Callable[[IO[bytes]], Any]) -> dict[str, Any]:
    """Write a file, sync it to the disk, and return its size and checksums."""
    with open(path, "xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "crc32": checksums(str(path))}


def _write_manifest(
    directory: pathlib.Path, files: Mapping[str, Any], objects: Mapping[str, Any]
) -> None:
    """Write the manifest of a directory, and sync it to the disk.

    Args:
        directory: Directory of the files.
        files: Results of ``_write_file``, by file name.
        objects: Descriptions of the saved objects as plain values, by name.
    """
    text = json.dumps({"format": FORMAT, "files": files, "objects": objects}, sort_keys=True)
    outer = json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    _write_file(directory / MANIFEST, lambda file: file.write(outer.encode()))


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
            if child.name.startswith((_UNFINISHED, _REMOVED)):
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
        n_received = lockstep.agree(step, numbers=[len(numbers)])[:, 0].tolist()
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


def _sync(directory: pathlib.Path) -> None:
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
