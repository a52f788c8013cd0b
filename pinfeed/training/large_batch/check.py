"""Check: differences between a strategy and the plain step on a small batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.strategies.recompute import (
    Buffers,
    buffers_of,
    replayed_buffers,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.validation.safe_repr import safe_repr

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_DEFAULT_ROUNDING = 1e-4


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


@dataclass(frozen=True)
class _CheckedStep:
    """Loss, gradients in float64, and buffers of the model after a step."""

    loss: float
    gradients: list[Any]
    buffers: list[torch.Tensor]


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
    parameters = spec.parameters
    state = rng_state.capture()
    gradients = [p.grad for p in parameters]
    buffers = buffers_of(spec.modules)
    try:
        rng_state.restore(state)
        want = _run(parameters, buffers, plain)
        rng_state.restore(state)
        got = _run(parameters, buffers, other)
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        rng_state.restore(state)
    return _check(spec, strategy, want, got)


def _run(
    parameters: Sequence[torch.Tensor], before: Buffers, compute: Callable[[], torch.Tensor]
) -> _CheckedStep:
    for p in parameters:
        p.grad = None
    with replayed_buffers(before):
        loss = compute().item()
        buffers = [value for module, _ in before for value in module._buffers.values()]
        copies = [value.clone() for value in buffers if value is not None]
        gradients = [None if p.grad is None else p.grad.double() for p in parameters]
        return _CheckedStep(loss, gradients, copies)


def _check(spec: StepSpec, strategy: str, want: _CheckedStep, got: _CheckedStep) -> Check:
    differences = [_difference(a, b) for a, b in zip(want.gradients, got.gradients, strict=True)]
    gradient_error = _norm(differences) / (_norm(want.gradients) or 1)
    loss_error = 0.0
    if not (math.isnan(want.loss) and math.isnan(got.loss)):
        loss_error = abs(want.loss - got.loss) / (abs(want.loss) or 1)
    pairs = zip(want.buffers, got.buffers, strict=True)
    buffer_error = max((_largest_error(a, b) for a, b in pairs if a.numel()), default=0.0)
    limits = [_ROUNDING.get(p.dtype, _DEFAULT_ROUNDING) for p in spec.parameters]
    rounding = max(limits, default=_DEFAULT_ROUNDING)
    # The comparison with NaN is false, so NaN is not exact.
    is_exact = all(error <= rounding for error in (gradient_error, loss_error, buffer_error))
    return Check(strategy, gradient_error, loss_error, buffer_error, is_exact)


def _norm(tensors: list[Any]) -> float:
    squares = [float(tensor.square().sum()) for tensor in tensors if tensor is not None]
    return math.sqrt(sum(squares))


def _difference(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a - b


def _largest_error(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.double() - b.double()).abs().max()
    return float(difference) / (float(a.double().abs().max()) or 1.0)
