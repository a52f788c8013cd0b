"""WriteCheck: refuses values that cannot be written back, before any row changes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pinfeed.devices.device import Device, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.stores import ArrayStore, Store
from pinfeed.stores.array import SHARED
from pinfeed.stores.overlap import share_rows
from pinfeed.tensors.pytree import flatten


class WriteCheck:
    """Checks values that are to be written back to the stores of a feeder.

    Args:
        names: Name of each store, which begins with ``source``.
        stores: Stores of the feeder.
        ragged: Parts of the items of each ragged store of the feeder, by its name; text has none.
            Ragged rows and text are read-only.
    """

    def __init__(
        self, names: Sequence[str], stores: Sequence[Store], ragged: Mapping[str, Sequence[Store]]
    ) -> None:
        self._names = names
        self._name_set = frozenset((*names, *ragged))
        self._stores = stores
        self._ragged = ragged

    def check(self, values: Any, n_rows: int, device: Device) -> list[Tensor | None]:
        """Return the tensors in ``values``, one per store, if they can be written.

        Args:
            values: The user's values, in the structure of the source.
            n_rows: Number of rows to write.
            device: Device that the values must be on.

        Raises:
            WriteBackError: If they cannot be written.
        """
        if values is None:
            raise WriteBackError(
                f"write_back of None; expected {self._expected(n_rows, device)}; do not call it "
                "for unchanged rows"
            )
        given = {f"source{path}": value for path, value in flatten(values)[0]}
        for name, parts in self._ragged.items():
            self._require_none(name, parts, given)
        if given.keys() != self._name_set:
            structure = ", in the structure of the source; give None for a store without changes"
            raise WriteBackError(
                f"write_back of a {type(values).__name__}{self._differences(given)}; expected "
                f"{self._expected(n_rows, device)}" + ("" if self._is_single else structure)
            )
        tensors = [given[name] for name in self._names]
        for value, name, store in zip(tensors, self._names, self._stores, strict=True):
            if value is not None:
                _check_one(value, name, store, n_rows, device)
        if self._aliases:
            raise WriteBackError(
                f"{self._aliases} have rows in common, and batches of one would miss writes to the "
                "other; give the rows only once"
            )
        return tensors

    @staticmethod
    def _require_none(name: str, parts: Sequence[Store], given: Mapping[str, Any]) -> None:
        """Raise WriteBackError if there are values for a ragged store, or text without parts."""
        for path, value in given.items():
            if value is not None and (path == name or path.startswith((f"{name}[", f"{name}."))):
                kind = "ragged, read-only rows" if parts else "read-only text"
                raise WriteBackError(
                    f"write_back to {name}, which has {kind}; give None instead of its values"
                )

    @property
    def _is_single(self) -> bool:
        """Whether the source is one store, and not a structure of stores."""
        return self._name_set == {"source"}

    def _expected(self, n_rows: int, device: Device) -> str:
        """Describe the tensors that a write to ``n_rows`` rows takes."""
        tensors = [_tensor_of(store, n_rows, device) for store in self._stores]
        if self._is_single and tensors:
            return tensors[0]
        parts = [f"{tensor} for {name}" for tensor, name in zip(tensors, self._names, strict=True)]
        return " and ".join([*parts, *(f"None for {name}" for name in self._ragged)])

    def _differences(self, given: Mapping[str, Any]) -> str:
        """Say which names are missing in ``given``, and which the source does not have."""
        names = (*self._names, *self._ragged)
        missing = [name.removeprefix("source") for name in names if name not in given]
        unknown = [name.removeprefix("source") for name in given if name not in names]
        parts = []
        if any(missing):
            parts.append(f" without {', '.join(missing)}")
        if any(unknown) and not self._is_single:
            parts.append(f" with {', '.join(unknown)}, which the source does not have")
        return " and".join(parts)

    @functools.cached_property
    def _aliases(self) -> str:
        parts = [(name, part) for name, parts in self._ragged.items() for part in parts]
        names = (*self._names, *(name for name, _ in parts))
        # Parts of ragged rows are read-only, even if their arrays are not.
        writable = [*(one.writable for one in self._stores), *(False for _ in parts)]
        return aliases(names, (*self._stores, *(part for _, part in parts)), writable)


def aliases(names: Sequence[str], stores: Sequence[Store], written: Sequence[bool]) -> str:
    """Return the names of two stores that share memory or a file, if one is written; else ""."""
    named = zip(names, stores, written, strict=True)
    for (a, one, writes), (b, other, writes_other) in itertools.combinations(named, 2):
        if (writes or writes_other) and share_rows(one, other):
            return f"{a} and {b}"
    return ""


def _check_one(value: Any, name: str, store: Store, n_rows: int, device: Device) -> None:
    """Check the tensor of one store."""
    if isinstance(store, ArrayStore) and store.array.flags.writeable and not store.writable:
        raise WriteBackError(f"write_back to {name}: rows of an array {SHARED}")
    if not store.writable:
        raise WriteBackError(
            f"write_back to {name}, which is read-only; expected a writable array, or a .npy file "
            'opened with NpyStore(path, mode="r+"); windows, DataFrames and files of '
            "formats other than .npy cannot be written"
        )
    found = device.describe(value)
    if found is None:
        layout = f" of layout {value.layout}" if hasattr(value, "layout") else ""
        is_array = isinstance(value, np.ndarray)
        todo = f"; give torch.as_tensor(array, device={device.name!r})" if is_array else ""
        raise WriteBackError(
            f"write_back of {name}: got {type(value).__name__}{layout}; expected "
            f"{_tensor_of(store, n_rows, device)}{todo}"
        )
    shape, dtype, is_on_device = found
    wrong = []
    if shape != (n_rows, *store.row_shape):
        wrong.append(f"shape is {shape}, expected {(n_rows, *store.row_shape)}")
    dtype = dtype or getattr(value, "dtype", None)
    if dtype != store.dtype:
        wrong.append(
            f"dtype is {dtype}, expected {store.dtype}; convert with .to(torch.{store.dtype})"
        )
    if not is_on_device:
        wrong.append(f"device is {getattr(value, 'device', None)}, expected {device.name}")
    if wrong:
        raise WriteBackError(f"write_back of {name}: {'; '.join(wrong)}; nothing was written")


def _tensor_of(store: Store, n_rows: int, device: Device) -> str:
    """Describe a tensor that can be written to ``n_rows`` rows of a store."""
    shape = (n_rows, *store.row_shape)
    return f"a dense tensor of shape {shape} and dtype {store.dtype} on {device.name}"
