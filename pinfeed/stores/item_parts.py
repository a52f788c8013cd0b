"""ItemParts: the parts of the items of ragged rows, in the structure that the user gave."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import numpy as np

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores.leaves import leaves_of
from pinfeed.stores.opened import open_store
from pinfeed.stores.store import ClosedOnExit, Store, is_store
from pinfeed.tensors.pytree import flatten


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
        leaves, self.structure, self.owned = leaves_of(values, "values")
        with contextlib.ExitStack() as stack:
            for store in self.owned:
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
                    self.owned.append(leaf)
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

    def close(self) -> None:
        """Close the stores that this object owns. Further calls do nothing."""
        with contextlib.ExitStack() as stack:
            for store in self.owned:
                stack.callback(store.close)

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
