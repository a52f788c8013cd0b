"""FixedRandomness: random numbers of torch that depend neither on the generator nor on the shape.

A model with dropout draws other numbers for a batch than for its chunks. With fixed numbers in
their place, both compute the same function, and their gradients can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., Any]

_KEEP = {"native_dropout": ("p", 0.0), "_fused_dropout": ("p", 1.0)}
"""Dropout in one kernel, and the argument with which it keeps every number."""


class UnknownRandomness(Exception):
    """An operation draws random numbers in a way that is not known here."""


class FixedRandomness(TorchDispatchMode):
    """Within this context operations of torch draw fixed numbers; dropout keeps every number.

    Args:
        at: Where in the range of a distribution the numbers are, from 0 to 1.

    Raises:
        UnknownRandomness: An operation that is not known draws random numbers.
    """

    def __init__(self, at: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at

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
        return _fixed(func, args, kwargs, self._at)


def _fixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: float) -> Any:
    name = func._schema.name.split("::")[1]
    given = arguments_of(func, args, kwargs)
    if name in _KEEP:
        given |= dict([_KEEP[name]])
        return func(**given)
    if "dropout_p" in given:
        return func(**(given | {"dropout_p": 0.0}))
    normal = 4 * at - 2
    if name.rstrip("_") == "bernoulli":
        drawn = func(*args, **kwargs)
        # One number decides a branch; several are a mask.
        return drawn.fill_(1.0 if drawn.numel() > 1 else round(at))
    if name in ("rand", "rand_like"):
        return _falling(func(*args, **kwargs).fill_(at))
    if name in ("randn", "randn_like"):
        return _falling(func(*args, **kwargs).fill_(normal))
    if name == "uniform_":
        return _falling(args[0].fill_(given["from"] + at * (given["to"] - given["from"])))
    if name == "normal_":
        return _falling(args[0].fill_(given["mean"] + normal * given["std"]))
    if name in ("randint", "randint_like"):
        low = given.get("low", 0)
        return func(*args, **kwargs).fill_(low + int(at * (given["high"] - low)))
    if name == "randperm":
        # A permutation that moves samples shows that they see each other.
        drawn = func(*args, **kwargs)
        return drawn.copy_(torch.arange(len(drawn)).flip(0))
    raise UnknownRandomness(f"{func} draws random numbers, which cannot be fixed for a comparison")


def _falling(drawn: torch.Tensor) -> torch.Tensor:
    """A vector of random numbers may be sorted to shuffle samples: then they change places."""
    if drawn.ndim == 1 and len(drawn) > 1:
        drawn -= 1e-3 * torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    return drawn


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, with the defaults of those that were left out."""
    given = dict(kwargs)
    for i, slot in enumerate(func._schema.arguments):
        if i < len(args):
            given[slot.name] = args[i]
        elif slot.name not in given and slot.has_default_value():
            given[slot.name] = slot.default_value
    return given
