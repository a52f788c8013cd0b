"""Optimizers for copies of a model, with the class and options of the user's optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.tensors.pytree import flatten


def optimizer_for(model: nn.Module, given: Any, stand_ins: Mapping[int, torch.Tensor]) -> Any:
    """Return an optimizer for a copy of a model.

    Args:
        model: The copy.
        given: An optimizer of the original, or a function that makes an optimizer from parameters;
            None for AdamW.
        stand_ins: Tensors of the copy by the id of the original tensor.

    Raises:
        ArgumentError: If the optimizer has parameters that are not in ``stand_ins``.
    """
    if not isinstance(given, torch.optim.Optimizer):
        make = given or torch.optim.AdamW
        return make([p for p in model.parameters() if p.requires_grad])
    if any(id(p) not in stand_ins for group in given.param_groups for p in group["params"]):
        raise ArgumentError(
            "optimizer= has parameters that belong neither to the model nor to the loss; give an "
            "optimizer of model.parameters(), or its class"
        )
    groups = [_group_of_copies(group, stand_ins) for group in given.param_groups]
    return type(given)(groups, **_accepted(type(given), given.defaults))


def use_cuda_defaults(optimizer: Any) -> None:
    """Make an optimizer on the CPU step parameters as it does on CUDA.

    By default, torch steps many parameters together on CUDA. That takes temporary memory of about
    the size of the parameters.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (leaf for _, leaf in flatten(state)[0] if isinstance(leaf, torch.Tensor))


def _group_of_copies(
    group: dict[str, Any], stand_ins: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    return group | {"params": [stand_ins[id(p)] for p in group["params"]]}


def _accepted(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of an optimizer that its constructor accepts."""
    accepted = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in accepted}
