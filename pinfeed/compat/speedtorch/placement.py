"""Place and Table: where the rows of a table are: on a GPU, in host memory or in a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, NpyStore, PinnedStore
from pinfeed.tensors.dtypes import DTYPES, check_dtype, numpy_dtype_of
from pinfeed.tensors.numpy_torch import SIGNED, TORCH, memory_of, to_torch


def staging_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate host memory for values that are then copied to a device.

    For a GPU, the memory is page-locked, so that the copy is asynchronous. torch's allocator keeps
    the memory until the copy has completed.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def as_numpy(value: Any) -> Any:
    """Return ids or an index with arrays in place of tensors, also within a tuple."""
    if isinstance(value, tuple):
        return tuple(map(as_numpy, value))
    return memory_of(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


class Table:
    """Rows of a table, of any dtype."""

    shape: tuple[int, ...]
    files: Sequence[str] = ()
    """Paths of the files that hold the rows."""

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, which may repeat, as a new tensor of shape (n, *row_shape)."""
        raise NotImplementedError

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        """Store the values as the rows. Each row occurs once."""
        raise NotImplementedError

    def tensor(self) -> torch.Tensor:
        """Return the table itself, sharing its memory."""
        raise NotImplementedError

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        """Call a function with the whole table as a tensor, which the function fills in place."""
        with torch.no_grad():
            function(self.tensor())

    def close(self) -> None:
        """Flush and close the file, if there is one. May be called again."""


class HostTable(Table):
    """Rows on the host: in memory or in one .npy file."""

    def __init__(self, store: ArrayStore | NpyStore) -> None:
        self._store = store
        self.shape = (store.n_rows, *store.row_shape)
        self.files = store.paths if isinstance(store, NpyStore) else ()

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        out = staging_tensor((len(rows), *self.shape[1:]), TORCH[self._store.dtype], device)
        self._store.gather(rows, memory_of(out))
        return out.to(device, non_blocking=True).to(dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        on_host = values.detach().to("cpu", TORCH[self._store.dtype]).contiguous()
        self._store.scatter(rows, memory_of(on_host))

    def tensor(self) -> torch.Tensor:
        store = self._store
        return to_torch(store.array if isinstance(store, ArrayStore) else store.map_to_write())

    def fill(self, function: Callable[[torch.Tensor], Any]) -> None:
        if isinstance(self._store, ArrayStore):
            super().fill(function)
            return
        # The rows are on the disk when the context ends.
        with torch.no_grad(), self._store.mapped() as array:
            function(to_torch(array))

    def close(self) -> None:
        self._store.close()


class DeviceTable(Table):
    """Rows in the memory of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # A view of the same memory, because torch selects and copies only rows of signed integers.
        self._rows = tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))
        self.shape = tuple(tensor.shape)

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        values = self._rows.index_select(0, self._index(rows)).view(self._tensor.dtype)
        return values.to(device, dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        converted = values.detach().to(self._tensor).view(self._rows.dtype)
        self._rows.index_copy_(0, self._index(rows), converted)

    def tensor(self) -> torch.Tensor:
        return self._tensor

    def _index(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._tensor.device)


@dataclass(frozen=True)
class Place:
    """The place of a factory's tables.

    Args:
        device_type: ``"cuda"`` for a GPU, or host memory on a machine without one; ``"cpu"`` for
            host memory.
        page_locked: Whether to page-lock host memory, if this is possible.
        file_name: Beginning of the names of the files that have the rows; None for memory.

    Raises:
        ArgumentError: If ``device_type`` is not a CPU or CUDA device.
    """

    device_type: str = "cuda"
    page_locked: bool = False
    file_name: str | None = None

    def __post_init__(self) -> None:
        try:
            found = torch.device(self.device_type).type
        except RuntimeError as error:
            raise ArgumentError(f"deviceType={self.device_type!r}: {error}") from None
        if found not in ("cpu", "cuda"):
            raise ArgumentError(f"deviceType={self.device_type!r}: expected 'cuda' or 'cpu'")
        if self.file_name is not None:
            # The process may change its working directory later.
            object.__setattr__(self, "file_name", os.path.abspath(self.file_name))

    def new_table(self, shape: tuple[int, ...], dtype: np.dtype[Any], key: str = "") -> Table:
        """Create a table of zeros; ``key`` is a part of the name of its new file."""
        if self.file_name is not None:
            # The name has the first unused number.
            paths = (f"{self.file_name}{i}.memmap{key}.cpy.npy" for i in itertools.count())
            free_path = next(path for path in paths if not os.path.exists(path))
            return HostTable(NpyStore.create(free_path, shape, dtype))
        device = torch.device(self.device_type)
        if device.type == "cuda" and torch.cuda.is_available():
            return DeviceTable(torch.zeros(shape, dtype=TORCH[dtype], device=device))
        pin: Any = "auto" if self.page_locked else False
        return HostTable(PinnedStore.zeros(shape, dtype, pin=pin))


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
