"""FixedRandomness: torch's operations with fixed random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError

_DROPOUT_THAT_KEEPS_ALL = {"native_dropout": ("p", 0.0), "_fused_dropout": ("p", 1.0)}
"""Operations that compute dropout in one kernel, and the argument that keeps every number."""


class FixedRandomness(TorchDispatchMode):
    """Context in which torch's operations draw fixed numbers and dropout keeps every number.

    A model with dropout draws other numbers for a batch than for its chunks. With fixed numbers,
    both compute the same function, and their gradients can be compared.

    Args:
        at: Position of the numbers in the range of a distribution, from 0 to 1.

    Raises:
        ArgumentError: If an unknown operation draws random numbers.
    """

    def __init__(self, at: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        given = _arguments_of(func, args, kwargs)
        if name in _DROPOUT_THAT_KEEPS_ALL:
            return func(**given | dict([_DROPOUT_THAT_KEEPS_ALL[name]]))
        if "dropout_p" in given:
            return func(**given | {"dropout_p": 0.0})
        if name in ("bernoulli", "bernoulli_"):
            drawn = func(*args, **kwargs)
            # A single number decides a branch; several numbers are a mask.
            return drawn.fill_(1.0 if drawn.numel() > 1 else round(self._at))
        if name == "randperm":
            # A permutation that moves samples reveals whether samples depend on each other.
            drawn = func(*args, **kwargs)
            return drawn.copy_(torch.arange(len(drawn)).flip(0))
        number = self._number(name, given)
        if number is None:
            raise ArgumentError(
                f"{func} draws random numbers, which cannot be fixed for a comparison"
            )
        return _descending(func(*args, **kwargs).fill_(number))

    def _number(self, name: str, given: dict[str, Any]) -> float | None:
        """Return the number that an operation draws everywhere; None if it is unknown."""
        if name in ("rand", "rand_like", "uniform_"):
            low = given.get("from", 0.0)
            return float(low + self._at * (given.get("to", 1.0) - low))
        if name in ("randn", "randn_like", "normal_"):
            return float(given.get("mean", 0.0) + (4 * self._at - 2) * given.get("std", 1.0))
        if name in ("randint", "randint_like"):
            low = given.get("low", 0)
            return int(low + int(self._at * (given["high"] - low)))
        return None


def _descending(drawn: torch.Tensor) -> torch.Tensor:
    """Make a vector of equal numbers descend slightly.

    A model may sort such a vector to shuffle samples. With descending numbers, the sort moves the
    samples.
    """
    if drawn.is_floating_point() and drawn.ndim == 1 and len(drawn) > 1:
        drawn -= 1e-3 * torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    return drawn


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, with the defaults of omitted ones."""
    given = dict(kwargs)
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            given[argument.name] = args[i]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
