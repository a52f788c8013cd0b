"""Functions that open, create, fill and export the store of an embedding table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import ArrayStore, MmapStore, PinnedStore, Store
from pinfeed.stores.file import open_created
from pinfeed.stores.pinned import Pin, check_pin
from pinfeed.stores.store import shape_to_make
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.tensors.numpy_torch import TORCH, to_torch
from pinfeed.training.atomic_write import atomic_write
from pinfeed.training.embeddings.initializers import Fill

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class NewTable:
    """Requested properties of a new table."""

    name: str
    shape: tuple[int, int]
    dtype: Any
    """As torch or numpy spells it; None for torch's default, or for the dtype of a given store."""
    pin: Pin
    overwrite: bool


@dataclass(frozen=True)
class TableStore:
    """The store of a table, and its owner."""

    store: Store
    is_owned: bool
    """Whether the table made the store, and therefore closes it."""
    awaits_resume: bool = False
    """Whether the store is a file that existed before the table."""


def open_table_store(store: Store | Path | None, table: NewTable) -> TableStore:
    """Open or create the store of a new table.

    Args:
        store: Path of a .npy file to create or find, a Store, or None for memory.
        table: Properties of the table.

    Raises:
        StoreError: If the dtype is not floating point, or the given store or file has other
            properties.
        ArgumentError: If ``store`` is something else.
    """
    default = torch.get_default_dtype() if table.dtype is None else table.dtype
    dtype = dtype_of(default, table.name)
    if not TORCH[dtype].is_floating_point:
        raise StoreError(f"{table.name}: dtype={table.dtype}; expected a floating point dtype")
    if isinstance(store, Store):
        _check_given_store(store, table, dtype)
        return TableStore(store, is_owned=False)
    if store is not None and not isinstance(store, (str, os.PathLike)):
        raise ArgumentError(
            f"{table.name}: store={type(store).__name__}; expected a path of a .npy file, "
            "or a Store; for existing rows, give store=pinfeed.ArrayStore(array), "
            "or use HostEmbedding.from_pretrained(array, freeze=False)"
        )
    shape_to_make(table.shape, dtype, table.name)
    if store is None:
        return TableStore(PinnedStore.empty(table.shape, dtype, pin=table.pin), is_owned=True)
    if os.path.lexists(store) and not table.overwrite:
        return TableStore(
            open_created(store, table.shape, dtype), is_owned=True, awaits_resume=True
        )
    made = MmapStore.create(store, table.shape, dtype, overwrite=table.overwrite)
    return TableStore(made, is_owned=True)


def _check_given_store(store: Store, table: NewTable, dtype: np.dtype[Any]) -> None:
    shape = (store.n_rows, *store.row_shape)
    if shape != table.shape:
        raise StoreError(f"{table.name}: a store of shape {shape}; expected {table.shape}")
    is_floating = TORCH[np.dtype(store.dtype)].is_floating_point
    if not is_floating or (table.dtype is not None and dtype != store.dtype):
        expected = table.dtype or "a floating point dtype"
        raise StoreError(f"{table.name}: a store of {store.dtype}; expected {expected}")


def open_pretrained(embeddings: Any, *, freeze: bool, pin: Pin) -> TableStore:
    """Open existing rows: a 2-d tensor or array, a path of a .npy file, or a Store.

    Args:
        embeddings: The rows.
        freeze: Whether to open a file only for reading.
        pin: Whether to copy the rows into page-locked memory. ``"auto"`` does not copy.
    """
    check_pin(pin)
    if pin is True:
        return TableStore(PinnedStore(embeddings, pin=True), is_owned=True)
    if isinstance(embeddings, (str, os.PathLike)):
        return TableStore(MmapStore(embeddings, mode="r" if freeze else "r+"), is_owned=True)
    if isinstance(embeddings, Store):
        return TableStore(embeddings, is_owned=False)
    return TableStore(ArrayStore(embeddings, name="embeddings"), is_owned=False)


def check_is_table(store: Store) -> None:
    """Check that a store has rows of one dimension.

    Raises:
        StoreError: If its rows have another number of dimensions.
    """
    if len(store.row_shape) != 1:
        shape = (store.n_rows, *store.row_shape)
        raise StoreError(f"embeddings of shape {shape}; expected (num_embeddings, embedding_dim)")


def fill_store(store: Store, fill: Fill, name: str) -> None:
    """Fill a whole store in one call, because initializers depend on the shape of the table.

    Args:
        store: Store in memory or in one file.
        fill: Function that fills a tensor in place.
        name: Name of the table in errors.

    Raises:
        StoreError: If the store is read-only, or its rows are not one array.
    """
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if isinstance(store, ArrayStore) and store.writable:
            array = store.array
        elif isinstance(store, MmapStore) and store.writable:
            array = stack.enter_context(store.mapped())
        else:
            raise StoreError(
                f"{name}: init cannot fill {'a' if store.writable else 'a read-only'} "
                f"{type(store).__name__} as one array; fill the store first, and leave init out"
            )
        fill(to_torch(array))


def zero_row(store: Store, row: int) -> None:
    """Set one row of a store to zeros."""
    store.scatter(np.array([row]), np.zeros((1, *store.row_shape), store.dtype))


def export_file(
    path: Path, own_files: Iterable[Path], write: Callable[[IO[bytes]], None], name: str
) -> None:
    """Write a table to a file, atomically.

    Args:
        path: The file.
        own_files: Files of the table's own store.
        write: Function that writes the table to an open file.
        name: Name of the table in errors.

    Raises:
        StoreError: If ``path`` is one of the table's own files.
        OSError: If the file system refuses.
    """
    if os.path.exists(path) and any(os.path.samefile(path, own) for own in own_files):
        raise StoreError(
            f"export to {os.fspath(path)!r}, which is the file of {name} and already has its "
            "rows; expected another path"
        )
    with atomic_write(path) as file:
        write(file)
