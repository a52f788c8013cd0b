"""The state that an optimizer keeps for a table, found by running it on small parameters.

``discover`` runs the optimizer on two parameters of different lengths, with zero gradients. A state
tensor is row-wise if its first axis follows the length. All other state belongs to the table as a
whole. The first value of a state tensor is the initial state of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError
from pinfeed.tensors.numpy_torch import NUMPY, TORCH
from pinfeed.training.embeddings.optimizer_trial import (
    PLAIN,
    GradientKind,
    OptimizerTrial,
    require_one_rule,
)
from pinfeed.training.embeddings.table import HostEmbedding

_LENGTHS = (3, 5)


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its tables."""
    return {key: value for key, value in group.items() if key != "params"}


@dataclass(frozen=True)
class RowState:
    """One row-wise state tensor."""

    key: str
    """Key in the optimizer's state."""
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    initial: float | None
    """Initial value of all its elements; None if it begins as a copy of the weights."""


@dataclass(frozen=True)
class StateLayout:
    """The state that an optimizer keeps for a table."""

    rows: tuple[RowState, ...]
    tables: frozenset[str]
    """Keys of state that belongs to the table as a whole."""
    created_in_init: frozenset[str]
    """Keys that the optimizer's constructor makes. Its first steps make all others."""
    sparse: bool
    """Whether its steps get sparse gradients."""
    attributes: frozenset[str]
    """Names of attributes of the optimizer itself that steps change, such as a first-step flag."""


def discover(
    optimizer_class: Any,
    options: Mapping[str, Any],
    dim: int,
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
    gradients: GradientKind | None = None,
) -> StateLayout:
    """Find the state that an optimizer keeps for a parameter of shape (n, dim).

    Args:
        optimizer_class: Class of the optimizer, which is called with a parameter group and the
            options.
        options: Options of the optimizer.
        dim: Length of a row.
        dtype: Dtype of the parameter.
        group: Options of the parameter group.
        gradients: Kind of the gradients in a step. None is dense, or sparse if the optimizer
            refuses dense gradients.

    Raises:
        ArgumentError: If a step fails, or the optimizer keeps state that is neither row-wise nor
            independent of the number of rows.
        MemoryError: If the system does not have the memory for the trial.
    """
    trial = OptimizerTrial(optimizer_class, options, group or {})
    # A separate generator, because making an optimizer must not change the results of a run.
    values = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, (_LENGTHS[0], dim))).to(dtype)
    zeros, more_zeros = (torch.zeros(n, dim, dtype=dtype, device="cpu") for n in _LENGTHS)
    short, sparse = trial.run_first(zeros, gradients)
    long = trial.run(more_zeros, sparse)
    filled = trial.run(values, sparse)
    rows = []
    tables = set()
    for key, value in short.initial.items():
        if not _is_row_wise(trial.name, key, value, long.initial.get(key)):
            tables.add(key)
            continue
        initial = _initial_number(trial.name, key, (value, filled.initial[key]), values)
        rows.append(RowState(key, tuple(value.shape[1:]), NUMPY[value.dtype], initial))
    return StateLayout(
        tuple(sorted(rows, key=lambda row: row.key)),
        frozenset(tables),
        short.created_in_init,
        sparse,
        short.attributes,
    )


def _is_row_wise(name: str, key: str, short: Any, long: Any) -> bool:
    """Return whether state has an entry for each row, instead of belonging to the whole table.

    Args:
        name: Name of the optimizer in errors.
        key: Key of the state.
        short: The state for the first of ``_LENGTHS``.
        long: The state for the second of ``_LENGTHS``.

    Raises:
        ArgumentError: If the state is neither.
    """
    if not isinstance(short, torch.Tensor):
        if isinstance(short, PLAIN):
            return False
        raise ArgumentError(
            f"{name} keeps a {type(short).__name__} as {key!r}, which cannot be split into rows; "
            "expected tensors and numbers"
        )
    if short.layout is not torch.strided:
        raise ArgumentError(
            f"{name} keeps {key!r} as a sparse tensor, which cannot be split into rows; expected "
            "dense state; give gradients='dense'"
        )
    if short.shape == long.shape:
        return False
    if (len(short), len(long)) == _LENGTHS and short.shape[1:] == long.shape[1:]:
        return True
    raise ArgumentError(
        f"{name} keeps {key!r} of shape {tuple(short.shape)} for {_LENGTHS[0]} rows and "
        f"{tuple(long.shape)} for {_LENGTHS[1]}; expected the first axis to be the rows, "
        "or a shape that does not depend on them"
    )


def _initial_number(
    name: str, key: str, found: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor
) -> float | None:
    """Return the initial value of a row's state; None if it begins as a copy of the weights.

    Args:
        name: Name of the optimizer in errors.
        key: Key of the state.
        found: First state for weights of zero, and for weights of ``values``.
        values: Weights other than zero.

    Raises:
        ArgumentError: If the state begins as something else.
    """
    zeros, filled = found
    number = zeros.reshape(-1)[:1]
    if bool((zeros == number).all()) and bool((filled == number).all()):
        return float(number)
    if filled.shape == values.shape and bool((filled == values.to(filled.dtype)).all()):
        return None
    raise ArgumentError(
        f"{name} initializes {key!r} neither with a constant nor with a copy of the weights; "
        "expected one of these, because the state of single rows is initialized"
    )


def table_layouts(
    optimizer_class: Any,
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    gradients: GradientKind | None,
) -> dict[HostEmbedding, StateLayout]:
    """Return the state that the optimizer keeps for each table.

    Args:
        optimizer_class: Class of the optimizer.
        groups: Parameter groups of tables.
        options: Options of the optimizer.
        gradients: Kind of the gradients that the user chose; None for any.

    Raises:
        ArgumentError: If the optimizer cannot train rows of a table, or its rule depends on the
            kind of gradients, and the user chose none.
    """
    found = {}
    for group in groups:
        own = group_options(group)
        layouts: dict[tuple[int, torch.dtype], StateLayout] = {}
        for table in group["params"]:
            kind = dim, dtype = table.embedding_dim, TORCH[np.dtype(table.store.dtype)]
            if kind not in layouts:
                layout = discover(optimizer_class, options, dim, dtype, own, gradients)
                layouts[kind] = layout
                if gradients is None and not layout.sparse:
                    require_one_rule(OptimizerTrial(optimizer_class, options, own), dim, dtype)
            found[table] = layouts[kind]
            if found[table].sparse and getattr(table, "mode", None) == "max":
                raise ArgumentError(
                    f"{table.name} has mode='max', for which torch computes dense gradients only; "
                    "expected mode='sum' or 'mean' for sparse gradients; give gradients='dense', "
                    "or an optimizer that takes dense gradients"
                )
    return found
