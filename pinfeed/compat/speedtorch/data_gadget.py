"""DataGadget: rows of a file or of an array, to be taken to the GPU and back with the indexes of numpy."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.compat.speedtorch.placement import HostTable, Table, on_disk, staging
from pinfeed.compat.speedtorch.tables import FileName, OneTable, copy_rows, existing, making
from pinfeed.errors import RowIndexError, StoreError, WriteBackError, described
from pinfeed.stores import ArrayStore, MmapStore, PinnedStore, Store
from pinfeed.tensors.numpy_torch import TORCH, memory_of


class DataGadget(OneTable):
    """Rows of a .npy file in memory, to be taken to the GPU and back.

    The rows are loaded by ``gadgetInit()``, or by the first method that needs them.

    Args:
        fileName: The file, in C or Fortran order, or several as a pattern; or an array, a CPU
            tensor or a Store.
        CPUPinn: Whether to page-lock the rows.
    """

    _init = "gadgetInit()"

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the rows now. The methods that need rows call this themselves if it was not called.

        Raises:
            FileMissing: If there is no such file.
            StoreError: If it is not a .npy file, or its rows have a dtype that torch does not have.
        """
        self._take(self.fileName)

    def getData(self, indexes: Any) -> torch.Tensor:
        """What numpy would give for ``array[indexes]``, as a new tensor on the GPU, or on the host where there is none.

        Args:
            indexes: Whatever numpy takes; tensors on any device stand for arrays.

        Raises:
            RowIndexError: Out of range, or no index.
        """
        picked = self._picked(_for_numpy(indexes))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        out = staging(picked.shape, TORCH[picked.dtype], device)
        memory_of(out)[...] = picked
        return out.to(device, non_blocking=True)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Do what numpy would do for ``array[indexes] = dataObject``; of rows that repeat, the last one stays.

        Args:
            dataObject: A tensor on any device, an array or a number; converted to the dtype of the
                rows.
            indexes: As for ``getData``.

        Raises:
            RowIndexError: As for ``getData``.
            WriteBackError: The shapes do not match, or the values cannot be converted. Nothing has
                changed.
        """
        index, array = _for_numpy(indexes), self._array()
        try:
            array[index] = np.asarray(_for_numpy(dataObject), dtype=array.dtype)
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            # Unless the indexes are to blame.
            expected = self._picked(index).shape
            raise WriteBackError(
                f"insertData: {described(error)}; expected values of shape {expected} for {array.dtype}"
            ) from None

    def loadCupy(self, loadFileName: FileName) -> None:
        """Go on with another .npy file, of any shape.

        Raises:
            FileMissing: There is no such file.
            StoreError: As for ``gadgetInit``.
        """
        self._take(existing(loadFileName, ".npy"))

    def _all(self) -> dict[str, Table]:
        # Most READMEs call getData right after the constructor.
        if self._tables is None:
            self.gadgetInit()
        return super()._all()

    def _load(self, store: Store) -> None:
        self._take(store)

    def _take(self, source: Any) -> None:
        self._begin({"": self._opened(source)})
        self.fileName = source

    def _opened(self, source: Any) -> Table:
        return HostTable(PinnedStore(_rows_in_order(source), pin="auto" if self.CPUPinn else False))

    def _array(self) -> npt.NDArray[Any]:
        return memory_of(self._all()[""].tensor())

    def _picked(self, index: Any) -> npt.NDArray[Any]:
        array = self._array()
        try:
            return np.asarray(array[index])
        except (IndexError, TypeError, ValueError) as error:
            raise RowIndexError(
                f"indexes: {described(error)}; expected what numpy takes for an array of shape {array.shape}"
            ) from None


class DataGadgetMM(DataGadget):
    """Rows of a .npy file, which stay there: ``insertData`` writes them through.

    Args:
        fileName: The file, in C order and this machine's byte order; or an array, a CPU tensor or a
            Store, of which a file is made.
        CPUPinn: Accepted; rows of a file are not in memory.
        diskname: Of the file that is made.
    """

    def __init__(self, fileName: Any, CPUPinn: bool = False, diskname: str = "gadget") -> None:
        super().__init__(fileName, CPUPinn)
        self.diskname = diskname

    def loadCupy(self, loadFileName: FileName) -> None:
        """Go on with another .npy file, of any shape, which ``insertData`` will then change.

        Raises:
            FileMissing: There is no such file.
            StoreError: As for ``gadgetInit``.
        """
        super().loadCupy(loadFileName)

    def _opened(self, source: Any) -> Table:
        if isinstance(source, (str, os.PathLike)):
            store = MmapStore(os.path.abspath(source), mode="r+")
            if len(store.paths) > 1 or np.load(store.paths[0], mmap_mode="r").dtype != store.dtype:
                raise StoreError(
                    f"{source}: expected one file in this machine's byte order, to be read and written where it is; DataGadget takes a copy"
                )
            return HostTable(store)
        rows = source if isinstance(source, Store) else ArrayStore(source, name="fileName")
        with making() as tables:
            tables[""] = on_disk(self.diskname)((rows.n_rows, *rows.row_shape), rows.dtype, "")
            copy_rows(rows, tables[""])
        return tables[""]


def _for_numpy(value: Any) -> Any:
    """Tensors as arrays, also those in a tuple."""
    if isinstance(value, tuple):
        return tuple(map(_for_numpy, value))
    return memory_of(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


def _rows_in_order(source: Any) -> Any:
    """The source; of a .npy file in Fortran order a copy whose rows are contiguous."""
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with contextlib.suppress(ValueError):
            # No .npy file: the store has the words for it.
            array = np.lib.format.open_memmap(source, mode="r")
            return np.ascontiguousarray(array) if array.flags.fnc else source
    return source
