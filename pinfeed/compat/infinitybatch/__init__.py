"""The documented API of infinitybatch: ``import pinfeed.compat.infinitybatch as infinitybatch``.

Its three ways to train: ``ib(200)`` or ``ib.train(200)``; ``ib.epoch()``; and a loop of one's own:

    for inputs, targets in ib.dataloader:
        outputs = ib.batch_(inputs)
        loss = ib.criterion(outputs, targets)
        loss.backward()
        ib.step()
        ib.zero_grad()

or, with the last four as ``ib.loss()``, ``ib.backward()``, ``ib.step()``, ``ib.zero_grad()``.

What is different, because it gave wrong results or did not run:

- Memory is bounded. It kept what every sample of a batch needs for its backward pass, as the plain
  step does. Here a batch that fits is computed at once, and one that does not in chunks, each of
  which is computed again in the backward pass, with the same random numbers. How is decided as by
  ``pinfeed.BigBatch``, from what is free; ``ib.chosen`` says it. ``config``, ``chunk_size`` and
  ``strategy`` are new.
- Samples are computed together, not one by one: BatchNorm sees the whole batch (or there is an
  error that says what to do), and Dropout draws as it does for the whole batch, if that fits.
- Containers keep the last batch only; those of epochs that have ended are empty. They kept every
  tensor of the whole training. ``losses`` are numbers, and all of them are kept.
- Gradients that were there before an epoch of ``epoch()`` and ``train()`` are cleared; the first
  batch added to them.
- The README's programs run as they are printed: ``ib.optimier`` is the optimizer, and
  ``ib.batch_()`` takes the inputs of the batch that ``ib.dataloader`` gave last. (For that
  ``ib.dataloader`` is not the loader itself, but behaves like it.)
- Inputs, outputs and targets may be tuples and dicts. ``batch_`` gives no gradients to inputs.
- A dataloader without a batch, or a part that was not set, is an ``InfinityBatchError``.
  ``backward()`` without a loss warns, as was meant; errors of the backward pass are raised.
- ``cuda`` and ``cuda:0`` are the same device; ``changemodeldevice`` compares the devices, as was
  said.
- ``tools.is_equal_with_error`` is true of equal tensors, not of different ones, and takes tensors
  of any shape. ``free_cache`` of a snapshot exists. Without CUDA snapshots are of zeros.
  ``tools.CudaMemorySnapshot`` and ``CudaMemorySnapShot`` are the same.
"""

from __future__ import annotations

from pinfeed.compat.infinitybatch import tools
from pinfeed.compat.infinitybatch.manager import (
    InfinityBatch,
    InfinityBatchError,
    InfinityBatchWarning,
)

__all__ = ["InfinityBatch", "InfinityBatchError", "InfinityBatchWarning", "tools"]
