"""Stores for the row-wise state of an optimizer, next to the stores of the tables."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores import MmapStore, PinnedStore, Store
from pinfeed.stores.file import open_created
from pinfeed.stores.overlap import share_rows
from pinfeed.training.embeddings.optimizer_state import RowState, StateLayout
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_file import row_chunks

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
