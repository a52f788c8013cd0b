"""Real training steps of a copy of the model: their peak memory, and errors of memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pinfeed.errors import EstimateError
from pinfeed.memory.host import resident_bytes, trim_heap
from pinfeed.tensors import rng_state
from pinfeed.training.memory_model.cuda_memory import clear_workspaces
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.memory_model.training_step import TrainingStep, call_model, copies, tensors_of

_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    It recognises errors of torch, CUDA and its libraries, the CPU's allocator and numpy.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def release_cached_memory() -> None:
    """Free dead objects, and return the allocator's unused memory to the device.

    Call it after the ``except`` block of the error, because within the block the traceback keeps
    the tensors of the failed frames alive.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


_N_STEPS = 3
"""Number of steps to run; in the first, libraries try algorithms and the optimizer gets state."""


def measure_steps(
    step: TrainingStep,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> int | None:
    """Return by how many bytes steps of a copy of the model raise the peak memory.

    The random generators do not change.

    Args:
        step: The model, the loss and the optimizer.
        batch_size: Samples of a batch.
        device: Device of the steps.
        make_batch: Makes inputs and targets, given a number of samples; None for random numbers.

    Returns:
        The growth of the memory that torch's allocator reserves on a GPU, or of the process on
        the CPU. None if memory ran out.
    """
    found = None
    with _unchanged_generators():
        try:
            with _peak_growth(device) as growth:
                # Each step has two parts.
                steps = _parts_of_steps(step, batch_size, device, make_batch)
                for _ in itertools.islice(steps, 2 * _N_STEPS):
                    pass
                # The copy of the model is freed now, and not when this function returns.
                del steps
                found = growth()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    # This is after the except block, because within the block the traceback keeps the
    # tensors of the failed frames alive.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def peak_of_gradients(step: TrainingStep, batch_size: int) -> int:
    """Return the peak of the bytes that torch's CPU allocator holds for gradients of a batch.

    The forward and the backward pass of the second step are measured, after the optimizer has made
    its state. The peak includes the state and the model, a copy. Equal steps have equal peaks,
    because the allocator reports the calling thread's requests only, whatever memory is free.
    The random generators do not change.
    """
    with _unchanged_generators():
        parts = _parts_of_steps(step, batch_size, torch.device("cpu"), None)
        gc.collect()
        with _requests() as before:
            next(parts)
            next(parts)
        with _requests() as requests:
            next(parts)
    return sum(before) + max(itertools.accumulate(requests))


@contextlib.contextmanager
def _unchanged_generators() -> Iterator[None]:
    state = rng_state.capture()
    try:
        yield
    finally:
        rng_state.restore(state)


@contextlib.contextmanager
def _requests() -> Iterator[list[int]]:
    """Yield a list that gets the allocator's requests in this context: bytes, negative if freed."""
    # The newer profiler of torch prints messages. This one is deprecated; without it, an estimate
    # has no measured part.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch.autograd import profiler_legacy

    found: list[int] = []
    _enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())
    try:
        yield found
    finally:
        records = itertools.chain(*_disable_profiler_legacy())
        found += [one.cpu_memory_usage() for one in records if str(one.kind()) == "memory_alloc"]


def _parts_of_steps(
    step: TrainingStep,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> Iterator[None]:
    """Run steps of a copy of the model; yield after each backward pass and each optimizer step."""
    model, loss_of, stand_ins = _copies(step.model, step.loss, device)
    optimizer = step.optimizer_of(model, stand_ins)
    while True:
        if make_batch is not None:
            inputs, targets = make_batch(batch_size)
        else:
            inputs, targets = step.batch(batch_size, _random_tensor)
        inputs = to_device(inputs, device)
        targets = to_device(targets, device)
        with step.autocast(device.type):
            outputs = call_model(model, inputs)
            loss = loss_of(outputs, targets)
        loss.backward()
        yield
        optimizer.step()
        optimizer.zero_grad()
        yield


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
    # Modules may keep tensors of a graph, which deepcopy refuses.
    of_graph = [tensor for tensor in tensors_of(model, loss) if not tensor.is_leaf]
    made, made_loss = copies(model, loss, {id(one): one.detach().clone() for one in of_graph})
    stand_ins: dict[int, torch.Tensor] = {}
    for old, new in ((model, made), (loss, made_loss)):
        if isinstance(new, nn.Module):
            new.to(device)
        if isinstance(old, nn.Module):
            originals = (*old.parameters(), *old.buffers())
            copied = (*new.parameters(), *new.buffers())
            pairs = zip(originals, copied, strict=True)
            stand_ins |= {id(before): after for before, after in pairs}
    return made, made_loss, stand_ins


def _random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers; integers are zeros, because they may be row indices."""
    make = torch.rand if dtype.is_floating_point else torch.zeros
    return make(shape, dtype=dtype)
