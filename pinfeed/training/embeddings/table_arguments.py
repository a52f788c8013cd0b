"""The arguments of embedding tables: checks, advice, initializers, and the stores of the rows."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, RowIndexError, StoreError, described
from pinfeed.memory.units import parse_size
from pinfeed.stores import ArrayStore, NpyStore, PinnedStore, Store
from pinfeed.stores.npy_store import open_created
from pinfeed.stores.pinned import Pin, check_pin
from pinfeed.stores.store import shape_to_make
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.tensors.numpy_torch import TORCH, to_torch
from pinfeed.validation.arguments import whole_number
from pinfeed.validation.suggestions import of_ids

HINTS = {
    "sparse": (
        "pinfeed always moves and trains only the rows of a batch; leave it out, and train the "
        "table with pinfeed.RowOptimizer; if the optimizer needs sparse gradients, use "
        'RowOptimizer(..., gradients="sparse")'
    ),
    "device": (
        "the table stays in host memory or in a file; the device of the loop is "
        "train_rows(..., device=...)"
    ),
    "weight _weight": "give the rows to HostEmbedding.from_pretrained(rows, freeze=False)",
    "freeze _freeze": "give it to HostEmbedding.from_pretrained(rows, freeze=...), or call "
    "requires_grad_(False)",
    "mode": "for bags of rows, use HostEmbeddingBag(num_embeddings, embedding_dim, mode=...)",
    "path filename": "give the file of the rows as store=",
    "cache cache_size cache_ratio cache_load_factor gpu_cache": "give the size of a cache on the "
    "device as device_cache=",
}
"""Advice for arguments of torch or other libraries that HostEmbedding does not have."""


def integer_tensor(values: Any, name: str) -> torch.Tensor:
    """Return integers as a tensor. A tensor is returned unchanged.

    Args:
        values: A tensor, an array or a list.
        name: Name of the values in errors.

    Raises:
        RowIndexError: If the values are not integers, or are lists of different lengths.
    """
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise RowIndexError(
            f"{name}: {described(error)}; expected integers in a tensor, an array or a list"
        ) from None
    # numpy makes an array of floats from an empty list.
    if array.size and array.dtype.kind not in "iu":
        raise RowIndexError(
            f"{name}: a {type(values).__name__} of {array.dtype}; expected integers in a tensor, "
            f"an array or a list{of_ids(array.dtype)}"
        )
    return torch.from_numpy(array.astype(np.int64))


def checked_padding(padding: int | None, n_rows: int) -> int | None:
    """Return the index of the padding row, at least 0. A negative index counts from the end."""
    if padding is None:
        return None
    note = f" (a row of {n_rows:,})"
    return whole_number(padding, "padding_idx", least=-n_rows, most=n_rows - 1, note=note) % n_rows


DeviceCacheSize = int | float | str
"""Bytes as an int or as text such as ``"4GiB"``, a share of the rows as a float, or ``"auto"``.

``"auto"`` fits the memory limits.
"""


def check_device_cache(size: Any) -> int | float | Literal["auto"] | None:
    """Return the size of a cache as an int, a float or ``"auto"``, or None for no cache.

    Raises:
        ArgumentError: If it is something else, is not above 0, or is a share above 1.
    """
    if size is None:
        return None
    if isinstance(size, str) and size == "auto":
        return "auto"
    is_share = isinstance(size, numbers.Real) and not isinstance(size, numbers.Integral)
    if is_share and 0 < float(size) <= 1:
        return float(size)
    note = ", or a share of the rows as a float above 0 and up to 1.0 (0.1), 'auto' or None"
    return parse_size(size, "device_cache", note=note)


Init = str | Callable[[torch.Tensor], Any]
Fill = Callable[[torch.Tensor], Any]
"""Function that fills a tensor in place."""


def find_initializer(init: Init | None) -> Fill:
    """Return the function that fills a table.

    Args:
        init: Name of a function of ``torch.nn.init``, with or without the final underscore, or a
            user's function. None is ``"normal"``.

    Raises:
        ArgumentError: If no function has this name, or it needs arguments other than a tensor.
    """
    if callable(init):
        return functools.partial(_fill_in_place, init)
    name = "normal" if init is None else str(init).removesuffix("_")
    names = [
        key[:-1]
        for key, value in vars(nn.init).items()
        if key.endswith("_") and not key.startswith("_") and _needs_only_a_tensor(value)
    ]
    if name not in names:
        raise ArgumentError(
            f"init={init!r} is not a function of torch.nn.init with a tensor as its only argument; "
            f"expected one of {', '.join(sorted(names))}, "
            "or a function that fills a tensor (functools.partial(nn.init.constant_, val=0.5))"
        )
    found: Fill = getattr(nn.init, f"{name}_")
    return found


def _fill_in_place(init: Fill, tensor: torch.Tensor) -> None:
    """Call a user's function to fill a tensor.

    Raises:
        ArgumentError: If the function returns a tensor with other memory, which would be lost.
    """
    returned = init(tensor)
    if not isinstance(returned, torch.Tensor):
        return
    if returned.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        raise ArgumentError(
            f"init={init!r} returned a new tensor; expected a function that fills the given tensor "
            "in place; give lambda tensor: tensor.copy_(values), or use "
            "HostEmbedding.from_pretrained(values, freeze=False)"
        )


def _needs_only_a_tensor(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with a tensor as its only argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


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
    return NpyStore.create(store, shape, found, overwrite=overwrite), False


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
        return NpyStore(embeddings, mode="r" if freeze else "r+")
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
        elif isinstance(store, NpyStore) and store.can_be_one_array:
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
