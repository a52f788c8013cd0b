"""Dispatch modes: torch's operations with fixed random numbers, and operations over the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError

_DROPOUT_THAT_KEEPS_ALL = {"native_dropout": ("p", 0.0), "_fused_dropout": ("p", 1.0)}
"""Operations that compute dropout in one kernel, and the argument that keeps every number."""
_NORMALIZATIONS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")


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
        return _fixed(func, args, kwargs, self._at)


def _fixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: float) -> Any:
    name = func._schema.name.split("::")[1]
    given = _arguments_of(func, args, kwargs)
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
    raise ArgumentError(f"{func} draws random numbers, which cannot be fixed for a comparison")


def _descending(drawn: torch.Tensor) -> torch.Tensor:
    """Make a vector of equal numbers descend slightly.

    A model may sort such a vector to shuffle samples. With descending numbers, the sort moves the
    samples.
    """
    if drawn.ndim == 1 and len(drawn) > 1:
        drawn -= 1e-3 * torch.arange(len(drawn), dtype=drawn.dtype, device=drawn.device)
    return drawn


class BatchAxisOperations(TorchDispatchMode):
    """Context that records which of torch's operations combine rows: reduce, sort or mix them.

    Error messages name these operations as possible causes. A named operation may be harmless, and
    the context does not know all operations.

    Args:
        n: Samples in the batch. A tensor with ``n`` rows counts as one row per sample.

    Attributes:
        names: Names of the operations, each once, in the order of their first call.
    """

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._n = n
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name not in self.names and self._combines_rows(func, name, args, kwargs):
            self.names.append(name)
        return func(*args, **kwargs)

    def _combines_rows(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.ndim or len(first) != self._n:
            return False
        given = _arguments_of(func, args, kwargs)
        if name in _NORMALIZATIONS:
            return bool(given.get("training", given.get("train", True)))
        if name == "mm":
            # The product of a batch and its transpose has a number for each pair of samples.
            return bool(args[1].shape[1] == self._n)
        if not given.keys() & {"dim", "dims"} or func.is_view:
            return False
        dims = given.get("dim", given.get("dims"))
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return any(dim is None or dim in (0, -first.ndim) for dim in dims) or not dims


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, with the defaults of omitted ones."""
    given = dict(kwargs)
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            given[argument.name] = args[i]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
