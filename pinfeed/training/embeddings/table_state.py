"""TableState: the state that a RowOptimizer keeps for one table, and StateStores: its stores."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import MmapStore, PinnedStore, Store
from pinfeed.stores.file import open_created
from pinfeed.stores.overlap import share_rows
from pinfeed.tensors.numpy_torch import NUMPY, TORCH
from pinfeed.training.embeddings.optimizer_state import RowState, StateLayout
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_file import row_chunks


class TableState:
    """The rows of a table that a RowOptimizer updates at present, and flags of their gradients.

    Args:
        table: The table.
        layout: The state that the optimizer keeps for it.
        stores: Stores of row-wise state, in the order of ``layout.rows``.
    """

    def __init__(self, table: HostEmbedding, layout: StateLayout, stores: list[Store]) -> None:
        self.table = table
        self.layout = layout
        self.stores = stores
        self.weight = self.no_rows()
        """Parameter that the optimizer updates."""
        self.lent = self.weight
        """Parameter that the training step and the parameter groups have.

        If the table is sharded, its rows differ from those of ``weight``.
        """
        self.is_initialized = False
        """Whether the optimizer has made the state of its first step."""
        self.is_stepped = False
        """Whether the rows of the current batch have been updated."""
        self.has_pending_gradients = False
        """Whether the current batch has gradients that no step has used yet."""
        self.has_stale_gradients = False
        """Whether an earlier batch ended with gradients that no step had used."""
        self.has_unused_gradients = False
        """Whether the batch got gradients after its last step, including dropped gradients."""

    @property
    def row_keys(self) -> set[str]:
        """Keys of row-wise state."""
        return {row.key for row in self.layout.rows}

    def no_rows(self) -> nn.Parameter:
        """Return a parameter without rows."""
        dtype = TORCH[np.dtype(self.table.store.dtype)]
        return nn.Parameter(torch.empty(0, self.table.embedding_dim, dtype=dtype, device="cpu"))

    def no_row_state(self) -> list[torch.Tensor]:
        """Return row-wise state without rows."""
        return [
            torch.empty(0, *row.row_shape, dtype=TORCH[row.dtype], device="cpu")
            for row in self.layout.rows
        ]

    def whole_table_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a parameter's state that is not row-wise."""
        keys = self.row_keys
        return {key: value for key, value in state.items() if key not in keys}

    def next_state(self, state: Mapping[str, Any], rows: list[torch.Tensor]) -> dict[str, Any]:
        """Return a parameter's state for other rows.

        Args:
            state: The state for the current rows.
            rows: Row-wise state of the other rows, in the order of the layout.
        """
        found = self.whole_table_state(state)
        for row, tensor in zip(self.layout.rows, rows, strict=True):
            if self.is_initialized or row.key in self.layout.created_in_init:
                found[row.key] = tensor
        return found

    def switch(self, weight: nn.Parameter, lent: nn.Parameter) -> None:
        """Continue with other rows. Gradients that no step has used become stale."""
        self.has_stale_gradients |= self.has_pending_gradients
        self.weight = weight
        self.lent = lent
        self.is_stepped = False
        self.has_pending_gradients = False
        self.has_unused_gradients = False

    def watch_gradients(self) -> None:
        """Note when backward() adds gradients to the lent rows."""
        if self.lent.requires_grad:
            # A weak reference, because the garbage collector cannot see the references of a hook.
            hook = functools.partial(_note_gradient, weakref.ref(self))
            self.lent.register_post_accumulate_grad_hook(hook)

    def changed_rows(self, state: Mapping[str, Any], optimizer: str) -> list[torch.Tensor | None]:
        """Return row-wise state after a step, with None for state that does not exist yet.

        Args:
            state: The state of ``weight``.
            optimizer: Name of the optimizer in errors.

        Raises:
            ArgumentError: If the optimizer keeps state that the trial on a small table did not
                show.
        """
        if unknown := set(state) - self.row_keys - self.layout.tables:
            raise ArgumentError(
                f"{optimizer} keeps state {sorted(unknown)}, "
                "which it did not keep in its trial on a small table"
            )
        self.is_initialized = True
        n = len(self.weight)
        return [_checked(state.get(row.key), row, n, optimizer) for row in self.layout.rows]


def _checked(
    value: torch.Tensor | None, row: RowState, n: int, optimizer: str
) -> torch.Tensor | None:
    """Return row-wise state of ``n`` rows, if it has the shape and dtype of the layout.

    Raises:
        ArgumentError: If its shape or dtype differs.
    """
    if value is None:
        return None
    expected = (n, *row.row_shape)
    if (tuple(value.shape), NUMPY.get(value.dtype)) != (expected, row.dtype):
        raise ArgumentError(
            f"{optimizer} keeps {row.key!r} of shape {tuple(value.shape)}, {value.dtype}; "
            f"expected {expected}, {row.dtype}, as in its trial on a small table"
        )
    return value


def _note_gradient(reference: weakref.ref[TableState], weight: torch.Tensor) -> None:
    """Note that backward() has added a gradient to ``weight``."""
    state = reference()
    if state is None:
        return
    if state.lent is weight:
        state.has_pending_gradients = True
        state.has_unused_gradients = True
    else:
        # backward() of a loss that was kept after its batch ended.
        state.has_stale_gradients = True


StateStore = Callable[[HostEmbedding, str, tuple[int, ...], np.dtype[Any]], Store]
"""Function of a table and the key, shape and dtype of its state; it makes a store for the state."""


class StateStores:
    """Makes the stores of row-wise state, filled with initial values.

    Args:
        make: The user's function. With None, the state is in the same kind of memory as the table,
            or in a file next to the table's file.
        undo: Stack that removes new files and closes existing ones if the optimizer is not made.
        tables: All tables of the optimizer.
    """

    def __init__(
        self,
        make: StateStore | None,
        undo: contextlib.ExitStack,
        tables: Iterable[HostEmbedding],
    ) -> None:
        self._make = make
        self._undo = undo
        self._known = [(f"the rows of {table.name}", table.store) for table in tables]
        self.found: list[str] = []
        """Descriptions of files that existed before. They are opened and not changed."""

    def make(self, table: HostEmbedding, layout: StateLayout) -> list[Store]:
        """Return a store for each row-wise state of a table, in the order of ``layout.rows``.

        Raises:
            StoreError: If a store has another shape or dtype, is read-only, or shares rows with
                another store.
        """
        return [self._store(table, row) for row in layout.rows]

    def _require_own(self, store: Store, what: str) -> None:
        """Check that a store shares no rows with tables or with other state of the optimizer.

        Raises:
            StoreError: If it does.
        """
        for known, other in self._known:
            if share_rows(store, other):
                raise StoreError(
                    f"{what}: its store has rows in common with {known}; expected a separate store "
                    "for each table and each key of the state"
                )
        self._known.append((what, store))

    def _store(self, table: HostEmbedding, row: RowState) -> Store:
        shape = (table.store.n_rows, *row.row_shape)
        if self._make is not None:
            store = self._make(table, row.key, shape, row.dtype)
            _check(store, table, row)
            self._require_own(store, f"state {row.key!r} of {table.name}")
            _fill(store, row, table.store)
            return store
        path = _path_next_to(table, row.key)
        if path is not None and os.path.lexists(path) and not table.overwrite:
            store = open_created(path, shape, row.dtype)
            self._undo.callback(store.close)
            self.found.append(f"state {row.key!r} of {table.name}: {path}")
            return store
        store = _zeros(table, path, shape, row.dtype)
        self._undo.callback(_remove, store)
        _check(store, table, row)
        if row.initial != 0:
            _fill(store, row, table.store)
        return store


def _check(store: Store, table: HostEmbedding, row: RowState) -> None:
    shape = (store.n_rows, *store.row_shape)
    expected = (table.store.n_rows, *row.row_shape)
    if shape != expected or store.dtype != row.dtype or not store.writable:
        raise StoreError(
            f"state {row.key!r} of {table.name}: a store of shape {shape} and dtype "
            f"{store.dtype}; expected a writable store of shape {expected} and dtype {row.dtype}"
        )


def _fill(store: Store, row: RowState, weights: Store) -> None:
    """Write the initial state of all rows, chunk by chunk."""
    for start, stop in row_chunks(store):
        rows = np.arange(start, stop)
        if row.initial is None:
            values = np.empty((len(rows), *weights.row_shape), weights.dtype)
            weights.gather(rows, values)
            store.scatter(rows, values.astype(store.dtype))
        else:
            store.scatter(rows, np.full((len(rows), *store.row_shape), row.initial, store.dtype))


def _zeros(
    table: HostEmbedding, path: pathlib.Path | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Store:
    """Make a store of zeros, of the same kind as the table's store."""
    if path is not None:
        return MmapStore.create(path, shape, dtype, overwrite=table.overwrite)
    pin = isinstance(table.store, PinnedStore) and table.store.page_locked
    return PinnedStore.zeros(shape, dtype, pin=pin)


def _path_next_to(table: HostEmbedding, key: str) -> pathlib.Path | None:
    """Return the path for state of a table in a file; None for a table in memory."""
    if not isinstance(table.store, MmapStore):
        return None
    path = pathlib.Path(table.store.paths[0])
    return path.with_name(f"{path.stem}.{key}.npy")


def _remove(store: Store) -> None:
    """Close a new store and remove its file, because the next attempt would refuse the file."""
    store.close()
    if isinstance(store, MmapStore):
        os.remove(store.paths[0])
