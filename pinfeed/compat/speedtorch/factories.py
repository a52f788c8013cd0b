"""SpeedTorch's classes: factories of tables in each place, and DataGadget for rows of a file.

A factory combines one of three kinds of table (WeightTable, StateTables, CountTable) with one of
five places. The place determines the arguments of the factory.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.compat.speedtorch.state_tables import StateTables
from pinfeed.compat.speedtorch.tables import (
    CountTable,
    FileName,
    HostTable,
    Place,
    SingleTable,
    Table,
    Tables,
    as_numpy,
    copy_all_rows,
    find_file,
    staging_tensor,
    table_dtype,
)
from pinfeed.compat.speedtorch.weight_table import WeightTable
from pinfeed.errors import RowIndexError, StoreError, WriteBackError, described
from pinfeed.stores import ArrayStore, NpyStore, PinnedStore, Store
from pinfeed.tensors.numpy_torch import TORCH, memory_of


class _Cupy(Tables):
    """The place of the classes without a prefix."""

    def _locate(self, CPUPinn: bool = False) -> None:
        self.CPUPinn = CPUPinn
        self._place = Place("cpu" if CPUPinn else "cuda", CPUPinn)


class _InFile(Tables):
    """The place of the classes named MM."""

    getCupyMM = Tables.getCupyVar

    def _locate(self, diskname: str, CPUPinn: bool = False) -> None:  # type: ignore[override]
        self.diskname = diskname
        self.CPUPinn = CPUPinn
        self._place = Place(file_name=diskname)


class _Pytorch(Tables):
    """The place of the classes named Pytorch."""

    def _locate(
        self, deviceType: str = "cuda", pinType: bool = False, CPUPinn: bool = False
    ) -> None:
        self.deviceType = "cpu" if CPUPinn else deviceType
        self.pinType = CPUPinn or pinType
        self._place = Place(self.deviceType, self.pinType)


class _OnGPU(Tables):
    """The place of the classes named GPU."""

    deviceType = "cuda"
    pinType = False
    _place = Place("cuda")


class _PageLocked(Tables):
    """The place of the classes named CPU."""

    deviceType = "cpu"
    pinType = True
    _place = Place("cpu", True)


class ModelFactory(_Cupy, WeightTable):
    """A table of embeddings on the GPU, or in host memory without a GPU.

    With ``CPUPinn`` it is in page-locked memory. With ``diskname``, which the first READMEs
    document, it is in a file, as in ``ModelFactoryMM``.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> embedding = torch.nn.Embedding(3, 16)  # a row for each slot of a batch
        >>> table = speedtorch.ModelFactory(embedding, 1000, 16)
        >>> table.normalDistributionInit(0, 0.1)
        >>> table.beforeForwardPass([5, 7], [999])
        >>> embedding.weight.shape
        torch.Size([3, 16])

    Raises:
        StoreError: If ``datatype`` is not a dtype. Give the name of a file as ``diskname=``.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
        diskname: str | None = None,
    ) -> None:
        try:
            table_dtype(datatype)
        except StoreError as error:
            # The first READMEs have diskname where datatype is now.
            raise StoreError(f"{error}; give the name of a file by keyword: diskname=") from None
        super().__init__(model_variable, total_classes, embed_dimension, datatype, CPUPinn)
        if diskname is not None:
            self.diskname = diskname
            self._place = Place(file_name=diskname)


class OptimizerFactory(_Cupy, StateTables):
    """Tables of an optimizer's row-wise state on the GPU, or in host memory without a GPU.

    With ``CPUPinn`` they are in page-locked memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 16))
        >>> adam = torch.optim.Adam(model.parameters())
        >>> table = speedtorch.OptimizerFactory(adam, 1000, 16, model, "0")
        >>> table.optInit()
        >>> sorted(table.getNumpyVersion())
        ['exp_avg', 'exp_avg_sq']
    """


class COM(_Cupy, CountTable):
    """A table of co-occurrence counts on the GPU, or in host memory without a GPU.

    With ``CPUPinn`` it is in page-locked memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> counts = speedtorch.COM(100)
        >>> counts.comInit()
        >>> counts.getTorchVar()[3, 7] = 1
        >>> int(counts.getNumpyVersion().sum())
        1
    """

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        super().__init__(total_classes, datatype, CPUPinn)


class ModelFactoryMM(_InFile, WeightTable):
    """A table of embeddings in a file; each call of an init method creates a new file.

    ``CPUPinn`` has no effect, because the rows are not in memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> embedding = torch.nn.Embedding(3, 16)  # a row for each slot of a batch
        >>> table = speedtorch.ModelFactoryMM(embedding, 1000, 16, diskname="words")
        >>> table.normalDistributionInit(0, 0.1)
        >>> table.beforeForwardPass([5, 7], [999])
        >>> embedding.weight.shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        diskname: str = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        place = (diskname, CPUPinn)
        super().__init__(model_variable, total_classes, embed_dimension, datatype, *place)


class OptimizerFactoryMM(_InFile, StateTables):
    """Tables of an optimizer's row-wise state, each in a file.

    ``diskname`` is the beginning of the file names; None is the name of the variable followed by
    the name of the optimizer's class. ``CPUPinn`` has no effect, because the rows are not in
    memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 16))
        >>> adam = torch.optim.Adam(model.parameters())
        >>> table = speedtorch.OptimizerFactoryMM(adam, 1000, 16, model, "0")
        >>> table.optInit()
        >>> sorted(table.getNumpyVersion())
        ['exp_avg', 'exp_avg_sq']
    """

    def _locate(self, CPUPinn: bool = False, diskname: str | None = None) -> None:  # type: ignore[override]
        optimizer = type(self.given_optimizer).__name__
        super()._locate(diskname or f"{self.variable_name}{optimizer}", CPUPinn)


class COMMM(_InFile, CountTable):
    """A table of co-occurrence counts in a file.

    ``CPUPinn`` has no effect, because the rows are not in memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> counts = speedtorch.COMMM(100)
        >>> counts.comInit()
        >>> counts.getTorchVar()[3, 7] = 1
        >>> int(counts.getNumpyVersion().sum())
        1
    """

    def __init__(
        self,
        total_classes: int,
        diskname: str = "COM",
        datatype: Any = "uint32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(total_classes, datatype, diskname, CPUPinn)


class PytorchModelFactory(_Pytorch, WeightTable):
    """A table of embeddings on the GPU or in host memory.

    ``deviceType="cpu"``, or a machine without a GPU, puts it in host memory; ``pinType`` page-locks
    that memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> embedding = torch.nn.Embedding(3, 16)  # a row for each slot of a batch
        >>> table = speedtorch.PytorchModelFactory(embedding, 1000, 16)
        >>> table.normalDistributionInit(0, 0.1)
        >>> table.beforeForwardPass([5, 7], [999])
        >>> embedding.weight.shape
        torch.Size([3, 16])
    """


class PytorchOptimizerFactory(_Pytorch, StateTables):
    """Tables of an optimizer's row-wise state on the GPU or in host memory.

    ``deviceType="cpu"``, or a machine without a GPU, puts them in host memory; ``pinType``
    page-locks that memory. ``CPUPinn=True``, which one of the READMEs documents,
    means ``deviceType="cpu", pinType=True``.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 16))
        >>> adam = torch.optim.Adam(model.parameters())
        >>> table = speedtorch.PytorchOptimizerFactory(adam, 1000, 16, model, "0")
        >>> table.optInit()
        >>> sorted(table.getNumpyVersion())
        ['exp_avg', 'exp_avg_sq']
    """


class PytorchCOM(_Pytorch, CountTable):
    """A table of co-occurrence counts on the GPU or in host memory.

    ``deviceType="cpu"``, or a machine without a GPU, puts it in host memory; ``pinType`` page-locks
    that memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> counts = speedtorch.PytorchCOM(100)
        >>> counts.comInit()
        >>> counts.getTorchVar()[3, 7] = 1
        >>> int(counts.getNumpyVersion().sum())
        1
    """


class GPUPytorchModelFactory(_OnGPU, WeightTable):
    """A table of embeddings on the GPU, or in host memory without a GPU.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> embedding = torch.nn.Embedding(3, 16)  # a row for each slot of a batch
        >>> table = speedtorch.GPUPytorchModelFactory(embedding, 1000, 16)
        >>> table.normalDistributionInit(0, 0.1)
        >>> table.beforeForwardPass([5, 7], [999])
        >>> embedding.weight.shape
        torch.Size([3, 16])
    """


class GPUPytorchOptimizerFactory(_OnGPU, StateTables):
    """Tables of an optimizer's row-wise state on the GPU, or in host memory without a GPU.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 16))
        >>> adam = torch.optim.Adam(model.parameters())
        >>> table = speedtorch.GPUPytorchOptimizerFactory(adam, 1000, 16, model, "0")
        >>> table.optInit()
        >>> sorted(table.getNumpyVersion())
        ['exp_avg', 'exp_avg_sq']
    """


class GPUPytorchCOM(_OnGPU, CountTable):
    """A table of co-occurrence counts on the GPU, or in host memory without a GPU.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> counts = speedtorch.GPUPytorchCOM(100)
        >>> counts.comInit()
        >>> counts.getTorchVar()[3, 7] = 1
        >>> int(counts.getNumpyVersion().sum())
        1
    """


class CPUPytorchModelFactory(_PageLocked, WeightTable):
    """A table of embeddings in page-locked memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> embedding = torch.nn.Embedding(3, 16)  # a row for each slot of a batch
        >>> table = speedtorch.CPUPytorchModelFactory(embedding, 1000, 16)
        >>> table.normalDistributionInit(0, 0.1)
        >>> table.beforeForwardPass([5, 7], [999])
        >>> embedding.weight.shape
        torch.Size([3, 16])
    """


class CPUPytorchOptimizerFactory(_PageLocked, StateTables):
    """Tables of an optimizer's row-wise state in page-locked memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 16))
        >>> adam = torch.optim.Adam(model.parameters())
        >>> table = speedtorch.CPUPytorchOptimizerFactory(adam, 1000, 16, model, "0")
        >>> table.optInit()
        >>> sorted(table.getNumpyVersion())
        ['exp_avg', 'exp_avg_sq']
    """


class CPUPytorchCOM(_PageLocked, CountTable):
    """A table of co-occurrence counts in page-locked memory.

    Examples:
        >>> from pinfeed.compat import speedtorch
        >>> counts = speedtorch.CPUPytorchCOM(100)
        >>> counts.comInit()
        >>> counts.getTorchVar()[3, 7] = 1
        >>> int(counts.getNumpyVersion().sum())
        1
    """


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
