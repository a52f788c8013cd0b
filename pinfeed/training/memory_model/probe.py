"""What a training step takes when it runs: the peak of some real steps, and the out-of-memory errors of every kind."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pinfeed.errors import EstimateError
from pinfeed.memory.host import resident_bytes
from pinfeed.training import rng_state
from pinfeed.training.memory_model.estimate import StepEstimator, call_model, tensors_of
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import SampleSpec, to_device

# The optimizer's state comes in the first, what libraries try out in the first as well.
_N_STEPS = 3


def measured(
    estimator: StepEstimator,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> int | None:
    """Bytes that steps of a copy of the model take on the device, beyond what was taken before; None if there is not so much memory.

    On a GPU what torch's allocator reserves; on the CPU the growth of the process. Random numbers
    are drawn as if nothing had happened.
    """
    state = rng_state.capture()
    found = None
    try:
        found = _steps(estimator, batch_size, device, make_batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        rng_state.restore(state)
    # Out of the except block: until then the traceback keeps the tensors of the frames that failed.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _steps(
    estimator: StepEstimator,
    batch_size: int,
    device: torch.device,
    make_batch: Callable[[int], Any] | None,
) -> int:
    with _peak(device) as peak:
        model, loss_of, stand_ins = _copy(estimator.model, estimator.loss, device)
        optimizer = estimator.optimizer_of(model, stand_ins)
        for _ in range(_N_STEPS):
            inputs, targets = (
                make_batch(batch_size) if make_batch is not None else _sample(estimator, batch_size)
            )
            inputs, targets = to_device(inputs, device), to_device(targets, device)
            with estimator.autocast(device.type):
                outputs = call_model(model, inputs)
                loss = loss_of(outputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return peak()


@contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """A function that tells the growth since."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        reserved = torch.cuda.memory_reserved(device)
        yield lambda: torch.cuda.max_memory_reserved(device) - reserved
    else:
        with contextlib.suppress(OSError, AttributeError):
            # Another C library.
            # What the heap has kept of freed memory would not be seen to be taken again.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            # proc(5): the peak begins anew.
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            raise EstimateError(
                f"probe() on the CPU measures the peak of this process, which begins anew when /proc/self/clear_refs is written ({error}); "
                "run it where /proc can be written, or take the estimate as it is (config.budget)"
            ) from None
        before = resident_bytes()["peak"] or 0
        yield lambda: (resident_bytes()["peak"] or 0) - before


def _copy(
    model: Any, loss: Any, device: torch.device
) -> tuple[nn.Module, Any, dict[int, torch.Tensor]]:
    """Model and loss on the device, and what their tensors became."""
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _kept(model, loss)}
    made = copy.deepcopy(model, memo) if isinstance(model, nn.Module) else model()
    made_loss = copy.deepcopy(loss, memo).to(device) if isinstance(loss, nn.Module) else loss
    made = made.to(device)
    stand_ins: dict[int, torch.Tensor] = {}
    for old, new in ((model, made), (loss, made_loss)):
        if isinstance(old, nn.Module):
            pairs = zip(
                (*old.parameters(), *old.buffers()),
                (*new.parameters(), *new.buffers()),
                strict=True,
            )
            stand_ins |= {id(before): after for before, after in pairs}
    return made if made.training else made.train(), made_loss, stand_ins


def _kept(*modules: Any) -> Iterator[torch.Tensor]:
    """Tensors of a graph, which deepcopy refuses: activations that a module keeps."""
    for module in (module for module in modules if isinstance(module, nn.Module)):
        yield from (tensor for tensor in tensors_of(module) if not tensor.is_leaf)


def _sample(estimator: StepEstimator, n: int) -> tuple[Any, Any]:
    """Numbers as good as any: zeros for integers, for they may be rows of a table or classes."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (
            torch.rand(shape, dtype=dtype)
            if dtype.is_floating_point
            else torch.zeros(shape, dtype=dtype)
        )

    def batch(samples: SampleSpec | None) -> Any:
        return None if samples is None else samples.batch(n, make)

    return batch(estimator.inputs), batch(estimator.targets)
