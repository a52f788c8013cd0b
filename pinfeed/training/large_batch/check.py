"""Check: differences between a strategy and the plain step on a small batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.step_comparison import ROUNDING, norm_of, run_step
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.validation.safe_repr import safe_repr

_ROUNDING = ROUNDING | {torch.float32: 1e-4}
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
        buffer_error: Largest difference in a buffer (such as running statistics), relative to the
            buffer's largest value.
        is_exact: Whether all differences are no more than rounding; ``bool(check)`` is the same.
    """

    strategy: str
    gradient_error: float
    loss_error: float
    buffer_error: float
    is_exact: bool

    def __bool__(self) -> bool:
        return self.is_exact

    @safe_repr
    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        verdict = "equal except for rounding" if self.is_exact else "NOT equal"
        errors = (
            f"gradients {self.gradient_error:.1e}, loss {self.loss_error:.1e}, "
            f"buffers {self.buffer_error:.1e}"
        )
        return f"{self.strategy} and the plain step: {verdict} ({errors})"


def compare_with_plain_step(
    spec: StepSpec,
    strategy: str,
    plain: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
) -> Check:
    """Run two steps from the same state and compare them.

    The model, its gradients and the random generators do not change.

    Args:
        spec: The model and the loss.
        strategy: Name of the strategy, for the result.
        plain: Runs the plain step and returns its loss.
        other: Runs the step of the strategy and returns its loss.
    """
    state = rng_state.capture()
    with rng_state.replayed(state):
        want = run_step(spec, plain)
    with rng_state.replayed(state):
        got = run_step(spec, other)
    gradients = zip(want.gradients, got.gradients, strict=True)
    difference = math.hypot(*(norm_of(_difference(*pair)) for pair in gradients))
    size = math.hypot(*map(norm_of, want.gradients))
    losses = float(want.loss), float(got.loss)
    loss_error = 0.0
    if not all(map(math.isnan, losses)):
        loss_error = abs(losses[0] - losses[1]) / (abs(losses[0]) or 1.0)
    buffers = [
        _largest_error(value, got.state.buffers[name])
        for name, value in want.state.buffers.items()
        if value is not None and value.numel()
    ]
    errors = (difference / (size or 1.0), loss_error, max(buffers, default=0.0))
    limits = [_ROUNDING.get(p.dtype, _ROUNDING[torch.float32]) for p in spec.parameters]
    rounding = max(limits, default=_ROUNDING[torch.float32])
    # The comparison with NaN is false, so NaN is not exact.
    return Check(strategy, *errors, is_exact=all(error <= rounding for error in errors))


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.double() - b.double()).abs().max()
    return float(difference) / (float(a.double().abs().max()) or 1.0)


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a - b
