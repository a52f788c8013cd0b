"""Measurement of a training step: the peak memory of a few real steps of a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pinfeed.errors import EstimateError
from pinfeed.memory.host import resident_bytes, trim_heap
from pinfeed.tensors import rng_state
from pinfeed.training.memory_model.cublas_workspaces import clear_workspaces
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.models import call_model, tensors_of
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import SampleSpec, to_device

_N_STEPS = 3
"""Number of steps to run; in the first, libraries try algorithms and the optimizer gets state."""


def measure_steps(
    estimator: StepEstimator,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> int | None:
    """Return by how many bytes steps of a copy of the model raise the peak memory.

    The random generators do not change.

    Args:
        estimator: The model, the loss and the optimizer.
        batch_size: Samples of a batch.
        device: Device of the steps.
        make_batch: Makes inputs and targets, given a number of samples; None for random numbers.

    Returns:
        The growth of the memory that torch's allocator reserves on a GPU, or of the process on
        the CPU. None if memory ran out.
    """
    state = rng_state.capture()
    found = None
    try:
        found = _run_steps(estimator, batch_size, device, make_batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        rng_state.restore(state)
    # This is after the except block, because within the block the traceback keeps the
    # tensors of the failed frames alive.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _run_steps(
    estimator: StepEstimator,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> int:
    with _peak_growth(device) as growth:
        model, loss_of, stand_ins = _copies(estimator.model, estimator.loss, device)
        optimizer = estimator.optimizer_of(model, stand_ins)
        for _ in range(_N_STEPS):
            if make_batch is not None:
                inputs, targets = make_batch(batch_size)
            else:
                inputs, targets = _random_batch(estimator, batch_size)
            inputs = to_device(inputs, device)
            targets = to_device(targets, device)
            with estimator.autocast(device.type):
                outputs = call_model(model, inputs)
                loss = loss_of(outputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return growth()


@contextlib.contextmanager
def _peak_growth(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the growth of the peak since the beginning, in bytes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # The workspaces of earlier models would not count as growth, but the step needs its own.
        clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        reserved = torch.cuda.memory_reserved(device)
        yield lambda: torch.cuda.max_memory_reserved(device) - reserved
        return
    # The heap keeps freed memory, and the peak does not show its reuse.
    trim_heap()
    try:
        # Writing 5 resets the peak, see proc(5).
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise EstimateError(
            "probe() on the CPU resets the peak memory of this process, and that failed: "
            f"/proc/self/clear_refs cannot be written ({error}); expected a writable /proc; run it "
            "on a system that has one, or use the estimate (config.budget)"
        ) from None
    before = resident_bytes()["peak"] or 0
    yield lambda: (resident_bytes()["peak"] or 0) - before


def _copies(
    model: Any, loss: Any, device: torch.device
) -> tuple[nn.Module, Any, dict[int, torch.Tensor]]:
    """Return copies of model and loss on the device, and their tensors by the originals' ids."""
    memo: dict[int, Any] = {
        id(tensor): tensor.detach().clone() for tensor in _activations(model, loss)
    }
    made = copy.deepcopy(model, memo) if isinstance(model, nn.Module) else model()
    made_loss = copy.deepcopy(loss, memo).to(device) if isinstance(loss, nn.Module) else loss
    made = made.to(device)
    stand_ins: dict[int, torch.Tensor] = {}
    for old, new in ((model, made), (loss, made_loss)):
        if isinstance(old, nn.Module):
            originals = (*old.parameters(), *old.buffers())
            copies = (*new.parameters(), *new.buffers())
            pairs = zip(originals, copies, strict=True)
            stand_ins |= {id(before): after for before, after in pairs}
    return made if made.training else made.train(), made_loss, stand_ins


def _activations(*modules: Any) -> Iterator[torch.Tensor]:
    """Yield tensors of a graph that modules keep, which deepcopy refuses."""
    for module in (module for module in modules if isinstance(module, nn.Module)):
        yield from (tensor for tensor in tensors_of(module) if not tensor.is_leaf)


def _random_batch(estimator: StepEstimator, n: int) -> tuple[Any, Any]:
    """Return random inputs and targets; integers are zeros, because they may be row indices."""

    def batch(samples: SampleSpec | None) -> Any:
        return None if samples is None else samples.batch(n, _random_tensor)

    return batch(estimator.inputs), batch(estimator.targets)


def _random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    make = torch.rand if dtype.is_floating_point else torch.zeros
    return make(shape, dtype=dtype)
