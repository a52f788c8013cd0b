"""A model whose parts keep only what they are given, and compute the rest again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from torch import nn
from torch.utils.checkpoint import checkpoint

# Parts below which nothing is gained.
_LEAST = 2


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Run the forward pass in this.

    Blocks of a ModuleList are computed again one by one, modules of a Sequential some at a time.
    """
    changed: list[nn.Module] = []
    try:
        for owner in _containers(model):
            if _is_sequential(owner):
                _change(owner, functools.partial(_in_segments, owner), changed)
            else:
                for block in owner.children():
                    _change(block, functools.partial(_again, [block], block.forward), changed)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def can_be_recomputed(model: nn.Module) -> bool:
    """Whether the model has parts that gain by it."""
    return any(True for _ in _containers(model))


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost lists of modules."""
    if (_is_sequential(module) or isinstance(module, nn.ModuleList)) and len(module) >= _LEAST:
        yield module
        return
    for child in module.children():
        yield from _containers(child)


def _is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether it runs its modules one after the other, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _change(module: nn.Module, forward: Callable[..., Any], changed: list[nn.Module]) -> None:
    if "forward" not in module.__dict__:
        module.__dict__["forward"] = forward
        changed.append(module)


def _in_segments(owner: nn.Sequential, x: Any) -> Any:
    # One that is there twice runs twice.
    modules = list(owner)
    n = max(1, round(math.sqrt(len(modules))))
    size = -(-len(modules) // n)
    for i in range(0, len(modules), size):
        segment = modules[i : i + size]
        x = _again(segment, functools.partial(_one_by_one, segment), x)
    return x


def _one_by_one(modules: Sequence[nn.Module], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def _again(
    modules: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    before = buffers_of(modules)
    contexts = lambda: (contextlib.nullcontext(), replayed_buffers(before))  # noqa: E731
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


Buffers = list[tuple[nn.Module, dict[str, Any]]]


def buffers_of(modules: Sequence[nn.Module]) -> Buffers:
    """Copies of all buffers: running statistics, vectors of a power iteration, counters."""
    every = {id(one): one for module in modules for one in module.modules() if one._buffers}
    return [
        (
            one,
            {
                name: None if value is None else value.clone()
                for name, value in one._buffers.items()
            },
        )
        for one in every.values()
    ]


@contextlib.contextmanager
def replayed_buffers(before: Buffers) -> Iterator[None]:
    """Compute again from ``before``, on copies; afterwards the buffers are those that they are now: what was computed first counts."""
    now = [dict(module._buffers) for module, _ in before]
    for module, values in before:
        module._buffers.update(
            {name: None if value is None else value.clone() for name, value in values.items()}
        )
    try:
        yield
    finally:
        for (module, _), buffers in zip(before, now, strict=True):
            module._buffers.update(buffers)
