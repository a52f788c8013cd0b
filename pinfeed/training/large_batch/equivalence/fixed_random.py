"""FixedRandomness: torch's random numbers, independent of generator and shape.

A model with dropout draws other numbers for a batch than for its chunks. With fixed numbers, both
compute the same function, and their gradients can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DROPOUT_THAT_KEEPS_ALL = {"native_dropout": ("p", 0.0), "_fused_dropout": ("p", 1.0)}
"""Operations that compute dropout in one kernel, and the argument that keeps every number."""


class UnknownRandomness(Exception):
    """An operation draws random numbers in a way that cannot be fixed."""


class FixedRandomness(TorchDispatchMode):
    """Context in which torch's operations draw fixed numbers and dropout keeps every number.

    Args:
        at: Position of the numbers in the range of a distribution, from 0 to 1.

    Raises:
        UnknownRandomness: If an unknown operation draws random numbers.
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
    if name in _DROPOUT_THAT_KEEPS_ALL:
        given |= dict([_DROPOUT_THAT_KEEPS_ALL[name]])
        return func(**given)
    if "dropout_p" in given:
        return func(**(given | {"dropout_p": 0.0}))
    normal = 4 * at - 2
    if name.rstrip("_") == "bernoulli":
        drawn = func(*args, **kwargs)
        # A single number decides a branch; several numbers are a mask.
        return drawn.fill_(1.0 if drawn.numel() > 1 else round(at))
    if name in ("rand", "rand_like"):
        return _descending(func(*args, **kwargs).fill_(at))
    if name in ("randn", "randn_like"):
        return _descending(func(*args, **kwargs).fill_(normal))
    if name == "uniform_":
        return _descending(args[0].fill_(given["from"] + at * (given["to"] - given["from"])))
    if name == "normal_":
        return _descending(args[0].fill_(given["mean"] + normal * given["std"]))
    if name in ("randint", "randint_like"):
        low = given.get("low", 0)
        return func(*args, **kwargs).fill_(low + int(at * (given["high"] - low)))
    if name == "randperm":
        # A permutation that moves samples reveals whether samples depend on each other.
        drawn = func(*args, **kwargs)
        return drawn.copy_(torch.arange(len(drawn)).flip(0))
    raise UnknownRandomness(f"{func} draws random numbers, which cannot be fixed for a comparison")


def _descending(drawn: torch.Tensor) -> torch.Tensor:
    """Make a vector of equal numbers descend slightly.

    A model may sort such a vector to shuffle samples. With descending numbers, the sort moves the
    samples.
    """
    if drawn.ndim == 1 and len(drawn) > 1:
        drawn -= 1e-3 * torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    return drawn


def random_rows(i: int, leaf: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return random gradients for rows [start, stop) of output ``i``, in the shape of ``leaf``.

    A sample has the same gradient in every chunk.
    """
    if not leaf.ndim:
        return torch.ones_like(leaf)
    generator = torch.Generator()
    rows = []
    for row in range(start, stop):
        generator.manual_seed(1000 * i + row)
        rows.append(torch.rand(leaf.shape[1:], generator=generator).sub_(0.5))
    return torch.stack(rows).to(leaf.device, leaf.dtype)


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, with the defaults of omitted ones."""
    given = dict(kwargs)
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            given[argument.name] = args[i]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
