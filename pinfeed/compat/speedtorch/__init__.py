"""Drop-in replacement for SpeedTorch: ``import pinfeed.compat.speedtorch as SpeedTorch``.

Names, arguments and the order of calls are those of SpeedTorch's README. The tables are pinfeed
stores. A training step is:

    model_table.beforeForwardPass(pos, neg)
    state_table.beforeForwardPass(pos, neg)
    # The slots are the same for every batch:
    # slots = model_table.variableTransformer(batch, pos_per_batch, neg_per_batch)
    loss = model(*slots)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    model_table.afterOptimizerStep(pos, neg)
    state_table.afterOptimizerStep(pos, neg)

A slot is a row of the model's weight that holds one id of the batch.

The following behaviour differs, because the original gave wrong results or did not run:

- If an id occurs several times in a batch, each of its slots gets the sum of the gradients of all
  its slots. The slots stay equal, and the result is that of training the whole table. (A norm of
  ``weight.grad`` counts the sum once per slot.) An optimizer with state needs its OptimizerFactory
  for this. Without one, the state stays with the slots. If slots of one row then differ,
  ``afterOptimizerStep`` raises ``WriteBackError``. An optimizer whose step couples the rows of a
  parameter (Adafactor, Muon) sees the slots of the batch as the parameter.
- Ids that are negative or out of range raise ``RowIndexError``. In the original they wrapped
  around. A DataGadget accepts every index that numpy accepts.
- All row-wise optimizer state moves with its row, including SGD's momentum and Rprop's step sizes.
  A trial of the optimizer finds this state. It starts with the optimizer's own initial values, for
  example ``initial_accumulator_value``. State of the whole table, such as ``step``, stays in the
  optimizer.
- State is found by the parameter object. The optimizer may have only some of the model's
  parameters, in any order, and modules may be nested.
- An embedding with ``padding_idx`` or ``scale_grad_by_freq`` is refused, because these refer to
  ids. The original applied them to slots.
- Batches may differ in size: a gradient of another size is dropped. Only the rows of the last
  ``beforeForwardPass`` can be written back.
- Tables of optimizers can be saved and loaded, with their number of steps. ``saveCupy`` writes
  them as a .npz file. If saving fails, an existing file does not change.
- ``MM`` tables are files (``<diskname><N>.memmap.cpy.npy``). Their rows are read and written in
  place and are not held in memory. The same is true of a ``ModelFactory`` with ``diskname``.
- A DataGadget loads its file at its first use. ``gadgetInit()`` loads it at once, and loads it
  again if it was loaded before.
- A dtype may be a name, a numpy dtype or a torch dtype. It is the dtype of the table; the weight
  keeps its own.
- Random numbers come from torch's generator, or from the GPU's for a table on the GPU, so
  ``torch.manual_seed`` repeats them.
- Errors are raised, not printed. No call waits for the whole device, and CuPy's allocator is not
  changed.

Tensors are copied to the device of the weight. Tables are on the GPU, if the machine has one, for
CuPy classes without ``CPUPinn``, torch classes with ``deviceType="cuda"``, and the classes named
GPU. Other tables are in host memory or, for ``MM`` classes, in files. A DataGadget is always in
host memory.

GPU kernels do not read host memory, although the name ``CPUPinn`` implied that. The CPU gathers the
rows of a batch, from memory or from a file, into page-locked (pinned) memory, and the GPU copies
them from there. ``CPUPinn`` and ``pinType`` also page-lock the table if CuPy and a GPU are
available, although these copies do not need it. Otherwise the table is in ordinary memory.
"""

from __future__ import annotations

from pinfeed.compat.speedtorch.factories import (
    COM,
    COMMM,
    CPUPytorchCOM,
    CPUPytorchModelFactory,
    CPUPytorchOptimizerFactory,
    DataGadget,
    DataGadgetMM,
    GPUPytorchCOM,
    GPUPytorchModelFactory,
    GPUPytorchOptimizerFactory,
    ModelFactory,
    ModelFactoryMM,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchCOM,
    PytorchModelFactory,
    PytorchOptimizerFactory,
)

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


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__
