"""Tables: rows in one place or several, and how they are made, shown, saved and loaded as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import torch

from pinfeed.compat.speedtorch.placement import HostTable, Place, Table, as_dtype
from pinfeed.errors import ArgumentError, ClosedError, FileMissing, StoreError
from pinfeed.stores import ArrayStore, MmapStore, Store
from pinfeed.tensors.dtypes import BFLOAT16
from pinfeed.tensors.numpy_torch import TORCH, memory_of
from pinfeed.training.atomic_write import atomic_write
from pinfeed.training.row_file import row_chunks

FileName = str | os.PathLike[str]


def copy_rows(source: Store, table: Table) -> None:
    """Copy all rows, piece by piece.

    Raises:
        StoreError: The shapes differ.
    """
    if (shape := (source.n_rows, *source.row_shape)) != table.shape:
        raise StoreError(f"a table of shape {shape} was saved; expected {table.shape}")
    values = HostTable(source)
    for start, stop in row_chunks(source):
        rows = np.arange(start, stop, dtype=np.int64)
        table.write(rows, values.read(rows, torch.device("cpu"), TORCH[source.dtype]))


def store_of(value: Any, name: str) -> ArrayStore:
    """The rows of a tensor that was saved.

    Raises:
        StoreError: It is no tensor, or not one of rows.
    """
    return ArrayStore(value.contiguous() if isinstance(value, torch.Tensor) else value, name=name)


@contextlib.contextmanager
def making() -> Iterator[dict[str, Table]]:
    """A dict for new tables; if they cannot be made or filled, their files do not stay."""
    tables: dict[str, Table] = {}
    try:
        yield tables
    except BaseException:
        for table in tables.values():
            for path in table.files:
                os.remove(path)
            table.close()
        raise


class Tables:
    """One table, or several with a key each, and what can be done with them as a whole."""

    _tables: dict[str, Table] | None = None
    # What makes them
    _init = "zerosInit()"

    def getNumpyVersion(self) -> Any:
        """A numpy copy of the table; of an optimizer's, a dict of copies by key of its state."""
        return self._shown(lambda table: memory_of(table.tensor().cpu()).copy())

    def getCupyVar(self) -> Any:
        """The table itself as a numpy array, shared (of a file: mapped; of a GPU: a read-only copy). There is no CuPy behind it."""
        return self._shown(_as_array)

    @property
    def CUPYcorpus(self) -> Any:
        """As ``getCupyVar()``."""
        return self.getCupyVar()

    def getTorchVar(self) -> Any:
        """The table itself as a torch tensor, shared, where it is."""
        return self._shown(lambda table: table.tensor())

    def close(self) -> None:
        """Flush and close the files, if any. Idempotent."""
        for table in (self._tables or {}).values():
            table.close()

    def _begin(self, tables: dict[str, Table]) -> None:
        """Go on with these tables."""
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
                f"{path}: the table has its rows in this file; save it under another name"
            )
        return atomic_write(os.path.realpath(path))

    def _all(self) -> dict[str, Table]:
        if self._tables is None:
            raise ClosedError(f"{type(self).__name__} has no table yet; call {self._init} first")
        return self._tables


class OneTable(Tables):
    """A table that is saved as a .npy file, or by torch."""

    datatype: np.dtype[Any]

    def saveCupy(self, saveFileName: FileName) -> None:
        """Save the table as a .npy file, which is there whole or as it was; the name gets .npy if it has not.

        In the table's own file the rows are already.
        """
        path = named(saveFileName, ".npy")
        if not self._has_rows_in(path):
            with atomic_write(os.path.realpath(path)) as file:
                np.save(file, memory_of(self._all()[""].tensor().cpu()))

    def loadCupy(self, loadFileName: FileName) -> None:
        """Take over the rows of a .npy file.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is of another shape.
        """
        # Which a .npy file cannot name.
        dtype = BFLOAT16 if self.datatype == BFLOAT16 else None
        with MmapStore(existing(loadFileName, ".npy"), dtype=dtype) as store:
            self._load(store)

    def saveTorch(self, saveFileName: FileName) -> None:
        """Save the table with ``torch.save``; the file is there whole or as it was.

        Raises:
            ArgumentError: The table has its rows in this file.
        """
        with self._writing(os.fspath(saveFileName)) as file:
            torch.save(self._all()[""].tensor().cpu(), file)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Take over the rows of a tensor that ``torch.save`` has saved; nothing else in the file is unpickled.

        Raises:
            FileMissing: There is no such file.
            StoreError: It is no tensor, or of another shape.
        """
        path = existing(loadFileName, "")
        self._load(store_of(torch.load(path, map_location="cpu", weights_only=True), path))

    def new_table(self) -> Table:
        """A table of zeros."""
        raise NotImplementedError

    def _load(self, store: Store) -> None:
        with making() as made:
            if self._tables is None:
                made[""] = self.new_table()
            tables = self._tables or made
            copy_rows(store, tables[""])
        self._begin(tables)


class CountTable(OneTable):
    """A square table of counts: which classes occur together.

    Args:
        total_classes: Rows and columns.
        datatype: Of the counts.
        place: Where the table is to be.
    """

    _init = "comInit()"

    def __init__(self, total_classes: int, datatype: Any, place: Place) -> None:
        self.total_classes = total_classes
        self.datatype = as_dtype(datatype)
        self._place = place

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the table, of zeros; ``getTorchVar()`` gives it to be counted in.

        ``CPUPinn`` is accepted: the constructor has it.
        """
        self._begin({"": self.new_table()})

    def new_table(self) -> Table:
        return self._place((self.total_classes, self.total_classes), self.datatype, "")


def named(name: FileName, suffix: str) -> str:
    """The name, with the suffix, as numpy's saving names it."""
    path = os.fspath(name)
    return path if path.endswith(suffix) else path + suffix


def existing(name: FileName, suffix: str) -> str:
    """The file, with the suffix that saving gave it, or as it is named.

    Raises:
        FileMissing: There is none.
    """
    for candidate in (named(name, suffix), os.fspath(name)):
        if os.path.isfile(candidate):
            return candidate
    raise FileMissing(f"{os.fspath(name)}: no such file (looked in {os.getcwd()})")


def _as_array(table: Table) -> Any:
    tensor = table.tensor()
    array = memory_of(tensor.cpu())
    if tensor.device.type != "cpu":
        # What is written into a copy would be lost.
        array.flags.writeable = False
    return array
