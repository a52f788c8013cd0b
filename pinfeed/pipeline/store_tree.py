"""StoreTree: the stores of a feeder, in the structure that the user gave; opened, checked and closed here."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Device, Tensor
from pinfeed.errors import StoreError, VerificationError, WriteBackError
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, ArrowStore, MmapStore, RemoteStore, Store
from pinfeed.stores.array import SHARED
from pinfeed.stores.arrow_tables import columns_of, is_column
from pinfeed.stores.memory_map import store_of_memmap
from pinfeed.stores.paths import has_protocol
from pinfeed.stores.sharded_file import AnyShardedStore
from pinfeed.tensors.dtypes import check_dtype
from pinfeed.tensors.pytree import flatten
from pinfeed.validation.suggestions import is_array_like

logger = logging.getLogger("pinfeed")

# Stores that are named in one line.
_SHOWN = 4
_MANY = 16
"""A list of more arrays than this, and than each has rows, is a list of rows."""
# numpy solves an equation to find whether strided arrays overlap; beyond this they count as
# overlapping.
_MAX_WORK = 1 << 16


class StoreTree:
    """Stores of equally many rows.

    Args:
        source: As ``Feeder`` takes it. What is not a store is opened here, and closed with
            ``close``.

    Raises:
        StoreError: A leaf that cannot be served, or stores of unequal length.
    """

    def __init__(self, source: Any) -> None:
        leaves, self.rebuild = flatten(_with_columns(source), is_leaf=_is_store_or_array)
        if not leaves:
            raise StoreError(
                f"source={source!r} has no arrays in it; expected at least one path, array, tensor or Store"
            )
        self.names = [_name(path) for path, _ in leaves]
        self.stores: list[Store] = []
        self._owned: list[Store] = []
        try:
            for (_, leaf), name in zip(leaves, self.names, strict=True):
                self.stores.append(self._open(leaf, name))
            of_paths = [
                store
                for (_, leaf), store in zip(leaves, self.stores, strict=True)
                if isinstance(leaf, (str, os.PathLike))
            ]
            self.n_rows = self.stores[0].n_rows
            if any(store.n_rows != self.n_rows for store in self.stores):
                counts = ", ".join(
                    f"{name} has {store.n_rows}"
                    for name, store in zip(self.names, self.stores, strict=True)
                )
                raise StoreError(
                    f"sources have unequal numbers of rows: {counts}; expected equally many, one row each for a sample"
                    + (
                        f"; shards of one source are a pattern, 'x-*.npy', or {type(of_paths[0]).__name__}([...])"
                        if of_paths[1:]
                        else ""
                    )
                )
            self._require_columns(source)
            given_as_path = set(map(id, of_paths))
            for group in _lists(self.rebuild(iter(self.stores))):
                if given_as_path.issuperset(map(id, group)):
                    _note_what_may_be_shards(group)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        stores = [
            f"{name} {store.row_shape} {store.dtype}"
            for name, store in zip(self.names, self.stores, strict=True)
        ]
        more = f", and {len(stores) - _SHOWN} more" if len(stores) > _SHOWN else ""
        return f"{self.n_rows:,} rows of {', '.join(stores[:_SHOWN])}{more}"

    def close(self) -> None:
        """Close the stores that were opened here, all of them, and raise the first error."""
        with contextlib.ExitStack() as stack:
            for store in reversed(self._owned):
                stack.callback(store.close)

    def check(self, values: Any, n: int, device: Device) -> list[Tensor | None]:
        """The tensors in ``values``, one per store, if they can be written to ``n`` rows.

        Raises:
            WriteBackError: They cannot.
        """
        if values is None:
            raise WriteBackError(
                f"write_back of None; expected {self._expected(n, device)}; rows that stay as they are need no write_back"
            )
        given = {_name(path): value for path, value in flatten(values)[0]}
        if set(given) != set(self.names):
            raise WriteBackError(
                f"write_back of a {type(values).__name__}{self._differences(given)}; expected {self._expected(n, device)}"
                + (
                    ", in the structure of the source (None for what stays as it is)"
                    if self.names != ["source"]
                    else ""
                )
            )
        tensors = [given[name] for name in self.names]
        for value, name, store in zip(tensors, self.names, self.stores, strict=True):
            if value is not None:
                _check_one(value, name, store, n, device)
        if self._aliases:
            raise WriteBackError(
                f"{self._aliases} have rows in common; a write to one of them would not be seen in the other: give the rows once"
            )
        return tensors

    def require_equal(self, data: Any, rows: Rows, batch: int, device: Device) -> None:
        """Compare a batch that is lent with its rows as they are in the stores.

        Args:
            data: Tensors in the structure of the source.
            rows: Their row numbers.
            batch: Number of the batch in its epoch.
            device: Where the tensors are.

        Raises:
            VerificationError: If a row differs.
        """
        from pinfeed.tensors.numpy_torch import bytes_by_row

        stream = device.current_stream()
        for (_, tensor), name, store in zip(flatten(data)[0], self.names, self.stores, strict=True):
            there = np.empty((len(rows), *store.row_shape), store.dtype)
            store.gather(rows, there)
            lent: npt.NDArray[Any] = np.ndarray(
                there.shape, there.dtype, device.staging(max(1, there.nbytes))
            )
            device.copy(tensor, lent, stream)
            stream.record().sync()
            wrong = np.flatnonzero((bytes_by_row(lent) != bytes_by_row(there)).any(axis=1))
            if len(wrong):
                raise VerificationError(
                    f"batch {batch}: {len(wrong)} of {len(rows)} rows of {name} are not what the store has now, the first of them row "
                    f"{rows[wrong[0]]}; they were changed while the batch was prefetched: while a loop runs, change rows by write_back "
                    "only, or give depth=0"
                )

    def _require_columns(self, source: Any) -> None:
        """Refuse a list of rows, each of which would be a source of its own."""
        n, kinds = len(self.stores), {(store.row_shape, store.dtype) for store in self.stores}
        if isinstance(source, list) and n > max(_MANY, self.n_rows) and len(kinds) == 1:
            raise StoreError(
                f"source is a list of {n} arrays of shape {(self.n_rows, *self.stores[0].row_shape)}, which are {n} sources of "
                f"{self.n_rows} rows; expected one array; give np.stack(source) where each array is a row (or a tuple of {n} sources)"
            )

    def _expected(self, n: int, device: Device) -> str:
        """The tensors that a write to ``n`` rows takes, in words."""
        tensors = [_tensor_of(store, n, device) for store in self.stores]
        if self.names == ["source"]:
            return tensors[0]
        return " and ".join(
            f"{tensor} for {name}" for tensor, name in zip(tensors, self.names, strict=True)
        )

    def _differences(self, given: Mapping[str, Any]) -> str:
        """Say what is missing in ``given``, and what the source does not have; nothing where neither is a structure."""
        missing = [name.removeprefix("source") for name in self.names if name not in given]
        unknown = [name.removeprefix("source") for name in given if name not in self.names]
        without = f" without {', '.join(missing)}" if any(missing) else ""
        beyond = (
            f" with {', '.join(unknown)}, which the source does not have"
            if any(unknown) and self.names != ["source"]
            else ""
        )
        return " and".join(part for part in (without, beyond) if part)

    @functools.cached_property
    def _aliases(self) -> str:
        return aliases(self.names, self.stores)

    def _open(self, leaf: Any, name: str) -> Store:
        if isinstance(leaf, Store) and not isinstance(leaf, type):
            if leaf.n_rows < 1:
                raise StoreError(
                    f"{name}: {type(leaf).__name__} has n_rows={leaf.n_rows}; expected at least one row"
                )
            if check_dtype(np.dtype(leaf.dtype), name) != leaf.dtype:
                raise StoreError(
                    f"{name}: {type(leaf).__name__} has dtype {leaf.dtype}, which is not in this machine's byte order"
                )
            return leaf
        if is_column(leaf):
            store: Store = ArrowStore(leaf, name=name)
        elif has_protocol(leaf):
            store = RemoteStore(leaf)
        elif isinstance(leaf, (str, os.PathLike)):
            store = MmapStore(leaf)
        elif not isinstance(leaf, np.memmap) or (store := store_of_memmap(leaf)) is None:  # type: ignore[assignment]
            return ArrayStore(leaf, name=name)
        self._owned.append(store)
        return store


def aliases(names: Sequence[str], stores: Sequence[Store]) -> str:
    """The names of two stores, one of them writable, that have memory or a file in common; empty if there are none."""
    for (a, one), (b, other) in itertools.combinations(zip(names, stores, strict=True), 2):
        if (one.writable or other.writable) and _overlap(one, other):
            return f"{a} and {b}"
    return ""


def _check_one(value: Any, name: str, store: Store, n: int, device: Device) -> None:
    if isinstance(store, ArrayStore) and store.array.flags.writeable and not store.writable:
        raise WriteBackError(f"write_back to {name}: rows of an array {SHARED}")
    if not store.writable:
        raise WriteBackError(
            f'write_back to {name}, which is read-only; open a file with MmapStore(path, mode="r+"), or give a writable array'
        )
    found = device.describe(value)
    if found is None:
        layout = f" of layout {value.layout}" if hasattr(value, "layout") else ""
        todo = (
            f"; give torch.as_tensor(array, device={device.name!r})"
            if isinstance(value, np.ndarray)
            else ""
        )
        raise WriteBackError(
            f"write_back of {name}: got {type(value).__name__}{layout}; expected {_tensor_of(store, n, device)}{todo}"
        )
    wrong = [
        f"{what} {got}, expected {want}"
        for what, got, want in (
            ("shape", found[0], (n, *store.row_shape)),
            ("dtype (convert with .to())", found[1] or getattr(value, "dtype", None), store.dtype),
        )
        if got != want
    ]
    if not found[2]:
        wrong.append(f"device {getattr(value, 'device', None)}, expected {device.name}")
    if wrong:
        raise WriteBackError(f"write_back of {name}: {'; '.join(wrong)}; nothing was written")


def _tensor_of(store: Store, n: int, device: Device) -> str:
    """A tensor that can be written to ``n`` rows, in words."""
    return (
        f"a dense tensor of shape {(n, *store.row_shape)} and dtype {store.dtype} on {device.name}"
    )


def _overlap(one: Store, other: Store) -> bool:
    if isinstance(one, ArrayStore) and isinstance(other, ArrayStore):
        try:
            return bool(np.shares_memory(one.array, other.array, max_work=_MAX_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True
    if isinstance(one, MmapStore) and isinstance(other, MmapStore):
        return not set(map(os.path.realpath, one.paths)).isdisjoint(
            map(os.path.realpath, other.paths)
        )
    return one is other


def _lists(value: Any) -> Iterator[list[Any]]:
    """The lists in a structure, at any depth, that have several leaves and nothing else."""
    if (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(child, Store) for child in value)
    ):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _lists(child)


def _note_what_may_be_shards(stores: Sequence[AnyShardedStore]) -> None:
    """Warn of a list of files that are alike: it gives a batch of each, side by side, where one of all may have been meant."""
    if len({(store.row_shape, store.dtype) for store in stores}) == 1 and all(
        len(store.paths) == 1 for store in stores
    ):
        _warn_of_pairs(type(stores[0]).__name__, tuple(store.paths[0] for store in stores))


@functools.cache
def _warn_of_pairs(store: str, paths: tuple[str, ...]) -> None:
    shown = ", ".join(map(repr, paths if len(paths) < 4 else (*paths[:2], ...))).replace(
        "Ellipsis", "..."
    )
    logger.warning(
        "source=[%s] is a list of %d files with equally many rows of one shape and dtype, and each batch is a list of %d tensors, one of "
        "each file; if the files are shards of one source, give %s([...]) or a pattern; if they belong side by side, give a tuple, of "
        "which there is no warning",
        shown,
        len(paths),
        len(paths),
        store,
    )


def _with_columns(source: Any) -> Any:
    """``source``, with a dict of its columns in the place of each table and each dataset."""
    leaves, rebuild = flatten(source, is_leaf=_is_store_or_array)
    found = [columns_of(leaf, _name(path)) for path, leaf in leaves]
    return (
        rebuild(
            leaf if columns is None else columns
            for columns, (_, leaf) in zip(found, leaves, strict=True)
        )
        if any(columns is not None for columns in found)
        else source
    )


def _is_store_or_array(value: Any) -> bool:
    """Whether a dataclass is a source as a whole: a Store, or an array of another library (Zarr's), whose fields are its own affair.

    One with a shape and a dtype whose fields are arrays and tensors, and nothing else, is a
    structure of them, as a TensorDict is.
    """
    fields = list(getattr(value, "__dict__", {}).values())
    is_structure = bool(fields) and all(
        isinstance(field, np.ndarray) or hasattr(field, "data_ptr") for field in fields
    )
    return isinstance(value, Store) or (is_array_like(value) and not is_structure)


def _name(path: str) -> str:
    return f"source{path}"
