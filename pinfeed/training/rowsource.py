"""RowsOfTables: a loader's batches, each with the rows of tables that it looks up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..access.base import StoreRows
from ..batches import check_rows
from ..devices.base import Tensor
from ..errors import RowIndexError, StoreError
from ..loader import HostLeaf, LoaderSource, load_of
from ..rows import Rows
from ..sources import Draw, Load, RowGroup
from ..stores import Store
from ..tensors import to_numpy

IdsOf = Callable[[Any], Any]


@dataclass(frozen=True)
class TableRows:
    """A table, as the source sees it."""

    name: str
    ids_of: IdsOf
    """Given a batch on the host, the ids that it looks up: a tensor or array of any shape, or several in a list, tuple or dict."""
    stores: Sequence[Store]
    """Weights, then row-wise state."""


class FedBatch(NamedTuple):
    """A batch on the device."""

    data: Any
    """As the loader gave it."""
    rows: list[Rows]
    """For each table the rows that are looked up, ascending, each once."""
    tensors: list[list[Tensor]]
    """For each table: the same numbers on the device, then these rows of each store."""
    positions: list[list[tuple[Tensor, Tensor]]]
    """For each table: ids as they are in ``data``, and where among the rows they are."""


class RowsOfTables(LoaderSource):
    """The batches of a loader, with rows of tables.

    Args:
        loader: As ``wrap_loader`` takes it.
        tables: What is looked up.

    Raises:
        ArgumentError: The loader cannot be iterated.
    """

    def __init__(self, loader: Any, tables: Sequence[TableRows]) -> None:
        super().__init__(loader)
        self._tables = tables

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]  # the base has it once and for all
        return {"order": "a DataLoader's own", "tables": [[table.name, table.stores[0].n_rows] for table in self._tables]}

    def remedy(self, draw_share: float) -> str:
        if draw_share >= 0.5:
            return super().remedy(draw_share)
        names = ", ".join(table.name for table in self._tables)
        return (
            f"Most of it is gathering rows of {names}: a table in memory (store=None) is faster than one in a file, and a smaller dtype, "
            "or fewer different ids in a batch, leave less to gather."
        )

    def draw(self, batch: Any) -> Draw:
        # The user's functions are called here, one at a time; what follows from their ids is left to whichever reader has time.
        return functools.partial(self._load, batch, [table.ids_of(batch) for table in self._tables])

    def _load(self, batch: Any, ids: Sequence[Any]) -> Load:
        load = load_of(batch)
        parts, groups, known = list(load.parts), [], []
        for table, wanted in zip(self._tables, ids, strict=True):
            leaves = _leaves(wanted)
            rows, positions = _unique([_flat(leaf, table.name) for leaf in leaves], table)
            parts.append(HostLeaf(torch.from_numpy(rows)))
            groups.append(RowGroup(rows, len(parts), table.stores))
            parts += [StoreRows(store, rows) for store in table.stores]
            places: list[int] = []
            for leaf, where in zip(leaves, positions, strict=True):
                if (place := _place(leaf, load)) is not None:
                    places.append(place)
                    parts.append(HostLeaf(torch.from_numpy(where.reshape(leaf.shape))))
            known.append(places)
        return Load(parts, functools.partial(self._rebuild, load, groups, known), load.batches, groups)

    @staticmethod
    def _rebuild(load: Load, groups: Sequence[RowGroup], known: Sequence[Sequence[int]], tensors: Iterator[Tensor]) -> FedBatch:
        batch = [next(tensors) for _ in load.parts]
        rows, positions = [], []
        for group, places in zip(groups, known, strict=True):
            rows.append([next(tensors) for _ in range(1 + len(group.stores))])
            positions.append([(batch[place], next(tensors)) for place in places])
        return FedBatch(load.rebuild(iter(batch)), [group.rows for group in groups], rows, positions)


def _unique(ids: Sequence[np.ndarray[Any, Any]], table: TableRows) -> tuple[Rows, list[Rows]]:
    """The ids, ascending, each once, and where each of them is, array by array; all int64.

    Raises:
        RowIndexError: They are out of range.
    """
    every = np.concatenate([np.empty(0, np.int64), *[array for array in ids if array.size]], dtype=np.int64, casting="unsafe")
    rows, positions = np.unique(every, return_inverse=True)
    check_rows(rows, table.stores[0].n_rows, f"{table.name}: ids of the batch")
    return rows, np.split(positions, np.cumsum([array.size for array in ids])[:-1])


def _place(leaf: Any, load: Load) -> int | None:
    """Which part of the batch some ids are, if they are one as they are there."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return next((i for i, part in enumerate(load.parts) if getattr(part, "host_value", None) is leaf), None)


def _leaves(ids: Any) -> list[Any]:
    if isinstance(ids, Mapping):
        ids = list(ids.values())
    if isinstance(ids, (list, tuple)) and any(hasattr(leaf, "ndim") or isinstance(leaf, (list, tuple, Mapping)) for leaf in ids):
        return [found for leaf in ids for found in _leaves(leaf)]
    return [ids]


def _flat(ids: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        array = to_numpy(ids, name) if isinstance(ids, torch.Tensor) else np.asarray(ids)
    except (StoreError, ValueError, TypeError) as error:
        raise RowIndexError(f"{name}: ids of the batch: {error}") from None
    if array.size and array.dtype.kind not in "iu":
        hint = " (of a mask: ids[mask])" if array.dtype == bool else ""
        raise RowIndexError(f"{name}: ids of the batch are {array.dtype}; expected integers{hint}")
    return array.reshape(-1)
