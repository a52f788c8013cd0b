"""What an optimizer keeps for each row: found out by trying it, not listed by hand.

An optimizer is run on two small parameters of unequal length, with gradients of zero. State whose
first axis follows the length is row-wise; all other state is the table's as a whole. What a state
tensor is when it is first assigned is what a row begins with.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, described
from pinfeed.tensors.numpy_torch import NUMPY

_LENGTHS = (3, 5)
# Some optimizers make a state tensor only at a later step.
_STEPS = 8


@dataclass(frozen=True)
class RowState:
    """One row-wise state tensor."""

    key: str
    """In the optimizer's state."""
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    initial: float | None
    """What every number of it begins with; None: it begins as a copy of the weights."""


@dataclass(frozen=True)
class StateLayout:
    """What an optimizer keeps for the rows of a table."""

    rows: tuple[RowState, ...]
    tables: frozenset[str]
    """Keys of state that is one for the whole table."""
    born: frozenset[str]
    """Keys that the optimizer's constructor makes; all others come with its first step."""
    sparse: bool
    """Whether it takes sparse gradients only."""


class _First(dict[str, Any]):
    """A parameter's state, which remembers what each key was when it was first assigned."""

    def __init__(self, born: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(born)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not None:
            self.first.setdefault(
                key, value.detach().clone() if isinstance(value, torch.Tensor) else value
            )
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def discover(
    optimizer_class: Any,
    options: Mapping[str, Any],
    dim: int,
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
) -> StateLayout:
    """What ``optimizer_class([{"params": params, **group}], **options)`` keeps for a parameter of shape (n, dim).

    Raises:
        ArgumentError: If it cannot be run step by step, or keeps something that is neither row-wise
            nor one for the table.
        MemoryError: If the system does not have the memory to try it.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    tried = functools.partial(_tried, optimizer_class, options, group or {})
    # Drawn without touching torch's generator: making an optimizer must not change a run.
    values = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, (_LENGTHS[0], dim))).to(dtype)
    zeros, more = (torch.zeros(n, dim, dtype=dtype, device="cpu") for n in _LENGTHS)
    try:
        sparse = False
        short, born = tried(zeros, sparse)
    except MemoryError as error:
        raise MemoryError(
            f"the system has no memory to try {name} on a small table ({described(error)}); free memory, or raise the limit of the process"
        ) from error
    except Exception as dense_error:
        sparse = True
        try:
            short, born = tried(zeros, sparse)
        except Exception:
            raise ArgumentError(
                f"{name} cannot train rows: a step on a small table failed ({described(dense_error)}); "
                "expected an optimizer whose step() needs gradients alone, and options that it takes"
            ) from dense_error
    long, _ = tried(more, sparse)
    filled, _ = tried(values, sparse)
    rows, tables = [], set()
    for key, value in short.items():
        if not isinstance(value, torch.Tensor) and isinstance(
            value, (int, float, bool, str, type(None))
        ):
            tables.add(key)
        elif not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name} keeps {type(value).__name__} {key!r}, which cannot be split into rows; expected tensors and numbers"
            )
        elif value.shape == long[key].shape:
            tables.add(key)
        elif (len(value), len(long[key])) == _LENGTHS and value.shape[1:] == long[key].shape[1:]:
            rows.append(
                RowState(
                    key,
                    tuple(value.shape[1:]),
                    NUMPY[value.dtype],
                    _initial(name, key, value, filled[key], values),
                )
            )
        else:
            raise ArgumentError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} for {_LENGTHS[0]} rows and {tuple(long[key].shape)} for "
                f"{_LENGTHS[1]}; expected the first axis to be the rows, or a shape that does not depend on them"
            )
    return StateLayout(
        tuple(sorted(rows, key=lambda row: row.key)), frozenset(tables), frozenset(born), sparse
    )


def _tried(
    optimizer_class: Any,
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    values: torch.Tensor,
    sparse: bool,
) -> tuple[dict[str, Any], set[str]]:
    """State as it was first assigned, and the keys that the constructor made."""
    weight = nn.Parameter(values.clone())
    optimizer = optimizer_class([{**group, "params": [weight]}], **options)
    for made in optimizer.param_groups:
        if "weight_decay" in made:
            # A gradient of its own.
            made["weight_decay"] = 0
        if "capturable" in made:
            # Refused on the CPU, where this runs.
            made["capturable"] = False
    born = dict(optimizer.state.get(weight, {}))
    optimizer.state[weight] = first = _First(born)
    for _ in range(_STEPS):
        gradient = torch.zeros_like(values)
        weight.grad = sparse_rows(gradient) if sparse else gradient
        optimizer.step()
    return first.first, set(born)


def sparse_rows(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a sparse tensor of all its rows."""
    rows = torch.arange(len(gradient), device=gradient.device)
    return torch.sparse_coo_tensor(
        rows[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _initial(
    name: str, key: str, zeros: torch.Tensor, filled: torch.Tensor, values: torch.Tensor
) -> float | None:
    """What a row's state begins with, from what it began with for weights of zero and for other ones."""
    first = zeros.reshape(-1)[:1]
    if bool((zeros == first).all()) and bool((filled == first).all()):
        return float(first)
    if filled.shape == values.shape and bool((filled == values.to(filled.dtype)).all()):
        return None
    raise ArgumentError(
        f"{name} begins {key!r} with neither a constant nor a copy of the weights; rows cannot begin one by one"
    )
