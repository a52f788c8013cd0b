"""FixedRandomness: random numbers of torch that depend neither on the generator nor on the shape.

A model with dropout draws other numbers for a batch than for its chunks. With fixed numbers in their
place, both compute the same function, and their gradients can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., Any]

_UNIFORM = 0.37
_NORMAL = 0.5
_KEEP = {"native_dropout": ("p", 0.0), "_fused_dropout": ("p", 1.0)}
"""Dropout in one kernel, and the argument with which it keeps every number."""


class UnknownRandomness(Exception):
    """An operation draws random numbers in a way that is not known here."""


class FixedRandomness(TorchDispatchMode):
    """Within this context operations of torch draw fixed numbers; dropout keeps every number.

    Raises:
        UnknownRandomness: An operation that is not known draws random numbers.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        return _fixed(func, args, kwargs)


def _fixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    given = _arguments(func, args, kwargs)
    if name in _KEEP:
        given |= dict([_KEEP[name]])
        return func(**given)
    if "dropout_p" in given:
        return func(**(given | {"dropout_p": 0.0}))
    if name.rstrip("_") == "bernoulli":
        return _filled(func, args, kwargs, 1.0)
    if name in ("rand", "rand_like"):
        return _filled(func, args, kwargs, _UNIFORM)
    if name in ("randn", "randn_like"):
        return _filled(func, args, kwargs, _NORMAL)
    if name == "uniform_":
        return args[0].fill_(given["from"] + _UNIFORM * (given["to"] - given["from"]))
    if name == "normal_":
        return args[0].fill_(given["mean"] + _NORMAL * given["std"])
    if name in ("randint", "randint_like"):
        return _filled(func, args, kwargs, given.get("low", 0))
    if name == "randperm":
        # A permutation that moves samples shows that they see each other.
        drawn = func(*args, **kwargs)
        return drawn.copy_(torch.arange(len(drawn)).flip(0))
    raise UnknownRandomness(f"{func} draws random numbers, which cannot be fixed for a comparison")


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: float) -> Any:
    return func(*args, **kwargs).fill_(value)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, those that were left out with their defaults."""
    given = dict(kwargs)
    for i, slot in enumerate(func._schema.arguments):
        if i < len(args):
            given[slot.name] = args[i]
        elif slot.name not in given and slot.has_default_value():
            given[slot.name] = slot.default_value
    return given
