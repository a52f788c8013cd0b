"""StepCopy: real training steps of a copy of the model; and errors that say that memory ran out."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

import torch
from torch import nn

from pinfeed.tensors import rng_state
from pinfeed.training.memory_model.training_step import (
    TrainingStep,
    autocast_context,
    call_model,
    copies,
    tensors_of,
)

_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # Version 9 of cuDNN.
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # torch, if no algorithm of cuDNN gets its workspace.
    "unable to find an engine to execute this computation",
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


class StepCopy:
    """Copy of a model with its loss and its optimizer, which trains on random numbers.

    The original stays unchanged.

    Args:
        step: The model, the loss and the optimizer.
        device: Device of the copy.

    Attributes:
        model: The copy of the model, in training mode.
        optimizer: The optimizer of the copy.
    """

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        self._step = step
        self._device = device
        model = step.model
        if not isinstance(model, nn.Module) and isinstance(made := model(), nn.Module):
            # A function may return a model that the program uses, so its result is copied, too.
            model = made
        # Modules may keep tensors of a graph, which deepcopy refuses.
        of_graph = [tensor for tensor in tensors_of(model, step.loss) if not tensor.is_leaf]
        stand_ins = {id(one): one.detach().clone() for one in of_graph}
        self.model, self._loss = copies(model, step.loss, stand_ins)
        for one in (self.model, self._loss):
            if isinstance(one, nn.Module):
                one.to(device)
        self.optimizer = step.optimizer_of(self.model, stand_ins)

    def phases(self, n_samples: int) -> Iterator[None]:
        """Train without end; yield after each forward pass, backward pass and optimizer step."""
        inputs, targets = self._step.batch(n_samples, self._random)
        while True:
            # These variables keep their values until the next step, as those of a training loop.
            with autocast_context(self._device.type, self._step.autocast):
                outputs = call_model(self.model, inputs)
                loss = self._loss(outputs, targets)
            yield
            loss.backward()
            yield
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return random numbers; integers are zeros, because they may be row indices."""
        make = torch.rand if dtype.is_floating_point else torch.zeros
        return make(shape, dtype=dtype, device=self._device)


def peak_of_gradients(step: TrainingStep, n_samples: int) -> int:
    """Return the peak of the bytes that torch's CPU allocator holds for gradients of a batch.

    The forward and the backward pass of the second step are measured, after the optimizer has made
    its state. The peak includes the state and the model, a copy. Equal steps have equal peaks,
    because the allocator reports the calling thread's requests only, whatever memory is free.
    """
    with isolated():
        gc.collect()
        with _requests() as before:
            phases = StepCopy(step, torch.device("cpu")).phases(n_samples)
            for _ in range(3):
                next(phases)
        with _requests() as requests:
            next(phases)
            next(phases)
    return sum(before) + max(itertools.accumulate(requests))


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Allow gradients in the block, and restore the random generators at its end."""
    state = rng_state.capture()
    try:
        with torch.inference_mode(False), torch.enable_grad():
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
