"""Where the rows of a table are: on the host, on a GPU or on the disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, MmapStore, PinnedStore, Store
from pinfeed.tensors.dtypes import BFLOAT16, DTYPES, check_dtype, numpy_dtype_of
from pinfeed.tensors.numpy_torch import NUMPY, TORCH, memory_of, to_torch


class Table(Protocol):
    """Rows in one place."""

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of the rows, which may repeat, shape (n, *row_shape)."""

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        """Store the values as the rows, each of which is there once."""

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        """Let a function fill the table as a whole, where it is."""

    def tensor(self) -> torch.Tensor:
        """The table itself, shared."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(n_rows, *row_shape)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows."""

    @property
    def files(self) -> list[str]:
        """In which the rows are, if they are in files."""

    def close(self) -> None:
        """Flush and close a file. Idempotent."""


Place = Callable[[tuple[int, ...], np.dtype[Any], str], Table]
"""Given shape, dtype and key: a new table of zeros."""


# torch copies no rows of unsigned types.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the host for what is to go to a device.

    For a GPU it is page-locked, so that the copy need not wait: torch's allocator keeps the memory
    until the copy is done.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class HostTable:
    """Rows of a store, in memory or in one file."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.store.n_rows, *self.store.row_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.store.dtype

    @property
    def files(self) -> list[str]:
        return self.store.paths if isinstance(self.store, MmapStore) else []

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        out = staging((len(rows), *self.store.row_shape), TORCH[self.dtype], device)
        self.store.gather(rows, memory_of(out))
        return out.to(device, non_blocking=True).to(dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        self.store.scatter(
            rows, memory_of(values.detach().to("cpu", TORCH[self.dtype]).contiguous())
        )

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad():
            if isinstance(self.store, MmapStore):
                with self.store.mapped() as array:
                    function(to_torch(array))
            else:
                function(self.tensor())

    def tensor(self) -> torch.Tensor:
        if isinstance(self.store, MmapStore):
            mapped = np.load(self.store.paths[0], mmap_mode="r+")
            return to_torch(np.asarray(mapped.view(BFLOAT16) if self.dtype == BFLOAT16 else mapped))
        assert isinstance(self.store, ArrayStore)
        return to_torch(self.store.array)

    def close(self) -> None:
        self.store.close()


class DeviceTable:
    """Rows in the memory of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # The same memory
        self._rows = tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return NUMPY[self._tensor.dtype]

    @property
    def files(self) -> list[str]:
        return []

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return (
            self._rows.index_select(0, self._ids(rows)).view(self._tensor.dtype).to(device, dtype)
        )

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        self._rows.index_copy_(
            0, self._ids(rows), values.detach().to(self._tensor).view(self._rows.dtype)
        )

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad():
            function(self._tensor)

    def tensor(self) -> torch.Tensor:
        return self._tensor

    def close(self) -> None:
        """Memory needs none."""

    def _ids(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._tensor.device)


def in_memory(page_locked: bool) -> Place:
    """On the host; page-locked, where that is wanted and can be."""
    return lambda shape, dtype, key: HostTable(
        PinnedStore.zeros(shape, dtype, pin="auto" if page_locked else False)
    )


def on_device(device_type: str, page_locked: bool) -> Place:
    """On a GPU if there is one and it is wanted, else on the host.

    Raises:
        ArgumentError: A device of another type.
    """
    try:
        device = torch.device(device_type)
    except RuntimeError as error:
        raise ArgumentError(f"deviceType={device_type!r}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"deviceType={device_type!r}: expected 'cuda' or 'cpu'")
    if device.type == "cpu" or not torch.cuda.is_available():
        return in_memory(page_locked)
    return lambda shape, dtype, key: DeviceTable(
        torch.zeros(shape, dtype=TORCH[dtype], device=device)
    )


def on_disk(name: str) -> Place:
    """In a new .npy file, which takes the first number that is free."""
    # Rows are found wherever the process goes later.
    name = os.path.abspath(name)

    def make(shape: tuple[int, ...], dtype: np.dtype[Any], key: str) -> Table:
        names = (f"{name}{number}.memmap{key}.cpy.npy" for number in itertools.count())
        return HostTable(
            MmapStore.create(next(path for path in names if not os.path.exists(path)), shape, dtype)
        )

    return make


def as_dtype(value: Any) -> np.dtype[Any]:
    """The numpy dtype that a name, a numpy dtype or a torch dtype spells.

    Raises:
        StoreError: If it is not a dtype, or not one that both numpy and torch have.
    """
    try:
        found = numpy_dtype_of(value, "datatype")
    except StoreError:
        raise StoreError(
            f"datatype={value!r} is not a dtype; expected one of {', '.join(sorted(DTYPES))}"
        ) from None
    return check_dtype(found, "datatype")
