"""Save and resume, in the middle of an epoch: tables, state, positions, random generators, and whatever has a state_dict.

A checkpoint is a directory in which complete saves stand side by side, each a directory with a
number. A save is written aside, synced to the disk and then renamed, so that at any moment, in the
middle of a save too, the highest number is a complete one.

    save("run/checkpoint", users=users, optimizer=optimizer, batches=batches, model=model)
    ...                                                               # the process is killed; in the next one everything is made again:
    resume("run/checkpoint", users=users, optimizer=optimizer, batches=batches, model=model)
    for batch in batches: ...                                         # goes on with the very next batch
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, CheckpointError, StoreError, described
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import TORCH, to_numpy, to_torch
from pinfeed.training import rng_state
from pinfeed.training.checkpoint import manifest
from pinfeed.training.distributed.checkpoint import LocalSave, ShardedSave, whole_parts
from pinfeed.training.distributed.lockstep import Step
from pinfeed.training.distributed.table import ShardedEmbedding
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_file import check_rows_file, open_plain, read_rows, write_rows
from pinfeed.validation.arguments import check_path, explain_arguments, whole_number

Path = str | os.PathLike[str]

_ASIDE, _GONE = ".writing-", ".removing-"
_PLAIN = (type(None), bool, int, float, str)
_BY_NAME = "model=model, optimizer=optimizer"
_RETURNED = ("value", "tensor", "array")
"""Kinds of objects that resume returns; all others take over what was saved."""


@explain_arguments({}, _BY_NAME)
def save(path: Path, *, keep: int = 1, **objects: Any) -> pathlib.Path:
    """Save everything that a run needs to go on; returns the directory of this save.

    In the body of a loop, what the loop has done so far counts, and its batch as done; give the
    loop as well as its tables or stores. After ``break``, what was saved goes on in the epoch that
    was left. The rows are written in pieces of 16 MiB, which is the memory that this takes. The
    generators of torch, numpy and Python are saved always. Where a table is sharded, all ranks save
    at once, each its part.

    Args:
        path: A directory, made if it is not there. One process at a time saves there.
        keep: Complete saves that stay, this one included.
        objects: By any names: tables (``HostEmbedding``), ``RowOptimizer`` s, what ``train_rows``
            or ``Feeder`` returned, Stores, modules, optimizers, schedulers and everything else with
            ``state_dict`` and ``load_state_dict``; tensors and numpy arrays, each of which is
            copied first; and plain values. Numbers of numpy's, alone and in lists and dicts, are
            saved as Python's numbers, which ``resume`` returns.

    Raises:
        ArgumentError: Something that cannot be saved, or ``path`` is no path.
        StoreError: If a table or its optimizer's state is in a file that was there already, and was
            not resumed.
        OSError: What the file system says; the save before this one is as it was.
    """
    check_path(path)
    whole_number(keep, "keep")
    for value in objects.values():
        for changing in _tables(value) if isinstance(value, RowOptimizer) else [value]:
            if hasattr(changing, "land"):
                # A table, or a loop: what was written back may be under way.
                changing.land()
    if pathlib.Path(path).exists() and not pathlib.Path(path).is_dir():
        raise ArgumentError(
            f"{os.fspath(path)!r} is a file; expected a directory, or the name of one that is to be made"
        )
    place = _place(objects)
    with place.telling():
        return _save(pathlib.Path(path), place, keep, objects)


def _save(
    path: pathlib.Path, place: LocalSave, keep: int, objects: Mapping[str, Any]
) -> pathlib.Path:
    entries = {name: _entry(name, value) for name, value in objects.items()}
    for value in objects.values():
        if isinstance(value, (HostEmbedding, RowOptimizer)):
            value.require_resumed()
    root = place.part(path)
    root.mkdir(parents=True, exist_ok=True)
    for parent in {path.parent, root.parent}:
        _sync(parent)
    _sweep(root)
    numbers = _numbers(root)
    number, whole = place.known(numbers)
    aside = root / f"{_ASIDE}{os.getpid()}"
    aside.mkdir()
    try:
        files = {
            "random.pt": manifest.write_file(
                aside / "random.pt", functools.partial(torch.save, rng_state.capture())
            )
        }
        for entry in entries.values():
            for store_name, store in entry.stores.items():
                files[store_name] = manifest.write_file(
                    aside / store_name, functools.partial(write_rows, store)
                )
            if entry.state is not None:
                files[entry.file] = manifest.write_file(
                    aside / entry.file, functools.partial(torch.save, entry.state())
                )
                _check_loadable(aside / entry.file)
        manifest.write(aside, files, {name: entry.saved for name, entry in entries.items()})
        _sync(aside)
        final = root / f"{number:08d}"
        aside.rename(final)
        _sync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    # What goes now, nobody needs any more.
    place.wait(Step.SAVE)
    for old in sorted(set(numbers).difference([*whole, number][-keep:])):
        _remove(root / f"{old:08d}")
    return final


@explain_arguments({}, _BY_NAME)
def resume(path: Path, **objects: Any) -> dict[str, Any]:
    """Let everything go on from the last complete save; returns the plain values, tensors and arrays that were saved, by name.

    A tensor is returned on the CPU, wherever it was. No tensor or array that is given is changed.

    All files are read and checked first; nothing is changed unless all of them are good. Then
    objects take over their states, and last of all tables and stores their rows. No code of a
    checkpoint is ever run. Where a table is sharded, all ranks resume at once, and as many as
    saved.

    Args:
        path: As given to ``save``.
        objects: As given to ``save``, by the same names, made as they were made then; plain values,
            tensors and arrays may be left out.

    Raises:
        CheckpointError: There is none, a file is damaged or missing, or it is of other objects; or
            an object refuses its state.
        ArgumentError: If ``path`` is no path, or an object is one that ``save`` refuses.
        ClosedError: A loop over one of the tables runs.
    """
    check_path(path)
    place = _place(objects)
    with place.telling():
        directory, body, entries = _checked(pathlib.Path(path), place, objects)
        states = {
            name: _load(directory / entry.file)
            for name, entry in entries.items()
            if entry.state is not None
        }
        values = {
            name: _value(directory, name, saved)
            for name, saved in body["objects"].items()
            if saved["kind"] in _RETURNED
        }
        random = _load_random(directory / "random.pt")
        place.wait(Step.RESUME)
    for name, state in states.items():
        try:
            entries[name].load(state)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: {name} does not take over its state: {described(error)}"
            ) from error
    for entry in entries.values():
        for store_name, store in entry.stores.items():
            read_rows(str(directory / store_name), store)
    for value in objects.values():
        if isinstance(value, (HostEmbedding, RowOptimizer)):
            value.awaits_resume = False
    rng_state.restore(random)
    return values


def _checked(
    path: pathlib.Path, place: LocalSave, objects: Mapping[str, Any]
) -> tuple[pathlib.Path, dict[str, Any], dict[str, _Entry]]:
    """The directory of the last complete save, its manifest, and how what is resumed was saved there; all of it is good."""
    directory = _newest(path, place)
    body = manifest.read(directory)
    saved = body["objects"]
    given = {name: _entry(name, value) for name, value in objects.items()}
    entries = {name: entry for name, entry in given.items() if entry.saved["kind"] not in _RETURNED}
    wanted = {name for name, entry in saved.items() if entry["kind"] not in _RETURNED}
    if set(entries) != wanted:
        raise CheckpointError(
            f"{directory} has {', '.join(sorted(wanted)) or 'nothing'}; resume was given {', '.join(sorted(entries)) or 'nothing'}"
        )
    for name, entry in entries.items():
        if entry.saved != saved[name]:
            raise CheckpointError(
                f"{directory}: {name} was {saved[name]}, is {entry.saved}; make it as it was made then"
            )
    for table in (table for value in objects.values() for table in _tables(value)):
        table.require_idle()
    for name, file in body["files"].items():
        manifest.check_file(directory / name, file)
    returned = (
        f"{name}.pt" for name, entry in saved.items() if entry["kind"] in ("tensor", "array")
    )
    needed = ["random.pt", *(file for entry in entries.values() for file in entry.files), *returned]
    if missing := [file for file in needed if file not in body["files"]]:
        raise CheckpointError(f"{directory / manifest.NAME} is damaged: {missing[0]} is not in it")
    for entry in entries.values():
        for store_name, store in entry.stores.items():
            check_rows_file(str(directory / store_name), store)
    return directory, body, entries


def exists(path: Path) -> bool:
    """Whether there is a complete save to resume from; of sharded tables, in a directory that all ranks see.

    Raises:
        ArgumentError: If ``path`` is no path.
    """
    root = pathlib.Path(check_path(path))
    return bool(_numbers(root)) or any(
        set.intersection(*(set(_numbers(part)) for part in parts)) for parts in whole_parts(root)
    )


def check(path: Path) -> dict[str, Any]:
    """Compare the last complete save with its checksums, reading all of it and loading nothing.

    Returns:
        As plain values: its ``directory``, its number of ``bytes``, and the ``objects`` in it: name
        and kind.

    Raises:
        CheckpointError: There is none, or a file is damaged or missing.
        ArgumentError: If ``path`` is no path.
    """
    directory = _newest(pathlib.Path(check_path(path)), LocalSave())
    body = manifest.read(directory)
    for name, file in body["files"].items():
        manifest.check_file(directory / name, file)
    nbytes = sum(file["bytes"] for file in body["files"].values())
    kinds = {name: entry["kind"] for name, entry in body["objects"].items()}
    return {"directory": str(directory), "bytes": nbytes, "objects": kinds}


class _Entry:
    """How one object is saved: its kind, as plain values, the stores whose rows are its, and its state."""

    def __init__(
        self,
        name: str,
        kind: str,
        stores: Mapping[str, Store],
        target: Any = None,
        state: Callable[[], Any] | None = None,
        **more: Any,
    ) -> None:
        self.saved = {"kind": kind, "stores": list(stores), **more}
        self.stores = stores
        self.file = f"{name}.pt"
        self._target = target
        self.state = state if target is None else target.state_dict

    @property
    def files(self) -> list[str]:
        """Names of its files."""
        return [*self.stores, *([self.file] if self.state is not None else [])]

    def load(self, state: Any) -> None:
        self._target.load_state_dict(state)


def _entry(name: str, value: Any) -> _Entry:
    """How to save or resume an object.

    Raises:
        ArgumentError: It cannot be.
    """
    if not name.isidentifier() or name == "random":
        raise ArgumentError(
            f"an object named {name!r}; expected a name that a variable may have, and not 'random'"
        )
    if isinstance(value, type):
        raise ArgumentError(
            f"{name}: {value.__name__} is a class; expected an object of it; give {name}={value.__name__}(...)"
        )
    if isinstance(value, HostEmbedding):
        return _Entry(name, "table", {f"{name}.npy": _writable(name, value.store)})
    if isinstance(value, RowOptimizer):
        stores = {
            f"{name}.{i}.{row.key}.npy": store
            for i, state in enumerate(value.tables.values())
            for row, store in zip(state.layout.rows, state.stores, strict=True)
        }
        return _Entry(name, "row optimizer", stores, value, optimizer=type(value.inner).__name__)
    if isinstance(value, Store):
        return _Entry(name, "store", {f"{name}.npy": _writable(name, value)})
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return _Entry(name, "state", {}, value)
    if _is_plain(plain := _without_numpy(value)):
        return _Entry(name, "value", {}, value=plain)
    if (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
    ):
        # Of a view, torch would save all of the memory that it is a part of.
        return _Entry(
            name,
            "tensor",
            {},
            state=lambda: value.detach().cpu().clone(memory_format=torch.contiguous_format),
        )
    if type(value) is np.ndarray and value.dtype in TORCH and value.dtype.isnative:
        return _Entry(name, "array", {}, state=lambda: to_torch(np.array(value, order="C")))
    if isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values()):
        raise ArgumentError(
            f"{name}: a {type(value).__name__} of tensors cannot be saved; expected the object that it is the state of; give {name}=model, "
            "whose state_dict is saved, and loaded by resume; or give each tensor by a name of its own"
        )
    raise ArgumentError(
        f"{name}: a {type(value).__name__} cannot be saved; expected tables, Stores, objects with state_dict and load_state_dict, dense "
        "tensors and arrays of numbers (each by a name of its own), or plain values: None, bool, int, float, str, and lists and dicts "
        "(with keys that are str) of these"
    )


def _without_numpy(value: Any) -> Any:
    """A value with Python's numbers in place of numpy's, in lists and dicts too; numbers that Python does not have stay as they are."""
    if isinstance(value, dict):
        return {key: _without_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_numpy(inner) for inner in value]
    number = value.item() if isinstance(value, np.generic) else None
    return (
        number
        if isinstance(number, (bool, int, float)) and not isinstance(value, np.timedelta64)
        else value
    )


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)


def _writable(name: str, store: Store) -> Store:
    if not store.writable:
        raise ArgumentError(
            f"{name} is in a read-only store, whose rows do not change; leave it out"
        )
    return store


def _place(objects: Mapping[str, Any]) -> LocalSave:
    """Where to save, and who else does."""
    every = [table for value in objects.values() for table in _tables(value)]
    peers = {table.peers for table in every if isinstance(table, ShardedEmbedding)}
    if len(peers) > 1:
        raise ArgumentError(
            f"tables of {len(peers)} process groups; expected those of one in a checkpoint"
        )
    return ShardedSave(peers.pop()) if peers else LocalSave()


def _tables(value: Any) -> list[HostEmbedding]:
    """The tables whose rows an object has."""
    return (
        [value]
        if isinstance(value, HostEmbedding)
        else list(value.tables)
        if isinstance(value, RowOptimizer)
        else []
    )


def _check_loadable(path: pathlib.Path) -> None:
    """Raise now what would be raised when the run is to go on."""
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise ArgumentError(
            f"{path.stem}: its state_dict has something besides tensors and plain values ({described(error)})"
        ) from error


def _load(path: pathlib.Path) -> Any:
    try:
        with open_plain(path) as file:
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {described(error)}") from error


def _value(directory: pathlib.Path, name: str, saved: Mapping[str, Any]) -> Any:
    """Return the value, tensor or array that was saved."""
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
    """The state of the generators, tried."""
    state = _load(path)
    try:
        with rng_state.replayed(state):
            pass
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged: no generators go on from it ({described(error)})"
        ) from error
    return state


def _numbers(root: pathlib.Path) -> list[int]:
    """Numbers of the complete saves, ascending.

    What is no directory, or a link to one, is none of them.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        names = [child.name for child in found if child.is_dir(follow_symlinks=False)]
        return sorted(
            int(name) for name in names if name.isascii() and name.isdigit() and len(name) == 8
        )
    return []


def _newest(path: pathlib.Path, place: LocalSave) -> pathlib.Path:
    """The directory of the last complete save.

    Raises:
        CheckpointError: There is none.
    """
    root = place.part(path)
    if (path / manifest.NAME).is_file():
        raise CheckpointError(
            f"{path} is one save; expected the directory that checkpoint.save was given; give {str(path.parent)!r}"
        )
    return root / f"{place.newest(path, _numbers(root)):08d}"


def _sweep(root: pathlib.Path) -> None:
    """Remove what killed saves have left behind."""
    for child in root.iterdir():
        if child.name.startswith((_ASIDE, _GONE)):
            shutil.rmtree(child, ignore_errors=True)


def _remove(directory: pathlib.Path) -> None:
    """Remove a save; at no moment is there one with its number that is not whole."""
    gone = directory.with_name(f"{_GONE}{directory.name}")
    directory.rename(gone)
    shutil.rmtree(gone)


def _sync(directory: pathlib.Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
