"""Check: differences between a strategy and the plain step on a small batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.step_comparison import ROUNDING, largest_rounding
from pinfeed.training.large_batch.step_result import (
    StepResult,
    norm_of,
    number_contexts,
    relative_error,
    run_step,
)
from pinfeed.training.large_batch.step_spec import StepSpec

_ROUNDING = {**ROUNDING, torch.float32: 1e-4}
"""Relative differences that rounding explains; sums over a batch of any size round more."""


@dataclass(frozen=True, repr=False)
class Check:
    """Differences between a strategy and the plain step; ``str(check)`` is a sentence.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> with pinfeed.BigBatch(model, torch.nn.MSELoss(), chunk_size=64) as big_batch:
        ...     check = big_batch.check(torch.randn(9, 8), torch.randn(9, 1))
        >>> bool(check)
        True

    Attributes:
        strategy: The strategy that was compared.
        gradient_error: Norm of the difference of all gradients, relative to their norm.
        loss_error: Difference of the losses, relative to the loss.
        buffer_error: Largest norm of the difference of a buffer (such as running statistics),
            relative to the buffer's norm.
        is_exact: Whether all differences are no more than rounding; ``bool(check)`` is the same.
        has_fixed_numbers: Whether torch returned fixed random numbers in both steps, because chunks
            draw others than the whole batch.
    """

    strategy: str
    gradient_error: float
    loss_error: float
    buffer_error: float
    is_exact: bool
    has_fixed_numbers: bool

    def __bool__(self) -> bool:
        return self.is_exact

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        verdict = "equal except for rounding" if self.is_exact else "NOT equal"
        errors = (
            f"gradients {self.gradient_error:.1e}, loss {self.loss_error:.1e}, "
            f"buffers {self.buffer_error:.1e}"
        )
        fixed = ", with fixed random numbers" if self.has_fixed_numbers else ""
        return f"{self.strategy} and the plain step{fixed}: {verdict} ({errors})"


def compare_with_plain_step(
    spec: StepSpec,
    strategy: str,
    plain: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
    *,
    is_cut: bool,
) -> Check:
    """Run two steps from the same state and compare them.

    The model, its gradients and the random generators do not change.

    Args:
        spec: The model and the loss.
        strategy: Name of the strategy, for the result.
        plain: Runs the plain step and returns its loss.
        other: Runs the step of the strategy and returns its loss.
        is_cut: Whether the strategy computes chunks, which draw other random numbers.

    Raises:
        ArgumentError: If chunks draw random numbers that cannot be fixed.
    """
    state = rng_state.capture()
    drawn = run_step(spec, plain, state).drawn if is_cut else set()
    checks = []
    for context in number_contexts(drawn):
        with context():
            want, got = (run_step(spec, compute, state) for compute in (plain, other))
        errors = _errors_of(want, got)
        is_exact = max(errors) <= largest_rounding(spec, _ROUNDING)
        checks.append(Check(strategy, *errors, is_exact, has_fixed_numbers=bool(drawn)))
    # The first one that is not exact, if there is one.
    return min(checks, key=bool)


def _errors_of(want: StepResult, got: StepResult) -> tuple[float, float, float]:
    """Return the relative errors of gradients, loss and buffers."""
    gradients = zip(want.gradients, got.gradients, strict=True)
    difference = math.hypot(*(relative_error(one, other, 1.0) for one, other in gradients))
    size = math.hypot(*map(norm_of, want.gradients))
    buffers = (relative_error(value, got.buffers[name]) for name, value in want.buffers.items())
    loss_error = relative_error(want.loss, got.loss)
    return difference / (size or 1.0), loss_error, max(buffers, default=0.0)
