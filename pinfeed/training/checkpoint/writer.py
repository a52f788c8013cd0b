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
from pinfeed.training.checkpoint import manifest
from pinfeed.training.checkpoint.entries import (
    Entry,
    entry_for,
    resumable_parts,
    save_location,
    tables_of,
)
from pinfeed.training.checkpoint.saves import (
    UNFINISHED,
    remove,
    save_name,
    save_numbers,
    sweep,
    sync,
)
from pinfeed.training.distributed.checkpoint import LocalSave
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.row_file import write_rows
from pinfeed.validation.arguments import check_path, explain_arguments, whole_number

Path = str | os.PathLike[str]

OBJECTS_BY_NAME = "model=model, optimizer=optimizer"
"""Example of named objects, for errors."""


@explain_arguments({}, OBJECTS_BY_NAME)
def save(path: Path, *, keep: int = 1, **objects: Any) -> pathlib.Path:
    """Save everything that a run needs to continue.

    In a training step, the changes of the loop so far are saved, and its batch counts as done. Give
    the loop as well as its tables or stores. After ``break``, the resumed loop continues in the
    epoch that was left. Rows are written in chunks of 16 MiB, which is the memory that this takes.
    The generators of torch, numpy and Python are always saved. If a table is sharded, all ranks
    save at once, each its part.

    Args:
        path: Directory, which is made if it does not exist. One process at a time saves there.
        keep: Number of complete saves that are kept, this one included.
        objects: Objects by any names: tables (``HostEmbedding``), ``RowOptimizer`` s and
            ``CombinedOptimizer`` s, results of ``train_rows`` and ``Feeder``, Stores, modules,
            optimizers, schedulers and everything else with ``state_dict`` and
            ``load_state_dict``; tensors and numpy arrays, each of which is copied first; and plain
            values. numpy's numbers, alone and in lists and dicts, are saved as Python's numbers,
            which ``resume`` returns.

    Returns:
        The directory of this save.

    Raises:
        ArgumentError: If an object cannot be saved, or ``path`` is not a path.
        StoreError: If a table or its optimizer's state is in an existing file and was not resumed.
        OSError: If the file system refuses; the save before this one is then as it was.
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
            f"{os.fspath(path)!r} is a file; "
            "expected a directory, or the name of one that is to be made"
        )
    location = save_location(objects.values())
    with location.report_failure():
        return _save(pathlib.Path(path), location, keep, objects)


def _save(
    path: pathlib.Path, location: LocalSave, keep: int, objects: Mapping[str, Any]
) -> pathlib.Path:
    entries = {name: entry_for(name, value) for name, value in objects.items()}
    for value in objects.values():
        for part in resumable_parts(value):
            part.require_resumed()
    root = location.directory(path)
    root.mkdir(parents=True, exist_ok=True)
    for parent in {path.parent, root.parent}:
        sync(parent)
    sweep(root)
    numbers = save_numbers(root)
    number, complete = location.next_save(numbers)
    final = root / save_name(number)
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
    location.wait(RankStep.SAVE)
    kept = [*complete, number][-keep:]
    for old in sorted(set(numbers).difference(kept)):
        remove(root / save_name(old))
    return final


def _write_files(directory: pathlib.Path, entries: Mapping[str, Entry]) -> None:
    """Write the files of all objects and of the random generators, then the manifest."""
    files = {"random.pt": _write_state(directory / "random.pt", rng_state.capture())}
    for entry in entries.values():
        for name, store in entry.stores.items():
            rows = functools.partial(write_rows, store)
            files[name] = manifest.write_file(directory / name, rows)
        if entry.state is not None:
            # Passed on without a name, because the next state is made while names here live.
            files[entry.file] = _write_state(directory / entry.file, entry.state())
            _check_loadable(directory / entry.file)
    manifest.write(directory, files, {name: entry.saved for name, entry in entries.items()})


def _write_state(path: pathlib.Path, state: Any) -> dict[str, Any]:
    return manifest.write_file(path, functools.partial(torch.save, state))


def _check_loadable(path: pathlib.Path) -> None:
    """Check that ``resume`` can load a file.

    Raises:
        ArgumentError: If it cannot.
    """
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise ArgumentError(
            f"{path.stem}: its state_dict has something besides tensors and plain values "
            f"({described(error)})"
        ) from error
