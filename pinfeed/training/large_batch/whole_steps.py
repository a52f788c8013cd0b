"""WholeSteps: steps that compute a whole batch at once, with less memory for activations.

Recomputed parts of a model keep only their inputs, and run again in the backward pass. Offloaded
activations wait in host memory. With both, only the inputs of parts are activations that wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.training.large_batch.restored_state import buffers_of, replayed_buffers
from pinfeed.training.memory_model.tensor_specs import tensor_leaves
from pinfeed.training.offload.offload import Offload

_LEAST_PARTS = 2
"""Smallest number of parts of a container; recomputing fewer saves no memory."""


class WholeSteps:
    """Contexts of steps that compute a whole batch at once, by strategy.

    Args:
        device: Device of the model.
        config: Memory limits; None for the free memory.
    """

    def __init__(self, device: torch.device, config: MemoryLimits | None) -> None:
        self._device = device
        self._config = config
        self._offload: Offload | None = None
        self._device_limit = 0

    @contextlib.contextmanager
    def context(
        self, strategy: str, modules: Sequence[nn.Module], inputs: Any, device_limit: int
    ) -> Iterator[None]:
        """Enter the context of a forward pass.

        Args:
            strategy: The strategy.
            modules: Modules whose parameters receive gradients, the model first.
            inputs: Inputs of the model. They stay on the device, because the caller keeps them.
            device_limit: Device memory for offloaded activations, in bytes.
        """
        with contextlib.ExitStack() as stack:
            if recomputes(strategy):
                stack.enter_context(recomputed(modules[0]))
            if offloads(strategy):
                offload = self._offload_with(device_limit)
                stack.enter_context(offload.step(*modules, *tensor_leaves(inputs)))
            yield

    def close(self) -> None:
        """Free page-locked memory. Further calls do nothing."""
        if self._offload is not None:
            self._offload.close()

    def _offload_with(self, device_limit: int) -> Offload:
        """Return the Offload, a new one if the limit is lower than before."""
        if self._offload is None or device_limit < self._device_limit:
            self.close()
            limit = None if self._config is None else self._config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit, device_limit=device_limit)
            self._device_limit = device_limit
        return self._offload


def recomputes(strategy: str) -> bool:
    """Return whether the backward pass of a strategy computes parts of the model again."""
    return strategy.startswith("checkpoint")


def offloads(strategy: str) -> bool:
    """Return whether a strategy keeps activations in host memory."""
    return strategy.endswith("offload")


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Make backward passes recompute parts of the model whose forward pass runs in this context.

    Blocks of a ModuleList are recomputed one by one, modules of a Sequential several at a time.
    """
    changed: list[nn.Module] = []
    try:
        for container in _containers(model):
            if _is_sequential(container):
                _replace_forward(container, functools.partial(_in_segments, container), changed)
            else:
                for block in container.children():
                    forward = functools.partial(_checkpointed, block, block.forward)
                    _replace_forward(block, forward, changed)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def can_be_recomputed(model: nn.Module) -> bool:
    """Return whether the model has parts whose recomputation saves memory."""
    return any(True for _ in _containers(model))


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost lists of modules."""
    is_list = _is_sequential(module) or isinstance(module, nn.ModuleList)
    if is_list and len(module) >= _LEAST_PARTS:  # type: ignore[arg-type]
        yield module
        return
    for child in module.children():
        yield from _containers(child)


def _is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether the module runs its children one after the other, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _replace_forward(
    module: nn.Module, forward: Callable[..., Any], changed: list[nn.Module]
) -> None:
    if "forward" not in module.__dict__:
        module.__dict__["forward"] = forward
        changed.append(module)


def _in_segments(sequential: nn.Sequential, x: Any) -> Any:
    # A module that occurs twice in the list runs twice.
    modules = list(sequential)
    n_segments = max(1, round(math.sqrt(len(modules))))
    size = -(-len(modules) // n_segments)
    for i in range(0, len(modules), size):
        segment = nn.Sequential(*modules[i : i + size])
        x = _checkpointed(segment, segment.forward, x)
    return x


def _checkpointed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass, and let the backward pass run it again from the same buffers."""
    before = buffers_of([module])

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), replayed_buffers(before)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
