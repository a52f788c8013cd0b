"""State of a model without its parameters: buffers, and attributes with tensors or numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_SIMPLE_TYPES = (bool, int, float, complex, str, type(None))
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)

State = dict[str, Any]


class ReshapedTensor:
    """Value of a tensor attribute that a forward pass has created or reshaped.

    Args:
        value: The tensor.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.shape = value.shape


class _SavedModule:
    """State of one module, replaced by copies until it is restored."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._buffers = dict(module._buffers)
        self._attributes = _attributes(module)
        self._generators = _generators(module)
        self._shapes: dict[str, torch.Size] = {}
        for key, value in self._buffers.items():
            if value is not None:
                module._buffers[key] = value.detach().clone()
        for key, value in self._attributes.items():
            if isinstance(value, torch.Tensor):
                self._shapes[key] = value.shape
                module.__dict__[key] = value.detach().clone()

    def state(self) -> State:
        """Return a copy of the current state, by name."""
        found: State = {}
        for key, value in self._module._buffers.items():
            if value is not None:
                found[self._path(key)] = value.detach().clone()
        for key, value in _attributes(self._module).items():
            if isinstance(value, torch.Tensor):
                copied = value.detach().clone()
                is_same_shape = self._shapes.get(key) == value.shape
                found[self._path(key)] = copied if is_same_shape else ReshapedTensor(copied)
            else:
                found[self._path(key)] = value
        return found

    def restore(self) -> None:
        """Put the original state back."""
        module = self._module
        for key in [key for key in module._buffers if key not in self._buffers]:
            del module._buffers[key]
        for key, value in self._buffers.items():
            module._buffers[key] = value
        for key in _attributes(module):
            if key not in self._attributes:
                del module.__dict__[key]
        module.__dict__.update(self._attributes)
        for generator, before in self._generators:
            generator.set_state(before)

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}".removeprefix(".")


@contextlib.contextmanager
def state_on_copies(modules: Sequence[nn.Module]) -> Iterator[Callable[[], State]]:
    """Let modules change copies of their state, and restore the originals at the end.

    Lists, dicts and other objects that a module keeps are not copied.

    Args:
        modules: Root modules, whose children are included.

    Yields:
        A function that returns the current state, by name.
    """
    every = {id(one): (name, one) for root in modules for name, one in root.named_modules()}
    saved = [_SavedModule(name, module) for name, module in every.values()]

    def state() -> State:
        found: State = {}
        for one in saved:
            found |= one.state()
        return found

    try:
        yield state
    finally:
        for one in saved:
            one.restore()


@contextlib.contextmanager
def perturbed_parameters(modules: Sequence[nn.Module]) -> Iterator[Callable[[], str]]:
    """Let modules compute with slightly different parameters, and restore the originals at the end.

    Yields:
        A function that returns the name of a parameter that was written in the block, or "".
    """
    every = {id(p): (name, p) for root in modules for name, p in root.named_parameters()}
    renormalized = _renormalized_tables(modules)
    named = [pair for key, pair in every.items() if key not in renormalized]
    originals = [p.data for _, p in named]
    generator = torch.Generator().manual_seed(0)
    perturbed = []
    for _, p in named:
        scale = 1 + 0.01 * float(torch.rand((), generator=generator))
        perturbed.append(p.data * scale if p.is_floating_point() else p.data.clone())
        p.data = perturbed[-1].clone()

    def name_of_written() -> str:
        for (name, p), other in zip(named, perturbed, strict=True):
            if not torch.equal(p.data, other):
                return name
        return ""

    try:
        yield name_of_written
    finally:
        for (_, p), original in zip(named, originals, strict=True):
            p.data = original


def _renormalized_tables(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of embedding weights with ``max_norm``.

    Their forward pass rescales rows with a larger norm, which gives the same result in chunks.
    """
    tables = (one for root in modules for one in root.modules())
    return {
        id(one.weight)
        for one in tables
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    }


def _attributes(module: nn.Module) -> State:
    """Return the module's own attributes that are tensors or simple values."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _MODULE_ATTRIBUTES
        and isinstance(value, (torch.Tensor, *_SIMPLE_TYPES))
        and not isinstance(value, nn.Parameter)
    }


def _generators(module: nn.Module) -> list[tuple[torch.Generator, torch.Tensor]]:
    found = [value for value in module.__dict__.values() if isinstance(value, torch.Generator)]
    return [(generator, generator.get_state()) for generator in found]
