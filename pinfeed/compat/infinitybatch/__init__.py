"""Drop-in replacement for infinitybatch: ``import pinfeed.compat.infinitybatch as infinitybatch``.

It has the three ways to train of the original: ``ib(200)`` or ``ib.train(200)``, ``ib.epoch()``,
and the user's own training loop:

    for inputs, targets in ib.dataloader:
        outputs = ib.batch_(inputs)
        loss = ib.criterion(outputs, targets)
        loss.backward()
        ib.step()
        ib.zero_grad()

The last lines can also be ``ib.loss()``, ``ib.backward()``, ``ib.step()``, ``ib.zero_grad()``.

The following behaviour differs, because the original gave wrong results or did not run:

- Memory is bounded. The original kept the activations of every sample until the backward pass, as
  the plain step does. Here a batch that fits in memory is computed at once. A batch that does not
  fit is computed in chunks, and the backward pass computes each chunk again with the same random
  numbers. The choice follows the rules of ``pinfeed.BigBatch`` and the free memory; ``ib.chosen``
  shows it. ``config``, ``chunk_size`` and ``strategy`` are new.
- Samples are computed together, not one by one. BatchNorm sees the whole batch, or an error says
  what to do. Dropout draws the same numbers as for the whole batch, if the batch fits.
- Containers keep the last batch only, and containers of past epochs are empty. The original kept
  every tensor of the whole training. ``losses`` are numbers, and all losses are kept.
- ``epoch()`` and ``train()`` clear existing gradients first. In the original, the first batch added
  to them.
- The README's programs run as they are printed: ``ib.optimier`` is the optimizer, and
  ``ib.batch_()`` uses the inputs of the batch that ``ib.dataloader`` yielded last. For that,
  ``ib.dataloader`` is a wrapper that behaves like the loader.
- Inputs, outputs and targets may be tuples and dicts. ``batch_`` gives no gradients to inputs.
- A dataloader without a batch, or a missing setting, raises ``InfinityBatchError``.
  ``backward()`` without a loss warns, as the original intended. Errors of the backward pass are
  raised.
- ``cuda`` and ``cuda:0`` are the same device. ``changemodeldevice`` compares the devices, as
  documented.
- ``tools.is_equal_with_error`` is true for equal tensors, not for different ones, and accepts
  tensors of any shape. Snapshots have ``free_cache``, and are zeros without CUDA.
  ``tools.CudaMemorySnapshot`` and ``CudaMemorySnapShot`` are the same class.

``evaluate``, ``callbacks``, ``history``, ``stop``, warnings of a forgotten ``step`` or
``zero_grad``, memory of the process and of inactive blocks in snapshots, and ``CudaHistory.save``
are new. The authors of the original planned most of them.
"""

from __future__ import annotations

from pinfeed.compat.infinitybatch import tools
from pinfeed.compat.infinitybatch.history import History, Record
from pinfeed.compat.infinitybatch.infinity_batch import InfinityBatch, InfinityBatchError
from pinfeed.compat.infinitybatch.missing_calls import InfinityBatchWarning

__all__ = [
    "History",
    "InfinityBatch",
    "InfinityBatchError",
    "InfinityBatchWarning",
    "Record",
    "tools",
]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__
