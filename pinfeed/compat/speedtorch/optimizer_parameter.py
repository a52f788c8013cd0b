"""The weight of an embedding, its parameter group, and the layout of its optimizer state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.optimizer_state import StateLayout, discover

# These options select an implementation and do not change the state.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def weight_of(model: nn.Module, variable_name: str) -> nn.Parameter:
    """Return the weight of an embedding in a model.

    Raises:
        ArgumentError: If the model has no embedding of this name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weight = parameters.get(f"{variable_name}.weight")
    if weight is None:
        names = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
        raise ArgumentError(
            f"variable_name={variable_name!r}: the model has no parameter {variable_name}.weight; "
            f"expected one of {names}"
        )
    return weight


def group_of(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, variable_name: str
) -> dict[str, Any]:
    """Return the parameter group that has the weight.

    Raises:
        ArgumentError: If no group has the weight.
    """
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            return group
    raise ArgumentError(
        f"variable_name={variable_name!r}: the optimizer does not have this parameter; "
        "make the optimizer from model.parameters()"
    )


def discover_layout(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, variable_name: str, dim: int
) -> StateLayout:
    """Find the state that the optimizer keeps for the weight, with its current dtype and options.

    Raises:
        ArgumentError: If the optimizer does not have the weight, cannot train rows, or keeps state
            that starts as a copy of the weights.
    """
    optimizer_class = type(optimizer)
    options = _options(optimizer_class, group_of(optimizer, weight, variable_name))
    # A default device must not apply to the small tables of the trial.
    with torch.device("cpu"):
        layout = discover(optimizer_class, options, dim, weight.dtype)
    if copies := [row.key for row in layout.rows if row.initial is None]:
        raise ArgumentError(
            f"{optimizer_class.__name__} starts its state {copies} as a copy of the weights; "
            "expected state that starts with a constant; use pinfeed.RowOptimizer, which can "
            "train with this optimizer"
        )
    return layout


def _options(optimizer_class: type, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments that give an optimizer the options of this group."""
    accepted = inspect.signature(optimizer_class).parameters
    options = {}
    for key, value in group.items():
        if key in accepted and key != "params" and key not in _IMPLEMENTATION_OPTIONS:
            options[key] = value.item() if isinstance(value, torch.Tensor) else value
    return options
