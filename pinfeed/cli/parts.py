"""Part: one source in a file, such as ``x.h5:images``, described by the metadata of the file."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pinfeed.cli.kinds import kind_of, split_name
from pinfeed.errors import StoreError
from pinfeed.stores.hdf5 import HDF5Store, hdf5_group
from pinfeed.stores.layouts import list_tensors
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.parquet import ParquetStore
from pinfeed.stores.parquet_columns import OneColumn
from pinfeed.stores.parquet_shards import open_shards, pyarrow_errors
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.remote import RemoteStore
from pinfeed.stores.sparse import SparseStore
from pinfeed.stores.sparse_sources import is_matrix
from pinfeed.stores.zarr import ZarrStore, zarr_group


@dataclass(frozen=True)
class Part:
    """One source in a file, or something that cannot be one.

    Attributes:
        path: Path of the file, a pattern, or the paths of shards.
        kind: ``npy``, ``safetensors``, ``hdf5``, ``zarr``, ``parquet``, ``sparse`` or ``remote``.
        name: Name in the file; empty if the file has one source.
        shape: Shape, whose first axis is the rows.
        dtype: Dtype as in the file.
        nbytes: Size of the decoded values, in bytes.
        stored: Layout in the file, such as chunks; empty for plain values.
        problem: The reason why it cannot be a source, and what to do; empty if it can.
    """

    path: str | list[str]
    kind: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    nbytes: int = 0
    stored: str = ""
    problem: str = ""

    def __str__(self) -> str:
        path = self.path
        if not isinstance(path, str):
            path = f"{path[0]} and {len(path) - 1} more" if len(path) > 1 else path[0]
        return f"{path}:{self.name}" if self.name else path

    @property
    def values(self) -> dict[str, Any]:
        """The part for scripts."""
        return {"source": str(self), **asdict(self)}

    def open(self) -> Any:
        """Open its store, which the caller closes."""
        path: Any = self.path
        if self.kind == "parquet" and "," in self.name:
            return ParquetStore(path, columns=self.name.split(","))
        store: Any = {
            "npy": NpyStore,
            "remote": RemoteStore,
            "safetensors": NpyStore.safetensors,
            "hdf5": HDF5Store,
            "zarr": ZarrStore,
            "sparse": SparseStore,
            "parquet": ParquetStore,
        }[self.kind]
        return store(path, self.name) if self.name else store(path)


def source_of(files: Sequence[str]) -> Part:
    """Return the one source that files of the command line name.

    Raises:
        PinfeedError: If a file cannot be read, or has no source or several.
    """
    if has_protocol(files[0]):
        return _described(Part(list(files), "remote"))
    if len(files) > 1:
        return _described(Part(list(files), "npy"))
    path, name = split_name(files[0])
    if kind_of(path) == "folder":
        raise StoreError(
            f"{path} is a folder; expected one of its files, or a quoted pattern of shards such "
            f"as {os.path.join(path, '*.npy')}; pinfeed inspect {path} lists the sources in it"
        )
    found = parts_of(path, name)
    sources = [part for part in found if not part.problem]
    if len(sources) == 1:
        return sources[0]
    if not sources:
        raise StoreError(found[0].problem)
    raise StoreError(
        f"{files[0]} has {len(sources)} sources; expected the name of one, such as {sources[0]}; "
        f"pinfeed inspect {files[0]} lists them"
    )


def parts_of(path: str, name: str | None = None) -> list[Part]:
    """List the parts of a file, or those at one name of it.

    Args:
        path: A file, a Zarr or Parquet folder, or a pattern.
        name: Name of a dataset, group, tensor or column, or columns with commas; None for all.

    Raises:
        PinfeedError: If the file or the name does not exist, or the file is damaged.
    """
    kind = kind_of(path)
    if kind in ("npy", "folder") and name is not None:
        raise _missing(path, name)
    if kind == "npy":
        return [_described(Part(path, kind))]
    if kind == "safetensors":
        found = _tensors(path, name)
    elif kind == "parquet":
        found = _columns(path, name)
    else:
        found = _arrays(path, kind, name)
    if not found:
        where = path if name is None else f"{path}:{name}"
        raise StoreError(f"{where} has nothing that could be a source; expected at least one array")
    return found


def _described(part: Part) -> Part:
    """Add the shape and the dtype of a part with a store of its own."""
    with contextlib.closing(part.open()) as store:
        shape = (store.n_rows, *store.row_shape)
        return Part(part.path, part.kind, part.name, shape, str(store.dtype), store.nbytes)


def _missing(path: str, name: str) -> StoreError:
    return StoreError(
        f"{path} has nothing of the name {name!r}; expected one of the names that pinfeed inspect "
        f"{path} lists"
    )


def _tensors(path: str, name: str | None) -> list[Part]:
    tensors = list_tensors(path)
    if name is not None and name not in tensors:
        raise _missing(path, name)
    found = []
    for one in tensors if name is None else (name,):
        shape, code, dtype = tensors[one]
        nbytes = math.prod(shape) * (dtype.itemsize if dtype else 0)
        problem = "" if shape else "a single number; expected an axis of rows"
        if dtype is None:
            problem = f"dtype {code}, which numpy and torch do not both have"
        problem = problem and f"{path}:{one} has {problem}"
        found.append(Part(path, "safetensors", one, shape, str(dtype or code), nbytes, "", problem))
    return found


def _columns(path: str, name: str | None) -> list[Part]:
    if name is not None and "," in name:
        return [_described(Part(path, "parquet", name))]
    shards = open_shards(path)
    n_rows = sum(sum(shard.groups.values()) for shard in shards)
    found = []
    with pyarrow_errors(path):
        schema = shards[0].schema
        for column in schema.names if name is None else [name]:
            try:
                # The metadata does not contain the shape of lists, so this reads one row.
                one = OneColumn.of(shards, column)
            except StoreError as error:
                kind = str(schema.field(column).type) if column in schema.names else ""
                found.append(Part(path, "parquet", column, (n_rows,), kind, 0, "", str(error)))
                continue
            shape = (n_rows, *one.row_shape)
            nbytes = math.prod(shape) * one.dtype.itemsize
            found.append(Part(path, "parquet", column, shape, str(one.dtype), nbytes))
    return found


def _arrays(path: str, kind: str, name: str | None) -> list[Part]:
    """List the arrays and sparse matrices of an HDF5 or Zarr file."""
    opened: Any = (hdf5_group if kind == "hdf5" else zarr_group)(path)
    found: list[Part] = []
    with opened as (parent, _):
        item = parent
        # A Zarr array has nothing inside.
        if name is not None:
            item = parent.get(name) if hasattr(parent, "get") else None
        if item is None:
            raise _missing(path, str(name))
        matrices: tuple[str, ...] = ()
        for inner, one in (("", item), *_inside(item)):
            place = "/".join(filter(None, (name, inner)))
            if matrices and place.startswith(matrices):
                continue
            if hasattr(one, "shape"):
                found.append(_array(path, kind, place, one))
            elif is_matrix(one.attrs):
                found.append(_matrix(path, place, one))
                matrices += (f"{place}/" if place else "",)
    return found


def _inside(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and objects in a group of h5py or zarr, and in its groups."""
    if hasattr(group, "visititems"):
        # This visits an object with several names only once, so cycles are no problem.
        items: list[tuple[str, Any]] = []
        group.visititems(lambda name, item: items.append((name, item)))
        yield from items
    elif hasattr(group, "members"):
        with warnings.catch_warnings():
            # zarr warns of files that are not a part of the group.
            warnings.simplefilter("ignore")
            yield from sorted(group.members(max_depth=None))


def _array(path: str, kind: str, name: str, array: Any) -> Part:
    """Describe a dataset of h5py or an array of zarr."""
    dtype = np.dtype(array.dtype)
    shape = tuple(array.shape or ())
    chunks = getattr(array, "shards", None) or array.chunks
    problem = ""
    try:
        (HDF5Store if kind == "hdf5" else ZarrStore)(array).close()
    except StoreError as error:
        problem = str(error)
    nbytes = math.prod(shape) * dtype.itemsize
    stored = f"chunks {tuple(chunks)}" if chunks else ""
    return Part(path, kind, name, shape, str(dtype), nbytes, stored, problem)


def _matrix(path: str, name: str, group: Any) -> Part:
    """Describe a sparse matrix as AnnData writes it."""
    try:
        with contextlib.closing(SparseStore(group)) as store:
            shape = (store.n_rows, store.n_columns)
            nbytes = round(store.n_rows * store.mean_row_nbytes)
            stored = f"sparse, {store.row_lengths.mean:,.1f} elements per row"
            dtype = str(store.parts[0].dtype)
            return Part(path, "sparse", name, shape, dtype, nbytes, stored)
    except StoreError as error:
        return Part(path, "sparse", name, problem=str(error))
