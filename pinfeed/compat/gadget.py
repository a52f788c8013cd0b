"""DataGadget: rows of a file or of an array, to be taken to the GPU and back with the indexes of numpy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..batches import check_rows
from ..errors import RowIndexError, WriteBackError
from ..rows import Rows
from ..stores import ArrayStore, MmapStore, PinnedStore, Store
from ..tensors import TORCH, memory_of, to_torch
from .tables import FileName, HostTable, OneTable, Table, copy_rows, existing, on_disk


class DataGadget(OneTable):
    """Rows of a .npy file in memory, to be taken to the GPU and back.

    Args:
        fileName: The file; or an array, a CPU tensor or a Store.
        CPUPinn: Whether to page-lock the rows.
    """

    _init = "gadgetInit()"

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        self.fileName, self.CPUPinn = fileName, CPUPinn

    def gadgetInit(self) -> None:
        """Load the rows.

        Raises:
            FileMissing: There is no such file.
            StoreError: Not a .npy file, or not rows that torch can have.
        """
        self.close()
        self._tables = {"": self._opened(self.fileName)}

    def getData(self, indexes: Any) -> torch.Tensor:
        """What numpy would give for ``array[indexes]``, as a new tensor on the GPU, or on the host where there is none.

        Args:
            indexes: An integer, a slice, a mask, an array, a list or a tensor of row numbers, or a tuple that begins with one of these.

        Raises:
            RowIndexError: Row numbers that are negative or too large, or something that is no index of rows.
        """
        rows, part = self._index(indexes)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        picked = np.asarray(self._read(rows)[part], order="C")
        return to_torch(picked).to(device)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Do what numpy would do for ``array[indexes] = dataObject``; of rows that repeat, the last one stays.

        Args:
            dataObject: A tensor on any device, an array or a number; converted to the dtype of the rows.
            indexes: As for ``getData``.

        Raises:
            RowIndexError: As for ``getData``.
            WriteBackError: The shapes do not match.
        """
        rows, part = self._index(indexes)
        block = self._read(rows)
        values = memory_of(dataObject.detach().cpu()) if isinstance(dataObject, torch.Tensor) else np.asarray(dataObject)
        try:
            block[part] = values
        except ValueError as error:
            raise WriteBackError(f"insertData: {error}; expected values of shape {block[part].shape}") from None
        self._all()[""].write(rows, to_torch(block))

    def loadCupy(self, loadFileName: FileName) -> None:
        """Load another .npy file, of any shape."""
        self.fileName = existing(loadFileName, ".npy")
        self.gadgetInit()

    def _load(self, store: Store) -> None:
        self.fileName = store
        self.gadgetInit()

    def _opened(self, source: Any) -> Table:
        return HostTable(PinnedStore(source, pin="auto" if self.CPUPinn else False))

    def _read(self, rows: Rows) -> npt.NDArray[Any]:
        table = self._all()[""]
        return memory_of(table.read(rows, torch.device("cpu"), TORCH[table.dtype]))

    def _index(self, indexes: Any) -> tuple[Rows, tuple[Any, ...]]:
        """Rows, each once, and what to index them with to get what ``indexes`` means."""
        n_rows = self._all()[""].shape[0]
        given = indexes if isinstance(indexes, tuple) else (indexes,)
        first, *rest = (each.detach().cpu().numpy() if isinstance(each, torch.Tensor) else each for each in given or (slice(None),))
        if first is Ellipsis and not rest:
            first = slice(None)
        if isinstance(first, slice):
            rows = np.arange(*first.indices(n_rows), dtype=np.int64)
            return rows, (slice(None), *rest)
        array = np.asarray(first)
        if array.dtype == bool and array.ndim:
            if array.shape != self._all()[""].shape[: array.ndim]:
                raise RowIndexError(f"indexes: a mask of shape {array.shape} for rows of shape {self._all()[''].shape}")
            array, *masked = np.nonzero(array)
            rest = [*masked, *rest]
        if first is None or first is Ellipsis:
            raise RowIndexError(f"indexes={indexes!r}: expected row numbers first")
        rows, inverse = np.unique(check_rows(array.reshape(-1), n_rows, "indexes"), return_inverse=True)
        return rows, (inverse.reshape(array.shape) if array.ndim else 0, *rest)


class DataGadgetMM(DataGadget):
    """Rows of a .npy file, which stay there: ``insertData`` writes them through.

    Args:
        fileName: The file; or an array, a CPU tensor or a Store, of which a file is made.
        CPUPinn: Accepted; rows of a file are not in memory.
        diskname: Of the file that is made.
    """

    def __init__(self, fileName: Any, CPUPinn: bool = False, diskname: str = "gadget") -> None:
        super().__init__(fileName, CPUPinn)
        self.diskname = diskname

    def _opened(self, source: Any) -> Table:
        if isinstance(source, (str, os.PathLike)):
            return HostTable(MmapStore(source, mode="r+"))
        store = source if isinstance(source, Store) else ArrayStore(source, name="fileName")
        table = on_disk(self.diskname)((store.n_rows, *store.row_shape), store.dtype, "")
        copy_rows(store, table)
        return table
