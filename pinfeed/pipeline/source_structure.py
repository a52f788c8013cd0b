"""Structure of a user's source: which of its objects are stores, and which lists are mistakes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores import Store
from pinfeed.stores.opened import is_zarr_group, stores_of_columns
from pinfeed.stores.store import is_store
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.validation.suggestions import is_array_like

logger = logging.getLogger("pinfeed")

_MANY = 16
"""A list with more arrays than this, and more arrays than rows in each, is a list of rows."""


def is_store_or_array(value: Any) -> bool:
    """Return whether an object is one source, not a structure of sources.

    A Store is one source, and so is an array of another library such as Zarr. An object with a
    shape and a dtype is a structure of sources if all its fields are arrays and tensors, as in a
    TensorDict.
    """
    fields = list(getattr(value, "__dict__", {}).values())
    is_structure = bool(fields) and all(
        isinstance(field, np.ndarray) or hasattr(field, "data_ptr") for field in fields
    )
    is_array = is_array_like(value) and not is_structure
    # A Zarr group is a dataclass, but its fields are not sources.
    return is_store(value) or is_array or is_zarr_group(value)


def leaves_of(source: Any, name: str) -> tuple[list[tuple[str, Any]], Rebuild, list[Store]]:
    """Flatten a source into its leaves, with the columns of each table, dataset, frame and file.

    Args:
        source: The user's source.
        name: Name of the source in errors.

    Returns:
        The leaves, each with its path in the source; a function that builds the structure from new
        leaves; and the stores of columns that were made.
    """
    leaves, rebuild = flatten(source, is_leaf=is_store_or_array)
    found = [stores_of_columns(leaf, f"{name}{path}") for path, leaf in leaves]
    made = [store for columns in found if columns is not None for store in columns.values()]
    if all(columns is None for columns in found):
        return leaves, rebuild, made
    replaced = rebuild(
        leaf if columns is None else columns
        for columns, (_, leaf) in zip(found, leaves, strict=True)
    )
    return *flatten(replaced, is_leaf=is_store_or_array), made


def require_columns(source: Any, stores: Sequence[Store]) -> None:
    """Refuse a list of rows, each of which would be a source of its own.

    Args:
        source: The user's source.
        stores: Stores that were opened for it, with equally many rows.
    """
    n_rows = stores[0].n_rows
    n = len(stores)
    if not isinstance(source, list) or n <= max(_MANY, n_rows):
        return
    if len({(store.row_shape, store.dtype) for store in stores}) == 1:
        raise StoreError(
            f"source is a list of {n} arrays of shape {(n_rows, *stores[0].row_shape)}, which "
            f"means {n} sources of {n_rows} rows; expected one array; if each array is a row, give "
            f"np.stack(source); if you mean {n} sources, give a tuple"
        )


def note_possible_shards(value: Any, from_paths: frozenset[int]) -> None:
    """Warn of lists of files with rows of one shape and dtype, at any depth of a structure.

    Each file is a source of its own, but the user may have meant shards of one source.

    Args:
        value: Stores in the structure of the source.
        from_paths: The ``id`` of each store that was given as a path.
    """
    if isinstance(value, list) and len(value) > 1 and from_paths.issuperset(map(id, value)):
        is_alike = len({(store.row_shape, store.dtype) for store in value}) == 1
        if is_alike and all(len(store.paths) == 1 for store in value):
            paths = tuple(store.paths[0] for store in value)
            _warn_of_possible_shards(type(value[0]).__name__, paths)
    elif isinstance(value, (list, tuple, Mapping)):
        for child in value.values() if isinstance(value, Mapping) else value:
            note_possible_shards(child, from_paths)


@functools.cache
def _warn_of_possible_shards(store: str, paths: tuple[str, ...]) -> None:
    named = paths if len(paths) < 4 else paths[:2]
    shown = ", ".join([*map(repr, named), *["..."] * (len(named) < len(paths))])
    logger.warning(
        "source=[%s] is a list of %d files with equally many rows of one shape and dtype, so each "
        "batch is a list of %d tensors, one per file; if the files are shards of one source, give "
        "%s([...]) or a pattern; if they are separate sources, give a tuple, which avoids this "
        "warning",
        shown,
        len(paths),
        len(paths),
        store,
    )
