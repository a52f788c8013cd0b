"""Functions that open, create and fill the store of an embedding table."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import ArrayStore, MmapStore, PinnedStore, Store
from pinfeed.stores.base import shape_to_make
from pinfeed.stores.file import open_created
from pinfeed.stores.pinned import Pin, check_pin
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.tensors.numpy_torch import TORCH, to_torch
from pinfeed.training.embeddings.table_arguments import Fill

Path = str | os.PathLike[str]


def open_table_store(
    store: Store | Path | None,
    name: str,
    shape: tuple[int, int],
    dtype: Any,
    pin: Pin,
    overwrite: bool,
) -> tuple[Store, bool]:
    """Open or create the store of a new table.

    Args:
        store: Path of a .npy file to create or find, a Store, or None for memory.
        name: Name of the table in errors.
        shape: Shape of the rows in the store.
        dtype: As torch or numpy spells it; None for torch's default, or for the dtype of a given
            store.
        pin: Whether memory is page-locked.
        overwrite: Whether an existing file is replaced.

    Returns:
        The store, and whether it is a file that existed before.

    Raises:
        StoreError: If the dtype is not floating point, or the given store or file has other
            properties.
        ArgumentError: If ``store`` is something else.
    """
    found = dtype_of(torch.get_default_dtype() if dtype is None else dtype, name)
    if not TORCH[found].is_floating_point:
        raise StoreError(f"{name}: dtype={dtype}; expected a floating point dtype")
    if isinstance(store, Store):
        given = (store.n_rows, *store.row_shape)
        if given != shape:
            raise StoreError(f"{name}: a store of shape {given}; expected {shape}")
        is_floating = TORCH[np.dtype(store.dtype)].is_floating_point
        if not is_floating or (dtype is not None and found != store.dtype):
            expected = dtype or "a floating point dtype"
            raise StoreError(f"{name}: a store of {store.dtype}; expected {expected}")
        return store, False
    if store is not None and not isinstance(store, (str, os.PathLike)):
        raise ArgumentError(
            f"{name}: store={type(store).__name__}; expected a path of a .npy file, "
            "or a Store; for existing rows, give store=pinfeed.ArrayStore(array), "
            "or use HostEmbedding.from_pretrained(array, freeze=False)"
        )
    shape_to_make(shape, found, name)
    if store is None:
        return PinnedStore.empty(shape, found, pin=pin), False
    if os.path.lexists(store) and not overwrite:
        return open_created(store, shape, found), True
    return MmapStore.create(store, shape, found, overwrite=overwrite), False


def open_pretrained(embeddings: Any, *, freeze: bool, pin: Pin) -> Store:
    """Open existing rows: a 2-d tensor or array, a path of a .npy file, or a Store.

    Args:
        embeddings: The rows.
        freeze: Whether to open a file only for reading.
        pin: Whether to copy the rows into page-locked memory. ``"auto"`` does not copy.
    """
    check_pin(pin)
    if pin is True:
        return PinnedStore(embeddings, pin=True)
    if isinstance(embeddings, (str, os.PathLike)):
        return MmapStore(embeddings, mode="r" if freeze else "r+")
    if isinstance(embeddings, Store):
        return embeddings
    return ArrayStore(embeddings, name="embeddings")


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
