"""How far a strategy is from the plain step, on a small batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.training import rng_state
from pinfeed.training.large_batch.strategies.gradients import StepSpec
from pinfeed.training.large_batch.strategies.recompute import buffers_of, replayed_buffers

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Check:
    """A comparison. ``str(check)`` says it.

    Attributes:
        strategy: What was compared with the plain step.
        gradient_error: Norm of the difference of all gradients, in norms of the gradients.
        loss_error: Of the loss, likewise.
        buffer_error: Largest difference of a buffer (running statistics), in its largest value.
        is_exact: Whether all of them are no more than rounding.
    """

    strategy: str
    gradient_error: float
    loss_error: float
    buffer_error: float
    is_exact: bool

    def __bool__(self) -> bool:
        return self.is_exact

    def __str__(self) -> str:
        verdict = "equal but for rounding" if self.is_exact else "NOT the same"
        errors = f"gradients {self.gradient_error:.1e}, loss {self.loss_error:.1e}, buffers {self.buffer_error:.1e}"
        return f"{self.strategy} and the plain step: {verdict} ({errors})"


def compare_with_plain_step(
    spec: StepSpec,
    strategy: str,
    plain: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
) -> Check:
    """Both, from the same state; the model, its gradients and the generators are as before afterwards."""
    parameters, state = spec.parameters, rng_state.capture()
    gradients, before = [p.grad for p in parameters], buffers_of(spec.modules)

    def run(compute: Callable[[], torch.Tensor]) -> tuple[float, list[Any], list[torch.Tensor]]:
        for p in parameters:
            p.grad = None
        rng_state.restore(state)
        with replayed_buffers(before):
            loss = compute().item()
            found = [
                value.clone()
                for module, _ in before
                for value in module._buffers.values()
                if value is not None
            ]
            return loss, [None if p.grad is None else p.grad.double() for p in parameters], found

    try:
        loss, want, want_buffers = run(plain)
        other_loss, got, got_buffers = run(other)
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        rng_state.restore(state)
    size = _norm(want)
    gradient_error = _norm([_difference(a, b) for a, b in zip(want, got, strict=True)]) / (
        size or 1
    )
    loss_error = (
        0.0
        if math.isnan(loss) and math.isnan(other_loss)
        else abs(loss - other_loss) / (abs(loss) or 1)
    )
    buffer_error = max(
        (_largest(a, b) for a, b in zip(want_buffers, got_buffers, strict=True) if a.numel()),
        default=0.0,
    )
    rounding = max((_ROUNDING.get(p.dtype, 1e-4) for p in parameters), default=1e-4)
    # Not so if one is not a number.
    is_exact = all(error <= rounding for error in (gradient_error, loss_error, buffer_error))
    return Check(strategy, gradient_error, loss_error, buffer_error, is_exact)


def _norm(tensors: list[Any]) -> float:
    squares = [float(tensor.square().sum()) for tensor in tensors if tensor is not None]
    return math.sqrt(sum(squares))


def _difference(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a - b


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.double() - b.double()).abs().max()
    return float(difference) / (float(a.double().abs().max()) or 1.0)
