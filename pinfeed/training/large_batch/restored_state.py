"""Blocks after which gradients, parameters and state of models are as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_SIMPLE_TYPES = (bool, int, float, complex, str, type(None))
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


Buffers = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, and copies of their buffers by name."""
State = dict[str, Any]
"""Copies of buffers or of attributes of modules, by name."""


@contextlib.contextmanager
def restored(owners: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Restore the contents of dicts, such as a module's buffers or attributes, after the block."""
    before = [(one, dict(one)) for one in owners]
    try:
        yield
    finally:
        for one, contents in before:
            one.clear()
            one.update(contents)


@contextlib.contextmanager
def restored_attribute(owners: Sequence[Any], name: str) -> Iterator[list[Any]]:
    """Yield the values of an attribute of each owner, and restore them after the block."""
    before = [getattr(one, name) for one in owners]
    try:
        yield before
    finally:
        for one, value in zip(owners, before, strict=True):
            setattr(one, name, value)


@contextlib.contextmanager
def gradients_set_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Clear the gradients for the block, and restore those of the caller at its end."""
    with restored_attribute(parameters, "grad"):
        for p in parameters:
            p.grad = None
        yield


@contextlib.contextmanager
def gradient_transaction(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Add the gradients that the block computes; if the block raises, restore all gradients.

    Within the block the parameters have no gradients.
    """
    with gradients_set_aside(parameters):
        yield
        computed = [p.grad for p in parameters]
    for p, gradient in zip(parameters, computed, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def copies_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with copies of the tensors among them, without a graph."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def buffers_of(modules: Sequence[nn.Module]) -> Buffers:
    """Copy all buffers: running statistics, vectors of a power iteration, counters."""
    every = {id(one): one for module in modules for one in module.modules() if one._buffers}
    return [(one, copies_of(one._buffers)) for one in every.values()]


def restore_buffers(before: Buffers) -> None:
    """Set the buffers to the values ``before``."""
    for module, values in before:
        for name, value in values.items():
            if (buffer := module._buffers[name]) is not None:
                buffer.copy_(value)


@contextlib.contextmanager
def replayed_buffers(before: Buffers) -> Iterator[None]:
    """Run a computation again from the buffers ``before``, without a lasting effect on buffers.

    The block works on copies. At its end, the buffers have the values from its beginning, which
    are those that the first computation left.
    """
    with restored(module._buffers for module, _ in before):
        for module, values in before:
            module._buffers.update(copies_of(values))
        yield


@contextlib.contextmanager
def state_on_copies(modules: Sequence[nn.Module]) -> Iterator[Callable[[], tuple[State, State]]]:
    """Let modules change copies of their state, and restore the originals at the end.

    Lists, dicts and other objects that a module keeps are not copied.

    Args:
        modules: Root modules, whose children are included.

    Yields:
        A function that returns the current buffers and attributes.
    """
    every = {id(one): (name, one) for root in modules for name, one in root.named_modules()}
    owners = [owner for _, one in every.values() for owner in (one._buffers, vars(one))]
    objects = [value for owner in owners for value in owner.values()]
    generators = [(one, one.get_state()) for one in objects if isinstance(one, torch.Generator)]

    def state() -> tuple[State, State]:
        buffers: State = {}
        attributes: State = {}
        for name, module in every.values():
            prefix = f"{name}." if name else ""
            for owned, found in ((module._buffers, buffers), (_attributes(module), attributes)):
                found |= {f"{prefix}{key}": value for key, value in copies_of(owned).items()}
        return buffers, attributes

    with restored(owners):
        for _, module in every.values():
            module._buffers.update(copies_of(module._buffers))
            vars(module).update(copies_of(_attributes(module)))
        try:
            yield state
        finally:
            for generator, numbers in generators:
                generator.set_state(numbers)


@contextlib.contextmanager
def perturbed_parameters(modules: Sequence[nn.Module]) -> Iterator[Callable[[], str]]:
    """Let modules compute with slightly different parameters, and restore the originals at the end.

    Yields:
        A function that returns the name of a parameter that was written in the block, or "".
    """
    # The forward pass of a table with max_norm rescales rows with a larger norm, which gives the
    # same result in chunks.
    renormalized = {
        id(one.weight)
        for root in modules
        for one in root.modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    }
    every = {id(p): (name, p) for root in modules for name, p in root.named_parameters()}
    named = [pair for key, pair in every.items() if key not in renormalized]

    def perturbed(i: int, data: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.01 * random.Random(i).random()
        return data * scale if data.is_floating_point() else data.clone()

    def name_of_written() -> str:
        for i, (data, (name, p)) in enumerate(zip(originals, named, strict=True)):
            if not p.data.equal(perturbed(i, data)):
                return name
        return ""

    with restored_attribute([p for _, p in named], "data") as originals:
        for i, (data, (_, p)) in enumerate(zip(originals, named, strict=True)):
            p.data = perturbed(i, data)
        yield name_of_written


@contextlib.contextmanager
def in_float64(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules compute in float64, and restore their parameters and state at the end.

    The modules themselves are changed, not copies, because a loss may refer to them.
    """
    parameters = [p for module in modules for p in module.parameters()]
    data = restored_attribute(parameters, "data")
    with gradients_set_aside(parameters), state_on_copies(modules), data:
        for module in modules:
            module.double()
        yield


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's own attributes that are tensors or simple values."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _MODULE_ATTRIBUTES
        and isinstance(value, (torch.Tensor, *_SIMPLE_TYPES))
        and not isinstance(value, nn.Parameter)
    }
