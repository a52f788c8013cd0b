"""DataGadget: rows of a file or an array, read to the GPU and written by numpy's indexing."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.compat.speedtorch.tables import (
    FileName,
    HostTable,
    Place,
    SingleTable,
    Table,
    as_numpy,
    copy_all_rows,
    find_file,
    staging_tensor,
)
from pinfeed.errors import RowIndexError, StoreError, WriteBackError, described
from pinfeed.stores import ArrayStore, NpyStore, PinnedStore, Store
from pinfeed.tensors.numpy_torch import TORCH, memory_of


class DataGadget(SingleTable):
    """Rows of a .npy file in host memory, which are read to the GPU and can be written.

    ``gadgetInit()`` loads the rows, or else the first method that needs them.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> np.save("rows.npy", np.arange(12, dtype="float32").reshape(4, 3))
        >>> gadget = speedtorch.DataGadget("rows.npy")
        >>> gadget.insertData(torch.zeros(3), 0)
        >>> gadget.getData([2, 0]).tolist()
        [[6.0, 7.0, 8.0], [0.0, 0.0, 0.0]]

    Args:
        fileName: Path of a file in C or Fortran order, or a pattern that matches several files; or
            an array, a CPU tensor or a Store.
        CPUPinn: Whether to page-lock the rows.
    """

    _init_method = "gadgetInit()"

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the rows now; otherwise the first method that needs rows loads them.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If the file is not a .npy file, or torch does not have its dtype.
        """
        self._open(self.fileName)

    def getData(self, indexes: Any) -> torch.Tensor:
        """Return a copy of ``array[indexes]`` on the GPU, or on the CPU of a machine without one.

        Args:
            indexes: Any index of numpy. Tensors on any device stand for arrays.

        Raises:
            RowIndexError: If an index is out of range or is not an index.
        """
        picked = self._picked(as_numpy(indexes))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        out = staging_tensor(picked.shape, TORCH[picked.dtype], device)
        memory_of(out)[...] = picked
        return out.to(device, non_blocking=True)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Do what ``array[indexes] = dataObject`` does; a repeated row gets its last value.

        Args:
            dataObject: A tensor on any device, an array or a number. It is converted to the dtype
                of the rows.
            indexes: Any index that ``getData`` accepts.

        Raises:
            RowIndexError: If an index is out of range or is not an index.
            WriteBackError: If the shapes do not match, or the values cannot be converted. In both
                cases no row changes.
        """
        index = as_numpy(indexes)
        array = self._array()
        try:
            array[index] = np.asarray(as_numpy(dataObject), dtype=array.dtype)
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            # This raises RowIndexError if the index is the cause.
            expected = self._picked(index).shape
            raise WriteBackError(
                f"insertData: {described(error)}; "
                f"expected values of shape {expected} that convert to {array.dtype}"
            ) from None

    def loadCupy(self, loadFileName: FileName) -> None:
        """Replace the rows by those of another .npy file, of any shape.

        ``insertData`` of a DataGadgetMM then writes to that file.

        Raises:
            FileMissing: If the file does not exist.
            StoreError: If ``gadgetInit`` refuses such a file.
        """
        self._open(find_file(loadFileName, ".npy"))

    def _all(self) -> dict[str, Table]:
        # Most of SpeedTorch's READMEs call getData right after the constructor.
        if self._tables is None:
            self.gadgetInit()
        return super()._all()

    def _load(self, store: Store) -> None:
        self._open(store)

    def _open(self, source: Any) -> None:
        store = PinnedStore(_in_c_order(source), pin="auto" if self.CPUPinn else False)
        self._use({"": HostTable(store)})
        self.fileName = source

    def _array(self) -> npt.NDArray[Any]:
        return memory_of(self._all()[""].tensor())

    def _picked(self, index: Any) -> npt.NDArray[Any]:
        array = self._array()
        try:
            return np.asarray(array[index])
        except (IndexError, TypeError, ValueError) as error:
            raise RowIndexError(
                f"indexes: {described(error)}; "
                f"expected an index that numpy accepts for an array of shape {array.shape}"
            ) from None


class DataGadgetMM(DataGadget):
    """Rows that stay in a .npy file; ``insertData`` writes to the file.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> np.save("rows.npy", np.arange(12, dtype="float32").reshape(4, 3))
        >>> gadget = speedtorch.DataGadgetMM("rows.npy")
        >>> gadget.insertData(torch.zeros(3), 0)
        >>> gadget.close()
        >>> np.load("rows.npy")[0].tolist()
        [0.0, 0.0, 0.0]

    Args:
        fileName: Path of a file in C order and this machine's byte order; or an array, a CPU tensor
            or a Store, whose rows are copied to a new file.
        CPUPinn: Has no effect, because the rows are not in memory.
        diskname: Beginning of the name of a new file.
    """

    def __init__(self, fileName: Any, CPUPinn: bool = False, diskname: str = "gadget") -> None:
        super().__init__(fileName, CPUPinn)
        self.diskname = diskname

    def _open(self, source: Any) -> None:
        if isinstance(source, (str, os.PathLike)):
            store = NpyStore(os.path.abspath(source), mode="r+")
            if len(store.paths) > 1 or np.load(store.paths[0], mmap_mode="r").dtype != store.dtype:
                raise StoreError(
                    f"{source}: DataGadgetMM writes to the file in place; expected one file in "
                    "this machine's byte order; use DataGadget, which makes a copy in memory"
                )
            self._use({"": HostTable(store)})
        else:
            rows = source if isinstance(source, Store) else ArrayStore(source, name="fileName")
            self._place = Place(file_name=self.diskname)
            self._shape = (rows.n_rows, *rows.row_shape)
            self.datatype = rows.dtype
            with self._filling() as tables:
                copy_all_rows(rows, tables[""])
        self.fileName = source


def _in_c_order(source: Any) -> Any:
    """Return the source, or for a .npy file in Fortran order a copy with contiguous rows."""
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        with contextlib.suppress(ValueError):
            # A ValueError says that it is not a .npy file. The store then raises a better error.
            array = np.lib.format.open_memmap(source, mode="r")
            return np.ascontiguousarray(array) if array.flags.fnc else source
    return source
