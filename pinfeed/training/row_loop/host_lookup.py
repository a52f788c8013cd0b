"""HostLookup: the ids that a batch looks up in a table, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pinfeed.devices.device import Tensor
from pinfeed.pipeline.sources.row_fetch import ids_array
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch
from pinfeed.rows.indices import check_rows, distinct_rows
from pinfeed.rows.orders import Rows
from pinfeed.tensors.numpy_torch import version_of


class HostLookup(NamedTuple):
    """The ids that a batch looks up in a table, on the host."""

    rows: Rows
    """The ids, ascending, each once."""
    positions: list[tuple[int, Rows]]
    """For ids that are a part of the batch: index of the part, and positions of ids in ``rows``.

    The positions have the shape of the ids.
    """


def position_parts(lookup: HostLookup) -> list[ArrayPart]:
    """Return the positions of a lookup as parts of a batch."""
    return [ArrayPart(positions, is_own=True) for _, positions in lookup.positions]


class DataOnDevice:
    """The loader's batch on the device, which a transform may change before its rows are lent.

    Args:
        load: The batch on the host.
        lookups: Ids that the batch looks up in each table.
    """

    def __init__(self, load: HostBatch, lookups: Sequence[HostLookup]) -> None:
        self.n_parts = len(load.parts)
        """Number of parts of the batch."""
        self._rebuild = load.rebuild
        self._id_parts = {part for lookup in lookups for part, _ in lookup.positions}
        # For each part that contains ids: the version of its tensor before the transform ran.
        self._versions: dict[int, int] = {}

    def rebuild(self, tensors: Iterator[Tensor]) -> Any:
        """Return the batch in the structure that the loader returned."""
        parts = list(tensors)
        self._versions = {i: version_of(parts[i]) for i in self._id_parts}
        return self._rebuild(iter(parts))

    def positions(
        self, lookup: HostLookup, parts: Sequence[Tensor], positions: Iterator[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the id tensors that no transform has changed, each with its positions.

        Args:
            lookup: The ids.
            parts: Tensors of the parts of the batch.
            positions: Tensors of ``position_parts``.
        """
        pairs = [(i, next(positions)) for i, _ in lookup.positions]
        return [
            (parts[i], found) for i, found in pairs if version_of(parts[i]) == self._versions[i]
        ]


def look_up(load: HostBatch, ids: Any, name: str, n_rows: int) -> HostLookup:
    """Return the distinct ids that a batch looks up in a table.

    Args:
        load: The batch.
        ids: The ids, in a tensor or array, or in a structure of several.
        name: Name of the table in errors.
        n_rows: Number of rows of the table.

    Raises:
        RowIndexError: If an id is out of range, or not an integer.
    """
    leaves = _leaves(ids)
    rows, positions = _distinct(
        [ids_array(leaf, name).reshape(-1) for leaf in leaves], name, n_rows
    )
    known = []
    for leaf, found in zip(leaves, positions, strict=True):
        part = _part_index(leaf, load)
        if part is not None:
            known.append((part, found.reshape(leaf.shape)))
    return HostLookup(rows, known)


def _distinct(
    ids: Sequence[np.ndarray[Any, Any]], name: str, n_rows: int
) -> tuple[Rows, list[Rows]]:
    """Return the distinct ids, ascending, and the positions of each array's ids in them, as int64.

    Raises:
        RowIndexError: If an id is out of range.
    """
    # Most batches have one array of ids. It needs neither a copy nor a split.
    arrays = [array.astype(np.int64, copy=False) for array in ids]
    every = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    rows, positions = distinct_rows(every)
    # The rows are sorted, so the first and the last one are enough.
    if len(rows) and not 0 <= rows.item(0) <= rows.item(-1) < n_rows:
        check_rows(rows[:: max(1, len(rows) - 1)], n_rows, f"{name}: ids of the batch")
    if len(arrays) == 1:
        return rows, [positions]
    return rows, np.split(positions, np.cumsum([array.size for array in arrays])[:-1])


def _part_index(leaf: Any, load: HostBatch) -> int | None:
    """Return the index of the batch part that is this tensor of ids; None if no part is."""
    if not isinstance(leaf, torch.Tensor):
        return None
    for i, part in enumerate(load.parts):
        if getattr(part, "host_value", None) is leaf:
            return i
    return None


def _leaves(ids: Any) -> list[Any]:
    """Return the arrays in a nested structure of ids. A list of numbers is one array."""
    if isinstance(ids, Mapping):
        ids = list(ids.values())
    if isinstance(ids, (list, tuple)) and any(map(_is_array_or_nested, ids)):
        return [found for leaf in ids for found in _leaves(leaf)]
    return [ids]


def _is_array_or_nested(value: Any) -> bool:
    return hasattr(value, "ndim") or isinstance(value, (list, tuple, Mapping))
