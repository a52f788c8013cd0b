"""Tables on the host, on a GPU or on the disk: what the faces of SpeedTorch keep their rows in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from ..dtypes import BFLOAT16, dtype_of
from ..errors import ArgumentError, ClosedError, FileMissing, StoreError
from ..rows import Rows
from ..stores import ArrayStore, MmapStore, PinnedStore, Store
from ..tensors import NUMPY, TORCH, memory_of, to_torch
from ..training.embedding import pieces

FileName = str | os.PathLike[str]


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

    def close(self) -> None:
        """Flush and close a file. Idempotent."""


Place = Callable[[tuple[int, ...], np.dtype[Any], str], Table]
"""Given shape, dtype and key: a new table of zeros."""


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

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        # Page-locked, so that the copy need not wait: torch's allocator keeps the memory until the copy is done.
        out = torch.empty((len(rows), *self.store.row_shape), dtype=TORCH[self.dtype], pin_memory=device.type == "cuda")
        self.store.gather(rows, memory_of(out))
        return out.to(device, non_blocking=True).to(dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        self.store.scatter(rows, memory_of(values.detach().to("cpu", TORCH[self.dtype]).contiguous()))

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
            return to_torch(np.asarray(mapped if mapped.dtype == self.dtype else mapped.view(self.dtype)))
        assert isinstance(self.store, ArrayStore)
        return to_torch(self.store.array)

    def close(self) -> None:
        self.store.close()


class DeviceTable:
    """Rows in the memory of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return NUMPY[self._tensor.dtype]

    def read(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self._tensor.index_select(0, self._ids(rows)).to(device, dtype)

    def write(self, rows: Rows, values: torch.Tensor) -> None:
        self._tensor.index_copy_(0, self._ids(rows), values.detach().to(self._tensor))

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
    return lambda shape, dtype, key: HostTable(PinnedStore.zeros(shape, dtype, pin="auto" if page_locked else False))


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
    return lambda shape, dtype, key: DeviceTable(torch.zeros(shape, dtype=TORCH[dtype], device=device))


def on_disk(name: str) -> Place:
    """In a new .npy file, which takes the first number that is free."""

    def make(shape: tuple[int, ...], dtype: np.dtype[Any], key: str) -> Table:
        names = (f"{name}{number}.memmap{key}.cpy.npy" for number in itertools.count())
        return HostTable(MmapStore.create(next(path for path in names if not os.path.exists(path)), shape, dtype))

    return make


def as_dtype(value: Any) -> np.dtype[Any]:
    """The numpy dtype that a name, a numpy dtype or a torch dtype spells.

    Raises:
        StoreError: numpy and torch do not both have it.
    """
    if not isinstance(value, torch.dtype):
        return dtype_of(value, "datatype")
    if value not in NUMPY:
        raise StoreError(f"datatype {value}: expected one of {', '.join(map(str, NUMPY))}")
    return NUMPY[value]


def copy_rows(source: Store, table: Table) -> None:
    """Copy all rows, piece by piece.

    Raises:
        StoreError: The shapes differ.
    """
    if (shape := (source.n_rows, *source.row_shape)) != table.shape:
        raise StoreError(f"a table of shape {shape} was saved; expected {table.shape}")
    values = HostTable(source)
    for start, stop in pieces(source):
        rows = np.arange(start, stop, dtype=np.int64)
        table.write(rows, values.read(rows, torch.device("cpu"), TORCH[source.dtype]))


class Tables:
    """One table, or several with a key each, and what can be done with them as a whole."""

    _tables: dict[str, Table] | None = None
    _init = "zerosInit()"  # what makes them

    def getNumpyVersion(self) -> Any:
        """A numpy copy of the table; of an optimizer's, a dict of copies by key of its state."""
        return self._shown(lambda table: memory_of(table.tensor().cpu()).copy())

    def getCupyVar(self) -> Any:
        """The table itself as a numpy array, shared (of a file: mapped; of a GPU's memory: a copy). There is no CuPy behind it."""
        return self._shown(lambda table: memory_of(table.tensor().cpu()))

    def getTorchVar(self) -> Any:
        """The table itself as a torch tensor, shared, where it is."""
        return self._shown(lambda table: table.tensor())

    def close(self) -> None:
        """Flush and close the files, if any. Idempotent."""
        for table in (self._tables or {}).values():
            table.close()

    def _shown(self, view: Callable[[Table], Any]) -> Any:
        return view(self._all()[""])

    def _all(self) -> dict[str, Table]:
        if self._tables is None:
            raise ClosedError(f"{type(self).__name__} has no table yet; call {self._init} first")
        return self._tables


class OneTable(Tables):
    """A table that is saved as a .npy file, or by torch."""

    datatype: np.dtype[Any]

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save the table as a .npy file; the name gets .npy if it has not."""
        np.save(os.fspath(saveFileName), memory_of(self._all()[""].tensor().cpu()))

    def loadCupy(self, loadFileName: FileName) -> None:
        """Take over the rows of a .npy file.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another shape.
        """
        with self._saved(existing(loadFileName, ".npy")) as store:
            self._load(store)

    def saveTorch(self, saveFileName: FileName) -> None:
        """Save the table with ``torch.save``."""
        torch.save(self._all()[""].tensor().cpu(), saveFileName)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Take over the rows of a tensor that ``torch.save`` has saved; nothing else in the file is unpickled.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is no tensor, or of another shape.
        """
        saved = torch.load(existing(loadFileName, ""), map_location="cpu", weights_only=True)
        self._load(ArrayStore(saved.contiguous() if isinstance(saved, torch.Tensor) else saved, name=os.fspath(loadFileName)))

    def new_table(self) -> Table:
        """A table of zeros."""
        raise NotImplementedError

    def _saved(self, path: str) -> MmapStore:
        return MmapStore(path, dtype=BFLOAT16 if self.datatype == BFLOAT16 else None)  # which a .npy file cannot name

    def _load(self, store: Store) -> None:
        table = self._tables[""] if self._tables is not None else self.new_table()
        copy_rows(store, table)
        self._tables = {"": table}


class CountTable(OneTable):
    """A square table of counts: which classes occur together.

    Args:
        total_classes: Rows and columns.
        datatype: Of the counts.
        place: Where the table is to be.
    """

    _init = "comInit()"

    def __init__(self, total_classes: int, datatype: Any, place: Place) -> None:
        self.total_classes, self.datatype, self._place = total_classes, as_dtype(datatype), place

    def comInit(self) -> None:
        """Make the table, of zeros; ``getCupyVar()`` and ``getTorchVar()`` give it to be counted in."""
        self.close()
        self._tables = {"": self.new_table()}

    def new_table(self) -> Table:
        return self._place((self.total_classes, self.total_classes), self.datatype, "")


def existing(name: FileName, suffix: str) -> str:
    """The file, with the suffix that saving gave it.

    Raises:
        FileMissing: There is none.
    """
    path = os.fspath(name)
    for candidate in (path, path + suffix):
        if os.path.isfile(candidate):
            return candidate
    raise FileMissing(f"{path}: no such file (looked in {os.getcwd()})")
