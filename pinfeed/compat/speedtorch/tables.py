"""Tables with SpeedTorch's methods, and where their rows are: on a GPU, in memory or in a file."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError, ClosedError, FileMissing, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, NpyStore, PinnedStore, Store
from pinfeed.tensors.dtypes import BFLOAT16, DTYPES, check_dtype, numpy_dtype_of
from pinfeed.tensors.numpy_torch import SIGNED, TORCH, memory_of, to_torch
from pinfeed.training.row_file import atomic_write, row_chunks


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


FileName = str | os.PathLike[str]


def with_suffix(name: FileName, suffix: str) -> str:
    """Return the name with the suffix, which is added if it is missing, as numpy does."""
    path = os.fspath(name)
    return path if path.endswith(suffix) else path + suffix


def find_file(name: FileName, suffix: str) -> str:
    """Return the path of a saved file: the name with the suffix, or else the name alone.

    Raises:
        FileMissing: If neither file exists.
    """
    for candidate in (with_suffix(name, suffix), os.fspath(name)):
        if os.path.isfile(candidate):
            return candidate
    raise FileMissing(
        f"{os.fspath(name)}: the file does not exist (working directory {os.getcwd()})"
    )


def copy_all_rows(source: Store, table: Table) -> None:
    """Copy all rows of a store into a table, in chunks.

    Raises:
        StoreError: If the shapes differ.
    """
    if (shape := (source.n_rows, *source.row_shape)) != table.shape:
        raise StoreError(f"the saved table has shape {shape}; expected {table.shape}")
    for start, stop in row_chunks(source):
        rows = np.arange(start, stop, dtype=np.int64)
        values = np.empty((len(rows), *source.row_shape), source.dtype)
        source.gather(rows, values)
        table.write(rows, to_torch(values))


def store_of_saved(value: Any, name: str) -> ArrayStore:
    """Return the rows of a saved tensor as a store.

    Raises:
        StoreError: If the value is not a tensor, or has no rows.
    """
    return ArrayStore(value.contiguous() if isinstance(value, torch.Tensor) else value, name=name)


class Tables:
    """Base of one table, or of several tables by key, that are shown and closed together."""

    _place: Place
    _tables: dict[str, Table] | None = None
    _init_method = "zerosInit()"
    """The method that creates the tables, for error messages."""

    def getNumpyVersion(self) -> Any:
        """Return a numpy copy of the table; for an optimizer, a dict of copies by state key."""
        return self._shown(lambda table: memory_of(table.tensor().cpu()).copy())

    def getCupyVar(self) -> Any:
        """Return the table as a numpy array that shares its memory; this does not use CuPy.

        The array of a table in a file is a memory map. The array of a table on a GPU is a read-only
        copy. For an optimizer, the result is a dict of arrays by state key.
        """
        return self._shown(_as_array)

    @property
    def CUPYcorpus(self) -> Any:
        """The table as ``getCupyVar()`` returns it."""
        return self.getCupyVar()

    def getTorchVar(self) -> Any:
        """Return the table as a torch tensor that shares its memory, on the table's device.

        For an optimizer, the result is a dict of tensors by state key.
        """
        return self._shown(lambda table: table.tensor())

    def saveTorch(self, saveFileName: FileName) -> None:
        """Save everything with ``torch.save``; if saving fails, an existing file does not change.

        Raises:
            ArgumentError: If a table has its rows in this file.
        """
        with self._writing(os.fspath(saveFileName)) as file:
            torch.save(self.snapshot(), file)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Load a file that ``saveTorch`` wrote, with ``weights_only=True``.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file belongs to another optimizer or another shape.
        """
        path = find_file(loadFileName, "")
        self.restore(torch.load(path, map_location="cpu", weights_only=True))

    def snapshot(self) -> Any:
        """Return everything that is saved."""
        raise NotImplementedError

    def restore(self, saved: Any) -> None:
        """Restore a snapshot."""
        raise NotImplementedError

    def close(self) -> None:
        """Flush and close the files, if any. May be called again."""
        for table in (self._tables or {}).values():
            table.close()

    def _locate(self) -> None:
        """Set the place of the tables by the last arguments of the factory, if it has some."""

    def _make(self, tables: dict[str, Table]) -> None:
        """Create the tables with their initial values, and add them to ``tables``."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _filling(self, *, anew: bool = True) -> Iterator[dict[str, Table]]:
        """Yield tables to fill: new ones, or the existing ones, if there are and not ``anew``.

        They are used after the block. If the block fails, the files of new tables are removed.
        """
        tables = self._tables
        made: dict[str, Table] = {}
        try:
            if anew or tables is None:
                self._make(made)
                tables = made
            yield tables
        except BaseException:
            for table in made.values():
                for path in table.files:
                    os.remove(path)
                table.close()
            raise
        self._use(tables)

    def _use(self, tables: dict[str, Table]) -> None:
        """Use these tables from now on, and close the previous ones."""
        if tables is not self._tables:
            self.close()
        self._tables = tables

    def _shown(self, view: Callable[[Table], Any]) -> Any:
        return view(self._all()[""])

    def _has_rows_in(self, path: str) -> bool:
        files = [file for table in self._all().values() for file in table.files]
        return os.path.realpath(path) in map(os.path.realpath, files)

    def _writing(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        if self._has_rows_in(path):
            raise ArgumentError(
                f"{path} is the file of the table itself; save the table under another name"
            )
        return atomic_write(os.path.realpath(path))

    def _all(self) -> dict[str, Table]:
        if self._tables is None:
            raise ClosedError(
                f"{type(self).__name__} has no table yet; call {self._init_method} first"
            )
        return self._tables


class SingleTable(Tables):
    """Base of a table that can be saved as a .npy file or with ``torch.save``."""

    datatype: np.dtype[Any]
    _shape: tuple[int, ...]

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save the table as a .npy file; if saving fails, an existing file does not change.

        ``.npy`` is added to the name if it is missing. Saving a table into its own file does
        nothing, because the file has the rows.
        """
        path = with_suffix(saveFileName, ".npy")
        if not self._has_rows_in(path):
            with atomic_write(os.path.realpath(path)) as file:
                np.save(file, memory_of(self.snapshot()))

    def loadCupy(self, loadFileName: FileName) -> None:
        """Load the rows of a .npy file.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file has another shape.
        """
        # A .npy file cannot name bfloat16.
        dtype = BFLOAT16 if self.datatype == BFLOAT16 else None
        with NpyStore(find_file(loadFileName, ".npy"), dtype=dtype) as store:
            self._load(store)

    def snapshot(self) -> torch.Tensor:
        """Return the table as a tensor on the CPU."""
        return self._all()[""].tensor().cpu()

    def restore(self, saved: Any) -> None:
        """Restore a snapshot.

        Raises:
            StoreError: If it is not a tensor of the table's shape.
        """
        self._load(store_of_saved(saved, "the saved table"))

    def _load(self, store: Store) -> None:
        with self._filling(anew=False) as tables:
            copy_all_rows(store, tables[""])

    def _make(self, tables: dict[str, Table]) -> None:
        tables[""] = self._place.new_table(self._shape, self.datatype)


class CountTable(SingleTable):
    """A square table that counts how often two classes occur together.

    Args:
        total_classes: Number of rows and of columns.
        datatype: Dtype of the counts.
        place: Arguments of the place of the factory.
        options: The same by name.
    """

    _init_method = "comInit()"

    def __init__(
        self, total_classes: int, datatype: Any = "int32", *place: Any, **options: Any
    ) -> None:
        self.total_classes = total_classes
        self.datatype = table_dtype(datatype)
        self._shape = (total_classes, total_classes)
        self._locate(*place, **options)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Create the table, filled with zeros. Count into the tensor of ``getTorchVar()``.

        ``CPUPinn`` has no effect here; give it to the constructor.
        """
        # A new table has zeros.
        with self._filling():
            pass


def _as_array(table: Table) -> Any:
    tensor = table.tensor()
    array = memory_of(tensor.cpu())
    if tensor.device.type != "cpu":
        # Values written to a copy would be lost, so the copy is read-only.
        array.flags.writeable = False
    return array
