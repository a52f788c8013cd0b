"""StateSnapshot: an optimizer's state for one table, and its format in files.

The keys of a snapshot are ``optimizer`` (the name of the class), ``rows.<key>`` (row-wise state),
``table.<key>`` and ``number.<key>`` (tensors and numbers for the table as a whole) and
``begun.<key>`` (row-wise state that the optimizer has created).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.compat.speedtorch.tables import store_of_saved
from pinfeed.errors import StoreError
from pinfeed.stores import ArrayStore
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.tensors.numpy_torch import memory_of, to_torch
from pinfeed.training.embeddings.optimizer_state import StateLayout


@dataclass(frozen=True)
class StateSnapshot:
    """A checked snapshot.

    Attributes:
        rows: Row-wise state by key.
        shared: State of the table as a whole by key.
        created: Keys of row-wise state that the optimizer has created.
    """

    rows: dict[str, ArrayStore]
    shared: dict[str, Any]
    created: set[str]


def make_snapshot(
    optimizer_name: str,
    rows: Mapping[str, torch.Tensor],
    shared: Mapping[str, Any],
    created: Iterable[str],
) -> dict[str, Any]:
    """Return the state as a flat dict of tensors on the CPU and numbers."""
    saved: dict[str, Any] = {"optimizer": optimizer_name}
    for key, value in rows.items():
        saved[f"rows.{key}"] = value.cpu()
    for key, value in shared.items():
        if isinstance(value, torch.Tensor):
            saved[f"table.{key}"] = value.detach().cpu()
        else:
            saved[f"number.{key}"] = value
    for key in sorted(created):
        saved[f"begun.{key}"] = True
    return saved


def check_snapshot(
    saved: Mapping[str, Any], optimizer_name: str, layout: StateLayout, n_rows: int
) -> StateSnapshot:
    """Check that a saved snapshot fits an optimizer and a table of ``n_rows`` rows.

    Raises:
        StoreError: If the snapshot belongs to another optimizer or another shape.
    """
    if (other := saved.get("optimizer", optimizer_name)) != optimizer_name:
        raise StoreError(f"the saved state belongs to {other}; expected {optimizer_name}")
    rows = {key: store_of_saved(value, f"rows.{key}") for key, value in _part(saved, "rows")}
    shapes = {key: (store.n_rows, *store.row_shape) for key, store in rows.items()}
    expected = {row.key: (n_rows, *row.row_shape) for row in layout.rows}
    shared = {key for key in saved if key.startswith(("table.", "number."))}
    created = {key for key in saved if key.startswith("begun.")}
    known = {f"{kind}.{key}" for kind in ("table", "number") for key in layout.tables}
    if shapes != expected or shared - known or created - {f"begun.{key}" for key in expected}:
        raise StoreError(
            f"the saved state has {shapes}, {sorted(shared | created)}; "
            f"{optimizer_name} expects {expected}, {sorted(layout.tables)}"
        )
    return StateSnapshot(
        rows,
        dict(_part(saved, "table", "number")),
        {key for key, _ in _part(saved, "begun")},
    )


def to_arrays(snapshot: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return a snapshot as numpy arrays, for a .npz file."""
    return {
        key: memory_of(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        for key, value in snapshot.items()
    }


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the snapshot that ``to_arrays`` has converted to arrays."""
    snapshot: dict[str, Any] = {}
    for key, array in arrays.items():
        # numpy reads bfloat16 back as plain bytes.
        typed = array.view(BFLOAT16) if array.dtype.kind == "V" else array
        is_tensor = key.startswith(("rows.", "table."))
        snapshot[key] = to_torch(typed) if is_tensor else typed.item()
    return snapshot


def _part(saved: Mapping[str, Any], *kinds: str) -> list[tuple[str, Any]]:
    """Return the entries of these kinds, in order, without the kind in their keys."""
    entries = []
    for name, value in saved.items():
        kind, dot, key = name.partition(".")
        if dot and kind in kinds:
            entries.append((key, value))
    return entries
