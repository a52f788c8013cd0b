"""The ids in a loader's batch: the user's function or key, and arrays of the ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError, RowIndexError, StoreError, described
from pinfeed.stores.store import Array

IdsOf = Callable[[Any], Any]
"""Returns the ids of the rows that a batch on the host needs."""


def ids_function(ids: Any, name: str) -> IdsOf:
    """Return a function of a batch that returns its ids, from the user's function or key.

    Args:
        ids: A function of the batch, or the key of the ids in the batch.
        name: Name of the ids in errors.
    """
    if callable(ids):
        function: IdsOf = ids
        return function

    def ids_at_key(batch: Any) -> Any:
        try:
            return batch[ids]
        except (LookupError, TypeError) as error:
            found = f"the batch is a {type(batch).__name__}"
            if isinstance(batch, Mapping):
                found = f"the batch has keys {', '.join(map(repr, batch))}"
            raise ArgumentError(
                f"{name}: no ids at {ids!r}, because {found}; expected the key of its ids, or a "
                "function of the batch"
            ) from error

    return ids_at_key


def ids_array(ids: Any, name: str) -> Array:
    """Return ids as an array of integers of the same shape.

    Args:
        ids: Tensor, array, or sequence of integers.
        name: Name of the ids in errors.

    Raises:
        RowIndexError: If the ids are not integers.
    """
    # numpy takes some objects for arrays without elements, such as the empty storage that a
    # HeteroData of PyG makes for a missing key.
    if isinstance(ids, Mapping) or not (
        hasattr(ids, "__array__") or isinstance(ids, (Sequence, Number))
    ):
        raise RowIndexError(
            f"{name}: the ids of the batch are a {type(ids).__name__}; expected integers in a "
            "tensor, an array or a list; give a function or a key that returns them"
        )
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(ids, torch.Tensor):
            # The import is local, because the pipeline is loaded without torch.
            from pinfeed.tensors.numpy_torch import to_numpy

            array = to_numpy(ids, name)
        else:
            array = np.asarray(ids)
    except (StoreError, ValueError, TypeError) as error:
        raise RowIndexError(f"{name}: ids of the batch: {described(error)}") from None
    if array.size and array.dtype.kind not in "iu":
        hint = "; for a mask, give ids[mask]" if array.dtype == bool else ""
        raise RowIndexError(
            f"{name}: the ids of the batch are {array.dtype}; expected integers{hint}"
        )
    return array
