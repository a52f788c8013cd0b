"""save(): write everything that a run needs to continue."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from pinfeed.errors import ArgumentError, described
from pinfeed.tensors import rng_state
from pinfeed.training.checkpoint.entries import (
    Entry,
    entry_for,
    rank_group,
    resumable_parts,
    tables_of,
)
from pinfeed.training.checkpoint.saves import (
    UNFINISHED,
    SaveDirectory,
    sync,
    write_file,
    write_manifest,
)
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.row_file import write_rows
from pinfeed.validation.arguments import check_path, whole_number

Path = str | os.PathLike[str]


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
        sync(parent)
    saves.sweep()
    before = saves.numbers
    number, complete = saves.next_save()
    final = saves.save(number)
    unfinished = root / f"{UNFINISHED}{os.getpid()}"
    unfinished.mkdir()
    try:
        _write_files(unfinished, entries)
        sync(unfinished)
        unfinished.rename(final)
        sync(root)
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
            files[name] = write_file(directory / name, rows)
        if entry.state is not None:
            # The state has no name here, because a name would keep it while the next one is made.
            files[entry.file] = _write_state(directory / entry.file, entry.state())
            _check_loadable(directory / entry.file)
    write_manifest(directory, files, {name: entry.saved for name, entry in entries.items()})


def _write_state(path: pathlib.Path, state: Any) -> dict[str, Any]:
    return write_file(path, functools.partial(torch.save, state))


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
