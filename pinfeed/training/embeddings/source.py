"""TableRowSource: a loader's batches, each with the table rows that it looks up."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pinfeed.devices.base import Tensor
from pinfeed.errors import RowIndexError, StoreError, described
from pinfeed.pipeline.sources.base import BatchThunk, HostBatch, RowGroup
from pinfeed.pipeline.sources.dataloader import HostLeaf, LoaderSource, load_of
from pinfeed.rows.distinct import distinct_rows
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.stores.base import StoreRows
from pinfeed.tensors.numpy_torch import to_numpy
from pinfeed.training.embeddings.batch_rows import BatchRows

IdsOf = Callable[[Any], Any]


@dataclass(frozen=True)
class TableSpec:
    """A table in a loop: its stores, and the function that finds the ids of a batch."""

    name: str
    ids_of: IdsOf
    """Given a batch on the host, returns the ids that the training step looks up.

    The ids are a tensor or array of any shape, or several in a list, tuple or dict.
    """
    stores: Sequence[Store]
    """Store of the weights, then those of row-wise optimizer state."""
    n_rows: int
    """Number of rows of the whole table."""


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """The rows of a table that a batch looks up, on the device."""

    rows: Rows
    """Row indices in the stores, ascending, each once."""
    ids: Tensor
    """The ids that are looked up, ascending, each once, on the device."""
    tensors: list[Tensor]
    """The rows of each store, on the device."""
    positions: list[tuple[Tensor, Tensor]]
    """Ids that are tensors of the loader's batch, each with their positions among the rows."""

    def batch_rows(self, trainable: bool) -> BatchRows:
        """Return the rows in the form that the table looks up."""
        weight = nn.Parameter(self.tensors[0], requires_grad=trainable)
        return BatchRows(self.rows, self.ids, weight, self.positions)


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch on the device, with the table rows that it looks up."""

    data: Any
    """The batch in the structure that the loader returned."""
    tables: Sequence[DeviceRows]

    def batch_rows(self, trainable: Sequence[bool]) -> list[BatchRows]:
        """Return the rows of each table in the form that the table looks up."""
        pairs = zip(self.tables, trainable, strict=True)
        return [rows.batch_rows(trains) for rows, trains in pairs]

    def check(self, number: int) -> None:
        """Compare rows that other ranks sent with those in their stores.

        Args:
            number: Number of the batch, for the error.

        Raises:
            VerificationError: If they differ.
        """


class HostLookup(NamedTuple):
    """The ids that a batch looks up in a table, on the host."""

    rows: Rows
    """The ids, ascending, each once."""
    positions: list[tuple[int, Rows]]
    """For ids that are a part of the batch: the index of the part, and their positions in ``rows``.

    The positions have the shape of the ids.
    """


class Exchanged(NamedTuple):
    """Bytes that this rank has sent to other ranks; all 0 for tables that are not sharded."""

    ids: int = 0
    """Ids that the batches look up: 8 bytes for each row that another rank has."""
    rows: int = 0
    """Rows that were sent in the background."""
    late_rows: int = 0
    """Rows that were sent when their batch was lent, because an earlier one could change them."""
    gradients: int = 0
    """Gradients of rows that other ranks have."""
    words: int = 0
    """Messages by which ranks agree on each exchange."""


class TableRowSource(LoaderSource):
    """The batches of a loader, with the table rows that they look up.

    Args:
        loader: A loader, as for ``wrap_loader``.
        tables: The tables.

    Raises:
        ArgumentError: If the loader cannot be iterated.
    """

    writes_always = False
    """Whether a batch that changed nothing counts as a write."""

    def __init__(self, loader: Any, tables: Sequence[TableSpec]) -> None:
        super().__init__(loader)
        self._tables = tables

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]  # a constant there
        return {
            "order": "a DataLoader's own",
            "tables": [[table.name, table.n_rows] for table in self._tables],
        }

    @property
    def exchanged(self) -> Exchanged:
        """Bytes sent to other ranks since this source was made."""
        return Exchanged()

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors before a loop to other ranks.

        Called by the training thread.
        """
        return contextlib.nullcontext()

    def claim_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reserves the ranks for a loop, around its reader threads.

        Called by the training thread.
        """
        return contextlib.nullcontext()

    def in_lockstep(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all ranks run a loop, inside the life of its reader threads.

        Called by the training thread.
        """
        return contextlib.nullcontext()

    def hint(self, source_share: float) -> str:
        if source_share >= 0.5:
            return super().hint(source_share)
        names = ", ".join(table.name for table in self._tables)
        return (
            f"Most of it is gathering rows of {names}: a table in memory (store=None) is faster "
            "than one in a file, and a smaller dtype, or fewer different ids in a batch, leave "
            "less to gather."
        )

    def draw(self, batch: Any) -> BatchThunk:
        # The user's functions run here, one batch at a time. Any reader thread that is free
        # computes the rest from their ids.
        ids = [table.ids_of(batch) for table in self._tables]
        return functools.partial(self._load, batch, ids)

    def _load(self, batch: Any, ids: Sequence[Any]) -> HostBatch:
        load, lookups = self._looked_up(batch, ids)
        parts = list(load.parts)
        groups = []
        for table, lookup in zip(self._tables, lookups, strict=True):
            parts.append(HostLeaf(torch.from_numpy(lookup.rows)))
            groups.append(RowGroup(lookup.rows, len(parts), table.stores))
            parts += [StoreRows(store, lookup.rows) for store in table.stores]
            parts += position_parts(lookup)
        rebuild = functools.partial(self._rebuild, load, groups, lookups)
        return HostBatch(parts, rebuild, load.batches, groups)

    def _looked_up(self, batch: Any, ids: Sequence[Any]) -> tuple[HostBatch, list[HostLookup]]:
        """Return the batch itself, and its lookup in each table."""
        load = load_of(batch)
        pairs = zip(self._tables, ids, strict=True)
        return load, [_look_up(load, of_table, table) for table, of_table in pairs]

    @staticmethod
    def _rebuild(
        load: HostBatch,
        groups: Sequence[RowGroup],
        lookups: Sequence[HostLookup],
        tensors: Iterator[Tensor],
    ) -> DeviceBatch:
        """Assemble the batch from the parts of ``_load``, in their order."""
        batch = [next(tensors) for _ in load.parts]
        tables = []
        for group, lookup in zip(groups, lookups, strict=True):
            ids = next(tensors)
            rows = [next(tensors) for _ in group.stores]
            positions = [(batch[part], next(tensors)) for part, _ in lookup.positions]
            tables.append(DeviceRows(group.rows, ids, rows, positions))
        return DeviceBatch(load.rebuild(iter(batch)), tables)


def position_parts(lookup: HostLookup) -> list[HostLeaf]:
    """Return the positions of a lookup as parts that are copied to the device."""
    return [HostLeaf(torch.from_numpy(positions)) for _, positions in lookup.positions]


def _look_up(load: HostBatch, ids: Any, table: TableSpec) -> HostLookup:
    leaves = _leaves(ids)
    rows, positions = _unique([_flat(leaf, table.name) for leaf in leaves], table)
    known = []
    for leaf, found in zip(leaves, positions, strict=True):
        part = _part_index(leaf, load)
        if part is not None:
            known.append((part, found.reshape(leaf.shape)))
    return HostLookup(rows, known)


def _unique(ids: Sequence[np.ndarray[Any, Any]], table: TableSpec) -> tuple[Rows, list[Rows]]:
    """Return the distinct ids, ascending, and the positions of each array's ids in them, as int64.

    Raises:
        RowIndexError: If an id is out of range.
    """
    # Most batches have one array of ids, which needs neither a copy nor a split.
    arrays = [array.astype(np.int64, copy=False) for array in ids]
    every = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    rows, positions = distinct_rows(every)
    check_rows(rows, table.n_rows, f"{table.name}: ids of the batch")
    if len(arrays) == 1:
        return rows, [positions]
    return rows, np.split(positions, np.cumsum([array.size for array in arrays])[:-1])


def _part_index(leaf: Any, load: HostBatch) -> int | None:
    """Return the index of the batch's part that the ids are, unchanged; None for other ids."""
    if not isinstance(leaf, torch.Tensor):
        return None
    for i, part in enumerate(load.parts):
        if getattr(part, "host_value", None) is leaf:
            return i
    return None


def _leaves(ids: Any) -> list[Any]:
    """Return the arrays in a nested structure of ids; a list of numbers is one array."""
    if isinstance(ids, Mapping):
        ids = list(ids.values())
    if isinstance(ids, (list, tuple)) and any(map(_is_array_or_nested, ids)):
        return [found for leaf in ids for found in _leaves(leaf)]
    return [ids]


def _is_array_or_nested(value: Any) -> bool:
    return hasattr(value, "ndim") or isinstance(value, (list, tuple, Mapping))


def _flat(ids: Any, name: str) -> np.ndarray[Any, Any]:
    """Return ids as a flat array.

    Raises:
        RowIndexError: If they are not integers.
    """
    try:
        array = to_numpy(ids, name) if isinstance(ids, torch.Tensor) else np.asarray(ids)
    except (StoreError, ValueError, TypeError) as error:
        raise RowIndexError(f"{name}: ids of the batch: {described(error)}") from None
    if array.size and array.dtype.kind not in "iu":
        hint = " (of a mask: ids[mask])" if array.dtype == bool else ""
        raise RowIndexError(f"{name}: ids of the batch are {array.dtype}; expected integers{hint}")
    return array.reshape(-1)
