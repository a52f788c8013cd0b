"""StoreTree: the stores of a feeder, opened, checked and closed, in the structure of the source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Device, Tensor
from pinfeed.errors import StoreError, VerificationError
from pinfeed.pipeline.source_structure import (
    is_store_or_array,
    lists_of_stores,
    note_possible_shards,
    require_columns,
    with_columns,
)
from pinfeed.pipeline.write_check import WriteCheck
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, ArrowStore, MmapStore, RemoteStore, Store
from pinfeed.stores.arrow_tables import is_column
from pinfeed.stores.memory_map import store_of_map
from pinfeed.stores.paths import has_protocol
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import flatten

# Number of stores that the representation shows.
_N_SHOWN = 4

CopyToHost = Callable[[Tensor, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Returns the values of a tensor on the device, given its shape and dtype."""


class StoreTree:
    """Stores with equally many rows, in the structure that the user gave.

    Args:
        source: Source as ``Feeder`` takes it. A leaf that is not a store is opened here, and
            closed with ``close``.
        name: Name of the source in errors.

    Raises:
        StoreError: If a leaf cannot be opened, or stores have unequal numbers of rows.
    """

    def __init__(self, source: Any, name: str = "source") -> None:
        leaves, self.rebuild = flatten(with_columns(source, name), is_leaf=is_store_or_array)
        if not leaves:
            raise StoreError(
                f"{name}={source!r} has no arrays in it; expected at least one path, array, tensor "
                "or Store"
            )
        self.names = [f"{name}{path}" for path, _ in leaves]
        self.stores: list[Store] = []
        self._owned: list[Store] = []
        try:
            for (_, leaf), leaf_name in zip(leaves, self.names, strict=True):
                self.stores.append(self._open(leaf, leaf_name))
            given_as_path = [
                store
                for (_, leaf), store in zip(leaves, self.stores, strict=True)
                if isinstance(leaf, (str, os.PathLike))
            ]
            self.n_rows = self.stores[0].n_rows
            self._require_equal_lengths(given_as_path)
            require_columns(source, self.stores)
            self._note_possible_shards(given_as_path)
        except BaseException:
            self.close()
            raise
        self._write_check = WriteCheck(self.names, self.stores)

    def __str__(self) -> str:
        """Describe the stores, for the ``repr`` of a feeder."""
        stores = [
            f"{name} {store.row_shape} {store.dtype}"
            for name, store in zip(self.names, self.stores, strict=True)
        ]
        more = f", and {len(stores) - _N_SHOWN} more" if len(stores) > _N_SHOWN else ""
        return f"{self.n_rows:,} rows of {', '.join(stores[:_N_SHOWN])}{more}"

    @property
    def are_in_memory(self) -> bool:
        """Whether all stores are arrays in memory."""
        return all(isinstance(store, ArrayStore) for store in self.stores)

    def close(self) -> None:
        """Close all stores that were opened here, and raise the first error."""
        with contextlib.ExitStack() as stack:
            for store in reversed(self._owned):
                stack.callback(store.close)

    def check(self, values: Any, n_rows: int, device: Device) -> list[Tensor | None]:
        """Return the tensors in ``values``, one per store, if they can be written.

        See ``WriteCheck.check``.

        Raises:
            WriteBackError: If they cannot be written.
        """
        return self._write_check.check(values, n_rows, device)

    def require_equal(self, data: Any, rows: Rows, batch: int, copy_to_host: CopyToHost) -> None:
        """Compare a batch that is lent with its rows in the stores.

        Args:
            data: Tensors in the structure of the source.
            rows: Row indices of the batch.
            batch: Number of the batch in its epoch.
            copy_to_host: Returns the values of a tensor, given its shape and dtype.

        Raises:
            VerificationError: If a row differs.
        """
        from pinfeed.tensors.numpy_torch import bytes_by_row

        for (_, tensor), name, store in zip(flatten(data)[0], self.names, self.stores, strict=True):
            expected = np.empty((len(rows), *store.row_shape), store.dtype)
            store.gather(rows, expected)
            lent = copy_to_host(tensor, expected.shape, expected.dtype)
            differs = (bytes_by_row(lent) != bytes_by_row(expected)).any(axis=1)
            wrong = np.flatnonzero(differs)
            if len(wrong):
                raise VerificationError(
                    f"batch {batch}: {len(wrong)} of {len(rows)} rows of {name} are not what the "
                    f"store has now, the first of them row {rows[wrong[0]]}; they were changed "
                    "while the batch was prefetched: while a loop runs, change rows by write_back "
                    "only, or give depth=0"
                )

    def _require_equal_lengths(self, given_as_path: Sequence[Store]) -> None:
        """Check that all stores have equally many rows.

        Args:
            given_as_path: Stores that the user gave as paths, which may be shards.
        """
        if all(store.n_rows == self.n_rows for store in self.stores):
            return
        counts = ", ".join(
            f"{name} has {store.n_rows}"
            for name, store in zip(self.names, self.stores, strict=True)
        )
        hint = ""
        if len(given_as_path) > 1:
            kind = type(given_as_path[0]).__name__
            hint = f"; shards of one source are a pattern, 'x-*.npy', or {kind}([...])"
        raise StoreError(
            f"sources have unequal numbers of rows: {counts}; expected equally many, one row each "
            f"for a sample{hint}"
        )

    def _note_possible_shards(self, given_as_path: Sequence[Store]) -> None:
        """Warn of lists of files that may be shards of one source."""
        from_paths = set(map(id, given_as_path))
        for stores in lists_of_stores(self.rebuild(iter(self.stores))):
            if from_paths.issuperset(map(id, stores)):
                note_possible_shards(stores)

    def _open(self, leaf: Any, name: str) -> Store:
        """Return the store of a leaf; a leaf that is a store is checked."""
        if isinstance(leaf, Store) and not isinstance(leaf, type):
            return _checked(leaf, name)
        if is_column(leaf):
            store: Store = ArrowStore(leaf, name=name)
        elif has_protocol(leaf):
            store = RemoteStore(leaf)
        elif isinstance(leaf, (str, os.PathLike)):
            store = MmapStore(leaf)
        elif (store := store_of_map(leaf)) is None:  # type: ignore[assignment]
            return ArrayStore(leaf, name=name)
        self._owned.append(store)
        return store


def _checked(store: Store, name: str) -> Store:
    """Return a user's store, if it has rows of a dtype that can be moved."""
    if store.n_rows < 1:
        raise StoreError(
            f"{name}: {type(store).__name__} has n_rows={store.n_rows}; expected at least one row"
        )
    if check_dtype(np.dtype(store.dtype), name) != store.dtype:
        raise StoreError(
            f"{name}: {type(store).__name__} has dtype {store.dtype}, which is not in this "
            "machine's byte order"
        )
    return store
