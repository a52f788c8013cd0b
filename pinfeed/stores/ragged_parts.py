"""Parts of ragged rows: their offsets, and their items in the structure that the user gave."""

from __future__ import annotations

import contextlib
import os
from typing import Any, cast

import numpy as np

from pinfeed.errors import ArgumentError, StoreError, logger
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import run_gather
from pinfeed.stores.opened import leaves_of, open_store
from pinfeed.stores.store import ClosedOnExit, Store, is_store
from pinfeed.tensors.pytree import flatten


def read_offsets(offsets: Any) -> Rows:
    """Return a read-only copy of offsets, shape (n_rows + 1,), int64.

    Raises:
        StoreError: If they are not a 1-d array of at least two integers.
    """
    name = os.fspath(offsets) if isinstance(offsets, (str, os.PathLike)) else "offsets"
    store = open_store(np.asarray(offsets) if isinstance(offsets, list) else offsets, "offsets")
    try:
        if isinstance(store, ArrayStore):
            found = store.array
        else:
            found = np.empty((store.n_rows, *store.row_shape), store.dtype)
            run_gather(store)(Runs.one(0, store.n_rows), found)
    finally:
        store.close()
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 2:
        raise StoreError(
            f"{name}: shape {found.shape} of {found.dtype}; expected integers of shape "
            "(n_rows + 1,) for at least one row: the position of each row, and the end of the last"
        )
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise StoreError(f"{name}: offset {found.max()} is too large; expected at most 2**63 - 1")
    own: Rows = found.astype(np.int64)
    own.flags.writeable = False
    return own


def check_offsets(offsets: Rows, n_items: int) -> None:
    """Raise StoreError unless offsets do not decrease and are in [0, n_items]."""
    decreases = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(decreases):
        i = int(decreases[0]) + 1
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but offsets[{i - 1}] is {offsets[i - 1]}; expected "
            "offsets that do not decrease; for lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))"
        )
    if offsets[0] < 0:
        raise StoreError(f"offsets[0] is {offsets[0]}; expected at least 0")
    if offsets[-1] > n_items:
        i = int(np.searchsorted(offsets, n_items, side="right"))
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but values has {n_items} items; expected offsets of "
            "at most the number of items; check that values and offsets match"
        )
    if offsets[0] > 0 and offsets.sum() == n_items:
        logger.warning(
            "offsets begins at %d, so %d of %d items are in no row, and its sum is the number of "
            "items, as if it held lengths. For lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))",
            offsets[0],
            n_items - (offsets[-1] - offsets[0]),
            n_items,
        )


class ItemParts(ClosedOnExit):
    """Stores of the items of ragged rows, with equally many items.

    Args:
        values: Path, array, tensor or Store, or a structure of these. Stores that are opened for it
            are closed by ``close``.

    Raises:
        StoreError: If a part cannot be read, or parts have different numbers of items.
    """

    def __init__(self, values: Any) -> None:
        if isinstance(values, list):
            raise StoreError(
                "values is a list; expected one array with the items of all rows; "
                "give np.concatenate(rows), and the offsets "
                "np.concatenate(([0], np.cumsum([len(row) for row in rows])))"
            )
        leaves, self.structure, owned = leaves_of(values, "values")
        with contextlib.ExitStack() as stack:
            for store in owned:
                stack.callback(store.close)
            parts: list[Store] = []
            for path, leaf in leaves:
                if hasattr(leaf, "batch_parts"):
                    raise StoreError(
                        f"values{path} is a RaggedStore; expected the items of its rows; give "
                        "store.items"
                    )
                if not is_store(leaf):
                    leaf = open_store(leaf, f"values{path}")
                    stack.callback(leaf.close)
                    owned.append(leaf)
                parts.append(cast(Store, leaf))
            if not parts:
                raise StoreError("values has no parts; expected at least one array of items")
            if len({part.n_rows for part in parts}) > 1:
                counts = [
                    f"values{path} has {part.n_rows}"
                    for (path, _), part in zip(leaves, parts, strict=True)
                ]
                raise StoreError(
                    f"parts have unequal numbers of items: {', '.join(counts)}; expected equal "
                    "numbers, because parts share their offsets; give parts of other lengths as a "
                    "RaggedStore each"
                )
            stack.pop_all()
        self._owned = owned
        self.stores = parts
        """Store of each part."""
        self.paths = [path for path, _ in leaves]
        """Path of each part in the structure; empty for a single part."""

    def __getstate__(self) -> dict[str, Any]:
        # A function that builds a structure cannot be pickled, but the structure can.
        state = dict(vars(self))
        del state["structure"]
        return {**state, "names": self.structure(iter(self.paths))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        _, self.structure = flatten(state.pop("names"))
        vars(self).update(state)

    def paddings(self, padding: Any) -> list[Any]:
        """Return the padding of each part.

        Raises:
            ArgumentError: If a part has none, or its dtype cannot represent it.
        """
        found = dict(flatten(padding, "")[0])
        if found.keys() == {""}:
            found = dict.fromkeys(self.paths, padding)
        if found.keys() != set(self.paths):
            raise ArgumentError(
                f"padding={padding!r}: expected one number, or numbers in the structure of "
                f"values, for {', '.join(path or 'values' for path in self.paths)}"
            )
        return [
            _padding(found[path], part.dtype, path)
            for path, part in zip(self.paths, self.stores, strict=True)
        ]


def _padding(padding: Any, dtype: np.dtype[Any], path: str) -> Any:
    """Return the padding as a number of a dtype.

    Raises:
        ArgumentError: If the dtype cannot represent this number.
    """
    number = np.zeros((), dtype)
    try:
        number[...] = padding
        has_it = np.ndim(padding) == 0 and (dtype.kind not in "iub" or bool(number == padding))
    except (TypeError, ValueError, OverflowError):
        has_it = False
    if not has_it:
        name = f"padding{path}"
        raise ArgumentError(f"{name}={padding!r}: expected a number that {dtype} can represent")
    return cast(Any, number[()])
