"""resume(), exists() and check(): read and check the last complete save of a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from pinfeed.errors import CheckpointError, StoreError, described
from pinfeed.stores.paths import Path
from pinfeed.tensors import rng_state
from pinfeed.tensors.numpy_torch import to_numpy
from pinfeed.threads.pool import ThreadPool
from pinfeed.training.checkpoint.entries import (
    RETURNED_KINDS,
    Entry,
    entry_for,
    rank_group,
    resumable_parts,
    tables_of,
)
from pinfeed.training.checkpoint.writer import (
    FORMAT,
    MANIFEST,
    SaveDirectory,
    rank_directories,
    save_numbers,
)
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.row_file import check_rows_file, checksums, open_plain, restore_rows
from pinfeed.validation.arguments import check_path

T = TypeVar("T")

# Files that are read at the same time, each with a buffer of 16 MiB.
_N_THREADS = 4
# A manifest has one checksum for every 16 MiB of rows.
_MAX_BYTES = 64 << 20


def resume(path: Path, **objects: Any) -> dict[str, Any]:
    """Restore all objects from the last complete save, to continue the run from there.

    First, it reads and checks all files. It changes nothing unless all files are complete and
    undamaged. Then the objects load their states, and tables and stores load their rows. It never
    runs code from a checkpoint.
    With sharded tables, all ranks call this at once, and their number must be that of the save.

    Args:
        path: The same directory as for ``save``.
        objects: The same objects as for ``save``, under the same names, created in the same way.
            Plain values, tensors and arrays may be omitted.

    Returns:
        The saved plain values, tensors and arrays, by name. All tensors are on the CPU. Tensors and
        arrays that are passed as arguments are not changed.

    Raises:
        CheckpointError: If no save is complete, a file is damaged or missing, the save has other
            objects, or an object refuses its state.
        ArgumentError: If ``path`` is not a path, or an object is one that ``save`` refuses.
        ClosedError: If a loop over one of the tables is running.
    """
    check_path(path)
    saves = SaveDirectory(pathlib.Path(path), rank_group(objects.values()))
    with saves.report_failure():
        directory = saves.newest()
        body = _read_manifest(directory)
        saved = body["objects"]
        every = {name: entry_for(name, value) for name, value in objects.items()}
        entries = {name: entry for name, entry in every.items() if not entry.is_returned}
        _check_objects(directory, saved, entries)
        for value in objects.values():
            for table in tables_of(value):
                table.require_idle()
        _check_files(directory, body, entries)
        states = {
            name: _load(directory / entry.file)
            for name, entry in entries.items()
            if entry.state is not None
        }
        values = {
            name: _returned_value(directory, name, one)
            for name, one in saved.items()
            if one["kind"] in RETURNED_KINDS
        }
        random = _load_random(directory / "random.pt")
        saves.wait(RankStep.RESUME)
    for name, state in states.items():
        try:
            entries[name].load(state)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: {name} cannot load its state: {described(error)}"
            ) from error
    pairs = [pair for entry in entries.values() for pair in entry.stores.items()]
    _for_each(lambda pair: restore_rows(str(directory / pair[0]), pair[1]), pairs)
    for value in objects.values():
        for part in resumable_parts(value):
            part.awaits_resume = False
    rng_state.restore(random)
    return values


def exists(path: Path) -> bool:
    """Return whether ``path`` has a complete save to resume from.

    With sharded tables, all ranks must see the same directory.

    Args:
        path: The same directory as for ``save``.

    Raises:
        ArgumentError: If ``path`` is not a path.
    """
    root = pathlib.Path(check_path(path))
    if save_numbers(root):
        return True
    for directories in rank_directories(root):
        numbers = [set(save_numbers(directory)) for directory in directories]
        if set.intersection(*numbers):
            return True
    return False


def check(path: Path) -> dict[str, Any]:
    """Read the last complete save and compare it with its checksums, without loading it.

    Args:
        path: The same directory as for ``save``.

    Returns:
        Plain values: the ``directory`` of the save, its number of ``bytes``, and its ``objects``, a
        dict of names and kinds.

    Raises:
        CheckpointError: If no save is complete, or a file is damaged or missing.
        ArgumentError: If ``path`` is not a path.
    """
    directory = SaveDirectory(pathlib.Path(check_path(path))).newest()
    body = _read_manifest(directory)
    for name, file in body["files"].items():
        _check_file(directory / name, file)
    nbytes = sum(file["bytes"] for file in body["files"].values())
    kinds = {name: entry["kind"] for name, entry in body["objects"].items()}
    return {"directory": str(directory), "bytes": nbytes, "objects": kinds}


def _check_objects(
    directory: pathlib.Path, saved: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """Check that the given objects are those that were saved.

    Raises:
        CheckpointError: If they differ.
    """
    wanted = {name for name, entry in saved.items() if entry["kind"] not in RETURNED_KINDS}
    if set(entries) != wanted:
        raise CheckpointError(
            f"resume was given {', '.join(sorted(entries)) or 'nothing'}; expected the "
            f"objects in {directory}: {', '.join(sorted(wanted)) or 'nothing'}"
        )
    for name, entry in entries.items():
        if entry.saved != saved[name]:
            raise CheckpointError(
                f"{directory}: {name} is {entry.saved}; expected {saved[name]}; "
                "create it in the same way as for save"
            )


def _check_files(
    directory: pathlib.Path, body: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """Check that the manifest lists all files of the objects, and that no file is damaged.

    Raises:
        CheckpointError: If a file is missing, damaged, or of another table.
    """
    _for_each(
        lambda file: _check_file(directory / file[0], file[1], is_read_next=True),
        body["files"].items(),
    )
    needed = ["random.pt"]
    for entry in entries.values():
        needed += entry.files
    for name, saved in body["objects"].items():
        if saved["kind"] in ("tensor", "array"):
            needed.append(f"{name}.pt")
    if missing := [file for file in needed if file not in body["files"]]:
        raise CheckpointError(f"{directory / MANIFEST} is damaged: {missing[0]} is missing in it")
    for entry in entries.values():
        for name, store in entry.stores.items():
            check_rows_file(str(directory / name), store)


def _for_each(function: Callable[[T], object], items: Collection[T]) -> None:
    """Call a function for each item, in threads: some wait for the disk while others compute.

    Raises:
        Exception: If a call fails; the error of the first item is raised.
    """
    with ThreadPool(min(_N_THREADS, len(items)), "pinfeed-resume") as pool:
        for _ in pool.map(function, items):
            pass


def _load(path: pathlib.Path) -> Any:
    """Load a file of ``torch.save``, without running code from the file.

    Raises:
        CheckpointError: If it cannot be loaded.
    """
    try:
        with open_plain(path) as file:
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {described(error)}") from error


def _returned_value(directory: pathlib.Path, name: str, saved: Mapping[str, Any]) -> Any:
    """Return the value, tensor or array that was saved.

    Raises:
        CheckpointError: If its file contains something else.
    """
    if saved["kind"] == "value":
        return saved["value"]
    path = directory / f"{name}.pt"
    tensor = _load(path)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{path} is damaged: it has a {type(tensor).__name__}, expected a dense tensor"
        )
    if saved["kind"] == "tensor":
        return tensor
    try:
        return to_numpy(tensor, name)
    except StoreError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _load_random(path: pathlib.Path) -> Any:
    """Return the saved state of the random generators, after a test.

    Raises:
        CheckpointError: If the generators refuse the state.
    """
    state = _load(path)
    try:
        with rng_state.replayed(state):
            pass
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged: the random generators refuse it ({described(error)})"
        ) from error
    return state


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
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
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']}, expected {FORMAT}")
    if any(os.path.basename(name) != name or name.startswith(".") for name in body["files"]):
        raise ValueError("it names files outside its directory")
    for file in body["files"].values():
        if type(file["bytes"]) is not int or type(file["crc32"]) is not list:
            raise ValueError(f"{file} is not a size with checksums")
    for entry in body["objects"].values():
        if entry["kind"] == "value" and "value" not in entry:
            raise ValueError("a value is missing")


def _check_file(
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
