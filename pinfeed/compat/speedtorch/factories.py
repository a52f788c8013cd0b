"""SpeedTorch's factories: tables of weights, of optimizer state and of counts, in each place.

A factory combines one of three kinds of table (WeightTable, StateTables, CountTable) with one of
five places. The place determines the arguments of the factory.
"""

from __future__ import annotations

from typing import Any

from pinfeed.compat.speedtorch.state_tables import StateTables
from pinfeed.compat.speedtorch.tables import CountTable, Place, Tables, table_dtype
from pinfeed.compat.speedtorch.weight_table import WeightTable
from pinfeed.errors import StoreError


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
