"""leaves_of(): the single sources in the structure that a user gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores.opened import is_dataset_dict, is_zarr_group, stores_of_columns
from pinfeed.stores.store import Store, is_store
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.validation.suggestions import is_array_like


def _is_store_or_array(value: Any) -> bool:
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

    Raises:
        StoreError: If the source is a dict of Hugging Face datasets, or a column cannot be read.
    """
    if is_dataset_dict(source):
        raise StoreError(
            f"{name} is a DatasetDict of {', '.join(map(repr, source))}; expected one data set, "
            "because its splits have other rows; give one of them, such as dataset['train']"
        )
    leaves, rebuild = flatten(source, is_leaf=_is_store_or_array)
    found = [stores_of_columns(leaf, f"{name}{path}") for path, leaf in leaves]
    made = [store for columns in found if columns is not None for store in columns.values()]
    if all(columns is None for columns in found):
        return leaves, rebuild, made
    replaced = rebuild(
        leaf if columns is None else columns
        for columns, (_, leaf) in zip(found, leaves, strict=True)
    )
    return *flatten(replaced, is_leaf=_is_store_or_array), made
