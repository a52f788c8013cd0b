"""Placement of a table's rows: in host memory, in a file or on a GPU."""

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
    """Rows in one place, read and written as torch tensors."""

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, which may repeat, as a new tensor of shape (n, *row_shape)."""

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        """Store the values as the rows. Each row occurs once."""

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        """Call a function with the whole table as a tensor, which the function fills in place."""

    def tensor(self) -> torch.Tensor:
        """Return the table itself, sharing its memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table, (n_rows, *row_shape)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows."""

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold the rows; empty for a table in memory."""

    def close(self) -> None:
        """Flush and close the file, if there is one. May be called again."""


Placement = Callable[[tuple[int, ...], np.dtype[Any], str], Table]
"""Function that creates a table of zeros, given its shape, dtype and key."""


# torch implements index_select and index_copy_ for signed integers only.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def staging_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate host memory for values that are then copied to a device.

    For a GPU, the memory is page-locked, so that the copy is asynchronous. torch's allocator keeps
    the memory until the copy has completed.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class StoreTable:
    """Base of tables whose rows are in a store on the host."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.store.n_rows, *self.store.row_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.store.dtype

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        out = staging_tensor((len(rows), *self.store.row_shape), TORCH[self.dtype], device)
        self.store.gather(rows, memory_of(out))
        return out.to(device, non_blocking=True).to(dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        on_host = values.detach().to("cpu", TORCH[self.dtype]).contiguous()
        self.store.scatter(rows, memory_of(on_host))

    def close(self) -> None:
        self.store.close()


class MemoryTable(StoreTable):
    """Rows in host memory."""

    store: ArrayStore

    @property
    def files(self) -> list[str]:
        return []

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad():
            function(self.tensor())

    def tensor(self) -> torch.Tensor:
        return to_torch(self.store.array)


class FileTable(StoreTable):
    """Rows in one .npy file."""

    store: MmapStore

    @property
    def files(self) -> list[str]:
        return self.store.paths

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad(), self.store.mapped() as array:
            function(to_torch(array))

    def tensor(self) -> torch.Tensor:
        mapped = np.load(self.store.paths[0], mmap_mode="r+")
        return to_torch(np.asarray(mapped.view(BFLOAT16) if self.dtype == BFLOAT16 else mapped))


class DeviceTable:
    """Rows in the memory of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # A view of the same memory.
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
        values = self._rows.index_select(0, self._index(rows)).view(self._tensor.dtype)
        return values.to(device, dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        converted = values.detach().to(self._tensor).view(self._rows.dtype)
        self._rows.index_copy_(0, self._index(rows), converted)

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        with torch.no_grad():
            function(self._tensor)

    def tensor(self) -> torch.Tensor:
        return self._tensor

    def close(self) -> None:
        """Do nothing: memory needs no closing."""

    def _index(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._tensor.device)


def in_memory(page_locked: bool) -> Placement:
    """Place tables in host memory, and page-lock it if ``page_locked`` is set and possible."""
    pin: Any = "auto" if page_locked else False
    return lambda shape, dtype, key: MemoryTable(PinnedStore.zeros(shape, dtype, pin=pin))


def on_device(device_type: str, page_locked: bool) -> Placement:
    """Place tables on a GPU if ``device_type`` is one and available, else in host memory.

    Raises:
        ArgumentError: If ``device_type`` is not a CPU or CUDA device.
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


def on_disk(name: str) -> Placement:
    """Place each table in a new .npy file, with the first unused number in its name."""
    # The process may change its working directory later.
    name = os.path.abspath(name)

    def create(shape: tuple[int, ...], dtype: np.dtype[Any], key: str) -> Table:
        paths = (f"{name}{number}.memmap{key}.cpy.npy" for number in itertools.count())
        free_path = next(path for path in paths if not os.path.exists(path))
        return FileTable(MmapStore.create(free_path, shape, dtype))

    return create


def table_dtype(value: Any) -> np.dtype[Any]:
    """Return the numpy dtype for the name of a dtype, a numpy dtype or a torch dtype.

    Raises:
        StoreError: If the value is not a dtype, or not one that both numpy and torch have.
    """
    try:
        found = numpy_dtype_of(value, "datatype")
    except StoreError:
        raise StoreError(
            f"datatype={value!r} is not a dtype; expected one of {', '.join(sorted(DTYPES))}"
        ) from None
    return check_dtype(found, "datatype")
