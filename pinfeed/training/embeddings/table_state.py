"""TableState: the state that a RowOptimizer keeps for one table, and the stores of this state."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.stores import NpyStore, PinnedStore, Store
from pinfeed.stores.npy_store import open_created
from pinfeed.stores.overlap import share_rows
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, version_of
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
        self.no_weight = nn.Parameter(_no_rows((table.embedding_dim,), table.store.dtype))
        """Parameter without rows, which the optimizer has between two batches."""
        self.no_state = [_no_rows(row.row_shape, row.dtype) for row in layout.rows]
        """Row-wise state of no rows, in the order of ``layout.rows``."""
        self.weight = self.no_weight
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

        self._row_keys = {row.key for row in layout.rows}
        # Row-wise state of the batch, with the versions that it began with.
        self._bound: list[tuple[torch.Tensor, int]] = []

    @property
    def is_changed(self) -> bool:
        """Whether a step, or the program directly, has changed row-wise state of the batch."""
        return self.is_stepped or any(version_of(one) != number for one, number in self._bound)

    def whole_table_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a parameter's state that is not row-wise."""
        return {key: value for key, value in state.items() if key not in self._row_keys}

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

    def switch(
        self, weight: nn.Parameter, lent: nn.Parameter, rows: Sequence[torch.Tensor]
    ) -> None:
        """Continue with other rows. Gradients that no step has used become stale.

        Args:
            weight: The rows that the optimizer updates.
            lent: The rows that the training step has.
            rows: Their row-wise state.
        """
        self.has_stale_gradients |= self.has_pending_gradients
        self.weight = weight
        self.lent = lent
        self.is_stepped = False
        self._bound = []
        self.has_pending_gradients = False
        self.has_unused_gradients = False
        if lent is self.no_weight:
            # Every pause between two batches has this parameter.
            lent.grad = None
            return
        self._bound = [(tensor, version_of(tensor)) for tensor in rows]
        if lent.requires_grad:
            # A weak reference, because the garbage collector cannot see the references of a hook.
            hook = functools.partial(_note_gradient, weakref.ref(self))
            lent.register_post_accumulate_grad_hook(hook)

    def changed_rows(self, state: Mapping[str, Any], optimizer: str) -> list[torch.Tensor | None]:
        """Return row-wise state after a step, with None for state that does not exist yet.

        Args:
            state: The state of ``weight``.
            optimizer: Name of the optimizer in errors.

        Raises:
            ArgumentError: If the optimizer keeps state that the trial on a small table did not
                show.
        """
        if unknown := state.keys() - self._row_keys - self.layout.tables:
            raise ArgumentError(
                f"{optimizer} keeps state {sorted(unknown)}, "
                "which it did not keep in its trial on a small table"
            )
        self.is_initialized |= self.is_stepped
        values = [state.get(row.key) for row in self.layout.rows]
        for value, row in zip(values, self.layout.rows, strict=True):
            expected = (len(self.weight), *row.row_shape)
            if value is None or (tuple(value.shape), NUMPY.get(value.dtype)) == (
                expected,
                row.dtype,
            ):
                continue
            raise ArgumentError(
                f"{optimizer} keeps {row.key!r} of shape {tuple(value.shape)}, {value.dtype}; "
                f"expected {expected}, {row.dtype}, as in its trial on a small table"
            )
        return values


def _no_rows(row_shape: Sequence[int], dtype: Any) -> torch.Tensor:
    return torch.empty(0, *row_shape, dtype=TORCH[np.dtype(dtype)], device="cpu")


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


def make_state_stores(
    make: StateStore | None,
    layouts: Mapping[HostEmbedding, StateLayout],
    undo: contextlib.ExitStack,
) -> tuple[dict[HostEmbedding, list[Store]], list[str]]:
    """Make the stores of row-wise state, filled with initial values.

    Args:
        make: The user's function. With None, the state is in the same kind of memory as the table,
            or in a file next to the table's file.
        layouts: State of each table of the optimizer.
        undo: Stack that removes new files and closes existing ones if the optimizer is not made.

    Returns:
        For each table, the stores in the order of ``layout.rows``. Then descriptions of files that
        existed before, which are opened and not changed.

    Raises:
        StoreError: If a store has another shape or dtype, is read-only, or shares rows with another
            store.
    """
    known = [(f"the rows of {one.name}", one.store) for one in layouts]
    stores: dict[HostEmbedding, list[Store]] = {one: [] for one in layouts}
    existing = []
    pairs = [(one, row) for one, layout in layouts.items() for row in layout.rows]
    for table, row in pairs:
        what = f"state {row.key!r} of {table.name}"
        shape = (table.store.n_rows, *row.row_shape)
        path = _path_next_to(table, row.key)
        if make is not None:
            store = make(table, row.key, shape, row.dtype)
            _check(store, shape, row.dtype, what)
            for name, other in known:
                if share_rows(store, other):
                    raise StoreError(
                        f"{what}: its store has rows in common with {name}; expected a separate "
                        "store for each table and each key of the state"
                    )
            known.append((what, store))
            _fill(store, row, table.store)
        elif path is not None and os.path.lexists(path) and not table.overwrite:
            store = open_created(path, shape, row.dtype)
            undo.callback(store.close)
            existing.append(f"{what}: {path}")
        else:
            store = _zeros(table, path, shape, row.dtype)
            undo.callback(_remove, store)
            if row.initial != 0:
                _fill(store, row, table.store)
        stores[table].append(store)
    return stores, existing


def _check(store: Store, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> None:
    """Check that a store of the user can have some state."""
    found = (store.n_rows, *store.row_shape)
    if found != shape or store.dtype != dtype or not store.writable:
        raise StoreError(
            f"{what}: a store of shape {found} and dtype {store.dtype}; expected a writable store "
            f"of shape {shape} and dtype {dtype}"
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
        return NpyStore.create(path, shape, dtype, overwrite=table.overwrite)
    pin = isinstance(table.store, PinnedStore) and table.store.page_locked
    return PinnedStore.zeros(shape, dtype, pin=pin)


def _path_next_to(table: HostEmbedding, key: str) -> pathlib.Path | None:
    """Return the path for state of a table in a file; None for a table in memory."""
    if not isinstance(table.store, NpyStore):
        return None
    path = pathlib.Path(table.store.paths[0])
    return path.with_name(f"{path.stem}.{key}.npy")


def _remove(store: Store) -> None:
    """Close a new store and remove its file, because the next attempt would refuse the file."""
    store.close()
    if isinstance(store, NpyStore):
        os.remove(store.paths[0])
