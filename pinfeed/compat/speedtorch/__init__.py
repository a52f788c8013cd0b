"""The documented API of SpeedTorch: ``import pinfeed.compat.speedtorch as SpeedTorch``.

Names, arguments and the order of calls are those of its README; tables are pinfeed stores. A step
is:

    model_table.beforeForwardPass(pos, neg)
    state_table.beforeForwardPass(pos, neg)
    loss = model(*static_indexes)  # of model_table.variableTransformer(batch, pos_per_batch, neg_per_batch)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    model_table.afterOptimizerStep(pos, neg)
    state_table.afterOptimizerStep(pos, neg)

What is different, because it gave wrong results or did not run:

- An id that occurs several times in a batch has its gradients summed over its slots, and each slot
  gets the sum: all of them evolve alike, and the table is that of training the whole of it. (A norm
  of ``weight.grad`` counts the sum once for each slot.) An optimizer that keeps state needs its
  OptimizerFactory for this: without one its state stays with the slots, and where slots of one row
  are found to differ, ``afterOptimizerStep`` is a ``WriteBackError``. An optimizer whose step
  couples the rows of a parameter (Adafactor, Muon) takes the slots of the batch for the parameter.
- Ids that are negative or out of range are a ``RowIndexError``; they wrapped around. (A DataGadget
  takes all indexes of numpy.)
- All row-wise state travels with its row, found out by trying the optimizer: SGD's momentum and
  Rprop's step sizes too. It begins as the optimizer begins it: ``initial_accumulator_value``
  counts. State that is one for the table, ``step`` say, stays in the optimizer.
- State is found by the parameter itself: the optimizer may have some of the parameters only, in any
  order, and modules may be nested.
- ``padding_idx`` and ``scale_grad_by_freq`` of an embedding mean ids and are refused; they were
  applied to slots.
- Batches may differ in size: a gradient of another size is dropped. Rows that were not lent cannot
  be brought back.
- Tables of optimizers can be saved and loaded, with their number of steps: ``saveCupy`` makes a
  .npz of them. Files are there whole, or as they were.
- ``MM`` tables are files (``<diskname><N>.memmap.cpy.npy``), whose rows are read and written where
  they are, not held in memory. So is the table of a ``ModelFactory`` that is given ``diskname``.
- A DataGadget loads its file when it is first used; ``gadgetInit()`` loads it at once, and reads
  the file again if it was loaded before.
- A dtype may be a name, a numpy dtype or a torch dtype. The table has it; the weight keeps its own.
- Random numbers come from torch's generator, of the GPU for a table that is there:
  ``torch.manual_seed`` repeats them.
- Errors are raised, not printed. No call waits for the whole device, and CuPy's allocator is left
  alone.

Tensors come to where the weight is. The tables of the CuPy classes without ``CPUPinn``, of the
torch classes with ``deviceType="cuda"`` and of those named GPU are on the GPU, if there is one;
others are in memory or, ``MM``, in files. A DataGadget is in memory in any case.

No kernel of the GPU reads memory of the host, as ``CPUPinn`` once meant. The CPU gathers the rows
of a batch, from memory or from a file, into page-locked memory, and they are copied from there.
``CPUPinn`` and ``pinType`` page-lock the table too, if CuPy and a GPU are there (else it is in
ordinary memory); these copies do not need it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pinfeed.compat.speedtorch.data_gadget import DataGadget, DataGadgetMM
from pinfeed.compat.speedtorch.optimizer_state import StateTables
from pinfeed.compat.speedtorch.placement import Place, as_dtype, on_device, on_disk
from pinfeed.compat.speedtorch.tables import CountTable
from pinfeed.compat.speedtorch.weights import WeightTable
from pinfeed.errors import StoreError

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
]


def _on_gpu_unless(CPUPinn: bool) -> Place:
    return on_device("cpu" if CPUPinn else "cuda", CPUPinn)


class ModelFactory(WeightTable):
    """A table of embeddings on the GPU, if there is one, or with ``CPUPinn`` in page-locked memory.

    With ``diskname``, which the first READMEs document, the table is in a file, as that of
    ``ModelFactoryMM``.

    Raises:
        StoreError: If ``datatype`` is not a dtype; the name of a file is passed as ``diskname=``.
    """

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32", CPUPinn: bool = False,
        diskname: str | None = None,
    ) -> None:  # fmt: skip
        try:
            as_dtype(datatype)
        except StoreError as error:
            # The first READMEs have diskname where datatype is now.
            raise StoreError(
                f"{error}; the name of a file is passed by keyword, as diskname="
            ) from None
        place = _on_gpu_unless(CPUPinn) if diskname is None else on_disk(diskname)
        super().__init__(model_variable, total_classes, embed_dimension, datatype, place)
        self.CPUPinn = CPUPinn
        if diskname is not None:
            self.diskname = diskname


class OptimizerFactory(StateTables):
    """Tables of the row-wise state of an optimizer on the GPU, if there is one, or with ``CPUPinn`` in page-locked memory."""

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any = "float32", CPUPinn: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            _on_gpu_unless(CPUPinn),
        )
        self.CPUPinn = CPUPinn


class COM(CountTable):
    """A table of co-occurrences on the GPU, if there is one, or with ``CPUPinn`` in page-locked memory."""

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        super().__init__(total_classes, datatype, _on_gpu_unless(CPUPinn))
        self.CPUPinn = CPUPinn


class ModelFactoryMM(WeightTable):
    """A table of embeddings in a file; each initialisation makes a new one.

    ``CPUPinn`` is accepted: the rows are not in memory.
    """

    getCupyMM = WeightTable.getCupyVar  # noqa: N815 - its documented name

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, diskname: str = "variable", datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, on_disk(diskname)
        )
        self.diskname = diskname
        self.CPUPinn = CPUPinn


class OptimizerFactoryMM(StateTables):
    """Tables of the row-wise state of an optimizer, each in a file; ``diskname`` is the variable's and the optimizer's if None."""

    getCupyMM = StateTables.getCupyVar  # noqa: N815 - its documented name

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any = "float32", CPUPinn: bool = False, diskname: str | None = None,
    ) -> None:  # fmt: skip
        self.diskname = diskname or f"{variable_name}{type(given_optimizer).__name__}"
        self.CPUPinn = CPUPinn
        super().__init__(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            on_disk(self.diskname),
        )


class COMMM(CountTable):
    """A table of co-occurrences in a file. ``CPUPinn`` is accepted: the rows are not in memory."""

    getCupyMM = CountTable.getCupyVar  # noqa: N815 - its documented name

    def __init__(
        self,
        total_classes: int,
        diskname: str = "COM",
        datatype: Any = "uint32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(total_classes, datatype, on_disk(diskname))
        self.diskname = diskname
        self.CPUPinn = CPUPinn


class PytorchModelFactory(WeightTable):
    """A table of embeddings on the GPU, if there is one, or in memory, page-locked if ``pinType``."""

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32", deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, on_device(deviceType, pinType)
        )
        self.deviceType = deviceType
        self.pinType = pinType


class PytorchOptimizerFactory(StateTables):
    """Tables of the row-wise state of an optimizer on the GPU, if there is one, or in memory, page-locked if ``pinType``.

    ``CPUPinn=True``, which one of the READMEs documents, means ``deviceType="cpu", pinType=True``.
    """

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any = "float32", deviceType: str = "cuda", pinType: bool = False, CPUPinn: bool = False,
    ) -> None:  # fmt: skip
        self.deviceType = "cpu" if CPUPinn else deviceType
        self.pinType = CPUPinn or pinType
        place = on_device(self.deviceType, self.pinType)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, place
        )


class PytorchCOM(CountTable):
    """A table of co-occurrences on the GPU, if there is one, or in memory, page-locked if ``pinType``."""

    def __init__(
        self,
        total_classes: int,
        datatype: Any = "int32",
        deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:
        super().__init__(total_classes, datatype, on_device(deviceType, pinType))
        self.deviceType = deviceType
        self.pinType = pinType


class GPUPytorchModelFactory(PytorchModelFactory):
    """A table of embeddings on the GPU, if there is one."""

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype, "cuda")


class GPUPytorchOptimizerFactory(PytorchOptimizerFactory):
    """Tables of the row-wise state of an optimizer on the GPU, if there is one."""

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, "cuda"
        )


class GPUPytorchCOM(PytorchCOM):
    """A table of co-occurrences on the GPU, if there is one."""

    def __init__(self, total_classes: int, datatype: Any = "int32") -> None:
        super().__init__(total_classes, datatype, "cuda")


class CPUPytorchModelFactory(PytorchModelFactory):
    """A table of embeddings in page-locked memory."""

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype, "cpu", True)


class CPUPytorchOptimizerFactory(PytorchOptimizerFactory):
    """Tables of the row-wise state of an optimizer in page-locked memory."""

    def __init__(
        self, given_optimizer: torch.optim.Optimizer, total_classes: int, embed_dimension: int, model: nn.Module, variable_name: str,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            "cpu",
            True,
        )


class CPUPytorchCOM(PytorchCOM):
    """A table of co-occurrences in page-locked memory."""

    def __init__(self, total_classes: int, datatype: Any = "int32") -> None:
        super().__init__(total_classes, datatype, "cpu", True)
