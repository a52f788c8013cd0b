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


@contextlib.contextmanager
def on_copies(modules: Sequence[nn.Module]) -> Iterator[Callable[[], State]]:
    """Let modules change copies of their state, and put the originals back at the end.

    Lists, dicts and other objects that a module keeps are not copied.

    Args:
        modules: The modules, with all modules in them.

    Yields:
        A function that returns the state as it is now, by name. A tensor attribute is part of it
        only if the shape has stayed the same: an attribute that follows the shape of the batch
        shows what the last batch was, and is no state.
    """
    every = {id(one): (name, one) for root in modules for name, one in root.named_modules()}
    named = list(every.values())
    shapes: dict[str, torch.Size] = {}
    originals = []
    for name, module in named:
        originals.append((module, dict(module._buffers), dict(module.__dict__), _generators(module)))
        for key, value in module._buffers.items():
            module._buffers[key] = None if value is None else value.detach().clone()
        for key, value in _attributes(module).items():
            if isinstance(value, torch.Tensor):
                shapes[f"{name}.{key}"] = value.shape
                module.__dict__[key] = value.detach().clone()

    def state() -> State:
        found: State = {}
        for name, module in named:
            buffers = {key: value for key, value in module._buffers.items() if value is not None}
            for key, value in (buffers | _attributes(module)).items():
                path = f"{name}.{key}"
                is_output = key not in buffers and getattr(value, "shape", None) != shapes.get(path)
                if not is_output:
                    copied = value.detach().clone() if isinstance(value, torch.Tensor) else value
                    found[path.removeprefix(".")] = copied
        return found

    try:
        yield state
    finally:
        for module, buffers, attributes, generators in originals:
            module._buffers.clear()
            module._buffers.update(buffers)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for generator, before in generators:
                generator.set_state(before)


def _attributes(module: nn.Module) -> State:
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _OF_MODULES and isinstance(value, (torch.Tensor, *_PLAIN)) and not isinstance(value, nn.Parameter)
    }


def _generators(module: nn.Module) -> list[tuple[torch.Generator, torch.Tensor]]:
    found = [value for value in module.__dict__.values() if isinstance(value, torch.Generator)]
    return [(generator, generator.get_state()) for generator in found]
