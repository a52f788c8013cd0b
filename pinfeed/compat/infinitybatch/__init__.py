"""Drop-in replacement for infinitybatch: ``import pinfeed.compat.infinitybatch as infinitybatch``.

It has the three ways to train of the original: ``ib(200)`` or ``ib.train(200)``; ``ib.epoch()``;
and a training loop of the user:

    for inputs, targets in ib.dataloader:
        outputs = ib.batch_(inputs)
        loss = ib.criterion(outputs, targets)
        loss.backward()
        ib.step()
        ib.zero_grad()

The last lines can also be ``ib.loss()``, ``ib.backward()``, ``ib.step()``, ``ib.zero_grad()``.

The following behaviour differs, because the original gave wrong results or did not run:

- Memory is bounded. The original kept what the backward pass of every sample needs, as the plain
  step does. Here a batch that fits is computed at once. A batch that does not fit is computed in
  chunks, each of which the backward pass computes again, with the same random numbers.
  ``pinfeed.BigBatch`` uses the same rules to choose, from the memory that is free, and
  ``ib.chosen`` shows the choice. ``config``, ``chunk_size`` and ``strategy`` are new.
- Samples are computed together, not one by one. BatchNorm sees the whole batch, or an error says
  what to do. Dropout draws the same numbers as for the whole batch, if the batch fits.
- Containers keep the last batch only, and those of past epochs are empty. The original kept every
  tensor of the whole training. ``losses`` are numbers, and all of them are kept.
- ``epoch()`` and ``train()`` clear existing gradients first. The first batch used to add to them.
- The README's programs run as they are printed: ``ib.optimier`` is the optimizer, and
  ``ib.batch_()`` uses the inputs of the batch that ``ib.dataloader`` gave last. For that,
  ``ib.dataloader`` is a wrapper that behaves like the loader.
- Inputs, outputs and targets may be tuples and dicts. ``batch_`` gives no gradients to inputs.
- A dataloader without a batch, or a missing setting, raises ``InfinityBatchError``.
  ``backward()`` without a loss warns, as intended. Errors of the backward pass are raised.
- ``cuda`` and ``cuda:0`` are the same device. ``changemodeldevice`` compares the devices, as
  documented.
- ``tools.is_equal_with_error`` is true for equal tensors, not for different ones, and accepts
  tensors of any shape. ``free_cache`` of a snapshot exists. Without CUDA, snapshots have zeros.
  ``tools.CudaMemorySnapshot`` and ``CudaMemorySnapShot`` are the same class.
"""

from __future__ import annotations

from pinfeed.compat.infinitybatch import tools
from pinfeed.compat.infinitybatch.manager import InfinityBatch
from pinfeed.compat.infinitybatch.settings import InfinityBatchError, InfinityBatchWarning

__all__ = ["InfinityBatch", "InfinityBatchError", "InfinityBatchWarning", "tools"]
