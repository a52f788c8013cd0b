"""RowsOfTables: a loader's batches, each with the rows of tables that it looks up."""

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
from pinfeed.readahead.base import StoreRows
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.numpy_torch import to_numpy
from pinfeed.training.embeddings.table import BatchRows

IdsOf = Callable[[Any], Any]


@dataclass(frozen=True)
class TableRows:
    """A table, as the source sees it."""

    name: str
    ids_of: IdsOf
    """Given a batch on the host, the ids that it looks up: a tensor or array of any shape, or several in a list, tuple or dict."""
    stores: Sequence[Store]
    """Weights, then row-wise state."""
    n_rows: int
    """Of the whole table."""


@dataclass(frozen=True, eq=False)
class FedRows:
    """The rows of a table that a batch looks up."""

    rows: Rows
    """Their numbers in the stores, ascending, each once."""
    ids: Tensor
    """The ids that are looked up, ascending, each once, on the device."""
    tensors: list[Tensor]
    """These rows of each store, on the device."""
    positions: list[tuple[Tensor, Tensor]]
    """Ids as they are in the loader's batch, and where among the rows they are."""

    def block(self, trainable: bool) -> BatchRows:
        """What the table is lent."""
        return BatchRows(
            self.rows,
            self.ids,
            nn.Parameter(self.tensors[0], requires_grad=trainable),
            self.positions,
        )


@dataclass(frozen=True, eq=False)
class FedBatch:
    """A batch on the device."""

    data: Any
    """As the loader gave it."""
    tables: Sequence[FedRows]

    def blocks(self, trainable: Sequence[bool]) -> list[BatchRows]:
        """What each table is lent."""
        return [rows.block(trains) for rows, trains in zip(self.tables, trainable, strict=True)]

    def check(self, number: int) -> None:
        """Compare rows that came from elsewhere with where they came from.

        Raises:
            VerificationError: They differ.
        """


class Lookup(NamedTuple):
    """What a batch looks up in a table, on the host."""

    rows: Rows
    """The ids, ascending, each once."""
    places: list[tuple[int, Rows]]
    """Ids that are a part of the batch: which part, and where among the rows each of them is, in their shape."""


class Exchanged(NamedTuple):
    """Bytes that this rank has sent to others; nothing where tables are not sharded."""

    ids: int = 0
    """That the batches look up, 8 for each row that another rank has."""
    rows: int = 0
    """In the background."""
    late_rows: int = 0
    """When their batch was lent, for an earlier one could change them until then."""
    gradients: int = 0
    words: int = 0
    """What ranks say before they exchange anything."""


class RowsOfTables(LoaderSource):
    """The batches of a loader, with rows of tables.

    Args:
        loader: As ``wrap_loader`` takes it.
        tables: What is looked up.

    Raises:
        ArgumentError: The loader cannot be iterated.
    """

    writes_always = False
    """Whether a batch that changed nothing counts as a write."""

    def __init__(self, loader: Any, tables: Sequence[TableRows]) -> None:
        super().__init__(loader)
        self._tables = tables

    @property
    def fingerprint(self) -> Mapping[str, Any]:  # type: ignore[override]  # the base has it once and for all
        return {
            "order": "a DataLoader's own",
            "tables": [[table.name, table.n_rows] for table in self._tables],
        }

    @property
    def exchanged(self) -> Exchanged:
        """Since this was made."""
        return Exchanged()

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Consumer. Around what may fail before a loop begins."""
        return contextlib.nullcontext()

    def taken(self) -> contextlib.AbstractContextManager[None]:
        """Consumer. Around a loop and its readers."""
        return contextlib.nullcontext()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Consumer. Around a loop, while its readers live."""
        return contextlib.nullcontext()

    def hint(self, draw_share: float) -> str:
        if draw_share >= 0.5:
            return super().hint(draw_share)
        names = ", ".join(table.name for table in self._tables)
        return (
            f"Most of it is gathering rows of {names}: a table in memory (store=None) is faster than one in a file, and a smaller dtype, "
            "or fewer different ids in a batch, leave less to gather."
        )

    def draw(self, batch: Any) -> BatchThunk:
        # The user's functions are called here, one at a time; what follows from their ids is left
        # to whichever reader has time.
        return functools.partial(self._load, batch, [table.ids_of(batch) for table in self._tables])

    def _load(self, batch: Any, ids: Sequence[Any]) -> HostBatch:
        load, lookups = self._looked_up(batch, ids)
        parts, groups = list(load.parts), []
        for table, lookup in zip(self._tables, lookups, strict=True):
            parts.append(HostLeaf(torch.from_numpy(lookup.rows)))
            groups.append(RowGroup(lookup.rows, len(parts), table.stores))
            parts += [
                *(StoreRows(store, lookup.rows) for store in table.stores),
                *places_of(lookup),
            ]
        return HostBatch(
            parts, functools.partial(self._rebuild, load, groups, lookups), load.batches, groups
        )

    def _looked_up(self, batch: Any, ids: Sequence[Any]) -> tuple[HostBatch, list[Lookup]]:
        """The batch itself, and what it looks up in each table."""
        load = load_of(batch)
        return load, [
            _look_up(load, wanted, table) for table, wanted in zip(self._tables, ids, strict=True)
        ]

    @staticmethod
    def _rebuild(
        load: HostBatch,
        groups: Sequence[RowGroup],
        lookups: Sequence[Lookup],
        tensors: Iterator[Tensor],
    ) -> FedBatch:
        batch, tables = [next(tensors) for _ in load.parts], []
        for group, lookup in zip(groups, lookups, strict=True):
            ids, rows = next(tensors), [next(tensors) for _ in group.stores]
            tables.append(
                FedRows(
                    group.rows,
                    ids,
                    rows,
                    [(batch[place], next(tensors)) for place, _ in lookup.places],
                )
            )
        return FedBatch(load.rebuild(iter(batch)), tables)


def places_of(lookup: Lookup) -> list[HostLeaf]:
    """Parts that bring the positions of a look-up to the device."""
    return [HostLeaf(torch.from_numpy(where)) for _, where in lookup.places]


def _look_up(load: HostBatch, ids: Any, table: TableRows) -> Lookup:
    leaves = _leaves(ids)
    rows, positions = _unique([_flat(leaf, table.name) for leaf in leaves], table)
    places = [
        (_place(leaf, load), leaf, where) for leaf, where in zip(leaves, positions, strict=True)
    ]
    return Lookup(
        rows,
        [(place, where.reshape(leaf.shape)) for place, leaf, where in places if place is not None],
    )


def _unique(ids: Sequence[np.ndarray[Any, Any]], table: TableRows) -> tuple[Rows, list[Rows]]:
    """The ids, ascending, each once, and where each of them is, array by array; all int64.

    Raises:
        RowIndexError: They are out of range.
    """
    every = np.concatenate(
        [np.empty(0, np.int64), *[array for array in ids if array.size]],
        dtype=np.int64,
        casting="unsafe",
    )
    rows, positions = np.unique(every, return_inverse=True)
    check_rows(rows, table.n_rows, f"{table.name}: ids of the batch")
    return rows, np.split(positions, np.cumsum([array.size for array in ids])[:-1])


def _place(leaf: Any, load: HostBatch) -> int | None:
    """Which part of the batch some ids are, if they are one as they are there."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return next(
        (i for i, part in enumerate(load.parts) if getattr(part, "host_value", None) is leaf), None
    )


def _leaves(ids: Any) -> list[Any]:
    if isinstance(ids, Mapping):
        ids = list(ids.values())
    if isinstance(ids, (list, tuple)) and any(
        hasattr(leaf, "ndim") or isinstance(leaf, (list, tuple, Mapping)) for leaf in ids
    ):
        return [found for leaf in ids for found in _leaves(leaf)]
    return [ids]


def _flat(ids: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        array = to_numpy(ids, name) if isinstance(ids, torch.Tensor) else np.asarray(ids)
    except (StoreError, ValueError, TypeError) as error:
        raise RowIndexError(f"{name}: ids of the batch: {described(error)}") from None
    if array.size and array.dtype.kind not in "iu":
        hint = " (of a mask: ids[mask])" if array.dtype == bool else ""
        raise RowIndexError(f"{name}: ids of the batch are {array.dtype}; expected integers{hint}")
    return array.reshape(-1)
