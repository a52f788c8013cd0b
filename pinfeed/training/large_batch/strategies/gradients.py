"""Gradients of a whole batch, and contexts that protect the gradients of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pinfeed.training.large_batch.strategies.step_spec import StepSpec


def backward_whole(spec: StepSpec, inputs: Any, targets: Any) -> torch.Tensor:
    """Add the gradients of the whole batch in one backward pass, and return its loss."""
    loss = spec.forward(inputs, targets)
    spec.scale(loss).backward()
    return loss.detach()


@contextlib.contextmanager
def gradient_transaction(spec: StepSpec) -> Iterator[None]:
    """Add the gradients that the block computes; if the block raises, restore all gradients.

    Within the block the parameters have no gradients.
    """
    parameters = spec.parameters
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, before in zip(parameters, gradients, strict=True):
            p.grad = before
        raise
    for p, before in zip(parameters, gradients, strict=True):
        if before is not None:
            p.grad = before if p.grad is None else before.add_(p.grad)


@contextlib.contextmanager
def gradients_set_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Clear the gradients for the block, and restore those of the caller at its end."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
