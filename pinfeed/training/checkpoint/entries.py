"""The files of one object in a checkpoint, for each kind of object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import TORCH, to_torch
from pinfeed.training.distributed.rank_loop import RankGroup
from pinfeed.training.distributed.sharded_table import ShardedEmbedding
from pinfeed.training.embeddings.combined_optimizer import (
    CombinedOptimizer,
    row_optimizers,
    row_tables,
)
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.embeddings.table import HostEmbedding

RETURNED_KINDS = ("value", "tensor", "array")
"""Kinds of objects that ``resume`` returns. Objects of all other kinds load what was saved."""

_PLAIN = (type(None), bool, int, float, str)


class Entry:
    """The files of one object in a checkpoint.

    Args:
        name: Name of the object in the checkpoint.
        kind: Kind of the object in the manifest.
        stores: Stores of its rows, by file name.
        target: Object with ``state_dict`` and ``load_state_dict``, if it has such a state.
        state: Function that returns the state to save, without ``target``.
        more: Further plain values for the manifest, which must be the same in ``resume``.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        stores: Mapping[str, Store],
        target: Any = None,
        state: Callable[[], Any] | None = None,
        **more: Any,
    ) -> None:
        self.saved = {"kind": kind, "stores": list(stores), **more}
        """Description of the object in the manifest."""
        self.stores = stores
        self.file = f"{name}.pt"
        """Name of the file of its state."""
        self._target = target
        self.state = state if target is None else target.state_dict
        """Function that returns the state to save; None if the whole state is in stores."""

    @property
    def files(self) -> list[str]:
        """Names of all files of the object."""
        return [*self.stores, self.file] if self.state is not None else [*self.stores]

    @property
    def is_returned(self) -> bool:
        """Whether ``resume`` returns the object."""
        return self.saved["kind"] in RETURNED_KINDS

    def load(self, state: Any) -> None:
        """Load a saved state into the object."""
        self._target.load_state_dict(state)


def entry_for(name: str, value: Any) -> Entry:
    """Return the files of an object.

    Raises:
        ArgumentError: If the name is not an identifier, or the object cannot be saved.
    """
    _check_name(name, value)
    if isinstance(value, HostEmbedding):
        return Entry(name, "table", {f"{name}.npy": _writable(name, value.store)})
    if isinstance(value, RowOptimizer):
        kind = type(value.inner).__name__
        return Entry(name, "row optimizer", _state_stores(name, value), value, optimizer=kind)
    if isinstance(value, CombinedOptimizer):
        stores = {}
        for i, one in enumerate(row_optimizers(value)):
            stores.update(_state_stores(f"{name}.{i}", one))
        kinds = [type(getattr(one, "inner", one)).__name__ for one in value.optimizers]
        return Entry(name, "combined optimizer", stores, value, optimizers=kinds)
    if isinstance(value, Store):
        return Entry(name, "store", {f"{name}.npy": _writable(name, value)})
    if _has_method(value, "state_dict") and _has_method(value, "load_state_dict"):
        return Entry(name, "state", {}, value)
    plain = _without_numpy(value)
    if _is_plain(plain):
        return Entry(name, "value", {}, value=plain)
    if _is_dense_tensor(value):
        return Entry(name, "tensor", {}, state=lambda: _copied(value))
    if type(value) is np.ndarray and value.dtype in TORCH and value.dtype.isnative:
        return Entry(name, "array", {}, state=lambda: to_torch(np.array(value, order="C")))
    raise _refusal(name, value)


def tables_of(value: Any) -> list[HostEmbedding]:
    """Return the tables whose rows an object contains or updates."""
    if isinstance(value, HostEmbedding):
        return [value]
    return row_tables(value)


def resumable_parts(value: Any) -> list[HostEmbedding] | list[RowOptimizer]:
    """Return the tables and RowOptimizers of an object, whose files may wait for a resume."""
    return [value] if isinstance(value, HostEmbedding) else row_optimizers(value)


def rank_group(objects: Iterable[Any]) -> RankGroup | None:
    """Return the ranks of sharded tables, which save together; None without such tables.

    Raises:
        ArgumentError: If tables belong to several process groups.
    """
    tables = [table for value in objects for table in tables_of(value)]
    groups = {table.rank_group for table in tables if isinstance(table, ShardedEmbedding)}
    if len(groups) > 1:
        raise ArgumentError(
            f"tables of {len(groups)} process groups; expected one process group in a checkpoint"
        )
    return groups.pop() if groups else None


def _check_name(name: str, value: Any) -> None:
    if not name.isidentifier() or name == "random":
        raise ArgumentError(
            f"an object named {name!r}; expected a valid variable name other than 'random'"
        )
    if isinstance(value, type):
        raise ArgumentError(
            f"{name}: {value.__name__} is a class; expected an instance; "
            f"give {name}={value.__name__}(...)"
        )


def _writable(name: str, store: Store) -> Store:
    if not store.writable:
        raise ArgumentError(
            f"{name} is in a read-only store, whose rows do not change; leave it out"
        )
    return store


def _state_stores(name: str, optimizer: RowOptimizer) -> dict[str, Store]:
    """Return the stores of row-wise state, by file name."""
    stores = {}
    for i, state in enumerate(optimizer.tables.values()):
        for row, store in zip(state.layout.rows, state.stores, strict=True):
            stores[f"{name}.{i}.{row.key}.npy"] = store
    return stores


def _has_method(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))


def _without_numpy(value: Any) -> Any:
    """Return a value with Python numbers instead of numpy numbers, also in lists and dicts.

    Numbers that Python does not have are not converted.
    """
    if isinstance(value, dict):
        return {key: _without_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_numpy(inner) for inner in value]
    if isinstance(value, np.generic) and not isinstance(value, np.timedelta64):
        number = value.item()
        return number if isinstance(number, (bool, int, float)) else value
    return value


def _is_plain(value: Any) -> bool:
    """Return whether JSON restores a value unchanged."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)


def _is_dense_tensor(value: Any) -> bool:
    is_tensor = type(value) in (torch.Tensor, nn.Parameter)
    return is_tensor and value.layout is torch.strided and not value.is_meta


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU, because torch saves the whole memory of a view."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _refusal(name: str, value: Any) -> ArgumentError:
    kind = type(value).__name__
    if isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values()):
        return ArgumentError(
            f"{name}: got {kind} of tensors, which cannot be saved; expected the object "
            f"with this state; give {name}=model, whose state_dict is saved and loaded by resume; "
            "or give each tensor under a separate name"
        )
    return ArgumentError(
        f"{name}: got {kind}, which cannot be saved; expected tables, Stores, objects with "
        "state_dict and load_state_dict, dense tensors and arrays of numbers (each under a "
        "separate name), or plain values: None, bool, int, float, str, and lists and dicts "
        "(with str keys) of these"
    )
