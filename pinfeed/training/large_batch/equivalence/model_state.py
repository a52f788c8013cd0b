"""State that a model keeps beside its parameters: buffers, and tensors and numbers as attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, type(None))
_OF_MODULES = frozenset(nn.Module().__dict__)

State = dict[str, Any]


class ReshapedTensor:
    """The value of a tensor attribute that a forward pass has made, or whose shape it has changed.

    Args:
        value: The tensor.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.shape = value.shape


@contextlib.contextmanager
def state_on_copies(modules: Sequence[nn.Module]) -> Iterator[Callable[[], State]]:
    """Let modules change copies of their state, and put the originals back at the end.

    Lists, dicts and other objects that a module keeps are not copied.

    Args:
        modules: The modules, with all modules in them.

    Yields:
        A function that returns the state as it is now, by name.
    """
    every = {id(one): (name, one) for root in modules for name, one in root.named_modules()}
    named = list(every.values())
    shapes: dict[str, torch.Size] = {}
    originals = []
    for name, module in named:
        buffers, attributes = dict(module._buffers), _attributes(module)
        originals.append((module, buffers, attributes, _generators(module)))
        for key, value in buffers.items():
            if value is not None:
                module._buffers[key] = value.detach().clone()
        for key, value in attributes.items():
            if isinstance(value, torch.Tensor):
                shapes[f"{name}.{key}"] = value.shape
                module.__dict__[key] = value.detach().clone()

    def state() -> State:
        found: State = {}
        for name, module in named:
            for key, value in module._buffers.items():
                if value is not None:
                    found[f"{name}.{key}".removeprefix(".")] = value.detach().clone()
            for key, value in _attributes(module).items():
                path = f"{name}.{key}"
                if isinstance(value, torch.Tensor):
                    copied = value.detach().clone()
                    value = copied if shapes.get(path) == value.shape else ReshapedTensor(copied)
                found[path.removeprefix(".")] = value
        return found

    try:
        yield state
    finally:
        for module, buffers, attributes, generators in originals:
            for key in [key for key in module._buffers if key not in buffers]:
                del module._buffers[key]
            for key, value in buffers.items():
                module._buffers[key] = value
            for key in _attributes(module):
                if key not in attributes:
                    del module.__dict__[key]
            module.__dict__.update(attributes)
            for generator, before in generators:
                generator.set_state(before)


@contextlib.contextmanager
def perturbed_parameters(modules: Sequence[nn.Module]) -> Iterator[Callable[[], str]]:
    """Let modules compute with slightly different parameters, and put the originals back.

    Yields:
        A function that returns the name of a parameter that has been written since, or "".
    """
    every = {id(p): (name, p) for root in modules for name, p in root.named_parameters()}
    normed = {
        id(one.weight)
        for root in modules
        for one in root.modules()
        # These bring rows that are too long to the largest norm, which chunks do as well.
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None
    }
    named = [pair for key, pair in every.items() if key not in normed]
    originals = [p.data for _, p in named]
    generator = torch.Generator().manual_seed(0)
    others = []
    for _, p in named:
        scale = 1 + 0.01 * float(torch.rand((), generator=generator))
        others.append(p.data * scale if p.is_floating_point() else p.data.clone())
        p.data = others[-1].clone()
    try:
        yield lambda: next(
            (
                name
                for (name, p), other in zip(named, others, strict=True)
                if not torch.equal(p.data, other)
            ),
            "",
        )
    finally:
        for (_, p), original in zip(named, originals, strict=True):
            p.data = original


def _attributes(module: nn.Module) -> State:
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _OF_MODULES
        and isinstance(value, (torch.Tensor, *_PLAIN))
        and not isinstance(value, nn.Parameter)
    }


def _generators(module: nn.Module) -> list[tuple[torch.Generator, torch.Tensor]]:
    found = [value for value in module.__dict__.values() if isinstance(value, torch.Generator)]
    return [(generator, generator.get_state()) for generator in found]
