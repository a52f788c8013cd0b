"""require_one_rule(): refuses optimizers whose rule depends on whether gradients are sparse.

The check runs an optimizer with dense and with sparse gradients on a small table. The gradients are
equal, and contain every row. If the rule is the same, the results differ only by rounding. DLRM's
RWSAdagrad, for example, keeps one number for each row if gradients are sparse, and one number for
each weight if they are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.optimizer_trial import OptimizerTrial

Trained = tuple[torch.Tensor, dict[str, Any]]
"""Weights and state after a run."""

_N_ROWS = 3
_N_STEPS = 8
# Each step rounds a few times. All optimizers of torch stay below 1.
_ROUNDINGS = 2 * _N_STEPS


def require_one_rule(trial: OptimizerTrial, dim: int, dtype: torch.dtype) -> None:
    """Check that an optimizer has the same result with dense and with sparse gradients.

    An optimizer that takes only one kind of gradients passes, because there is no choice.

    Args:
        trial: The optimizer.
        dim: Numbers in a row.
        dtype: Dtype of the table.

    Raises:
        ArgumentError: If the results differ.
        MemoryError: If the system does not have the memory for the trial.
    """
    # With more precise weights, a different rule is easier to tell from rounding. An optimizer may
    # support one dtype only, so several are tried.
    for precision in dict.fromkeys((torch.float64, torch.float32, dtype)):
        try:
            difference = _difference(trial, dim, precision)
        except MemoryError:
            # This error does not concern the optimizer.
            raise
        except Exception:
            continue
        if difference:
            raise ArgumentError(
                f"{trial.name} has different rules for dense and for sparse gradients: "
                f"{difference} on a small table differs; expected a choice between them; give "
                "gradients='sparse' for the rule of nn.Embedding(sparse=True), or "
                "gradients='dense' for the rule of nn.Embedding(sparse=False)"
            )
        return


def _difference(trial: OptimizerTrial, dim: int, dtype: torch.dtype) -> str:
    """Return the name of a result that dense and sparse gradients change; empty if none differs.

    A result that differs between two runs with dense gradients does not count. The optimizer may
    draw random numbers from its own generator, or store a time.
    """
    numbers = np.random.default_rng(0)
    values = torch.from_numpy(numbers.uniform(1, 2, (_N_ROWS, dim))).to(dtype)
    drawn = numbers.standard_normal((_N_STEPS, _N_ROWS, dim))
    gradients = [torch.from_numpy(gradient).to(dtype) for gradient in drawn]
    dense = trial.train(values, gradients, sparse=False)
    found = _differences(values, dense, trial.train(values, gradients, sparse=True))
    if found:
        again = _differences(values, dense, trial.train(values, gradients, sparse=False))
        found = [name for name in found if name not in again]
    return found[0] if found else ""


def _differences(values: torch.Tensor, one: Trained, other: Trained) -> list[str]:
    """Return the names of the results that differ between two runs from ``values``."""
    weights, state = one
    # Weights are rounded to their dtype. Updates are rounded to the dtype of the state, which may
    # be less precise.
    update = (weights - values).abs().max().double()
    allowed = _eps(weights) * values.abs().max().double()
    allowed += max(map(_eps, (weights, *state.values()))) * update
    agree = _agree(weights, other[0], _ROUNDINGS * float(allowed))
    return ["the result"] * (not agree) + _different_state(state, other[1])


def _different_state(state: Mapping[str, Any], other_state: Mapping[str, Any]) -> list[str]:
    """Return the names of the state that differs."""
    found = []
    for key in sorted({*state, *other_state}, key=str):
        one, other = state.get(key), other_state.get(key)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            largest = float(one.abs().max()) if one.numel() else 0.0
            is_same = _agree(one, other, _ROUNDINGS * _eps(one) * largest)
        else:
            is_same = type(one) is type(other) and one == other
        if not is_same:
            found.append(f"state {key!r}")
    return found


def _agree(one: torch.Tensor, other: torch.Tensor, allowed: float) -> bool:
    """Return whether two tensors are equal, or differ by ``allowed`` at most."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=0, atol=allowed, equal_nan=True)


def _eps(value: Any) -> float:
    """Return the relative rounding error; 0 for whole numbers, which are not rounded."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return float(torch.finfo(value.dtype).eps)
    return 0.0
