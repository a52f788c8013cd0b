"""StepSpec: the model, the loss and the settings of a training step; and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pinfeed.training.large_batch.batches import n_samples
from pinfeed.training.large_batch.loss_reduction import Count, Reduction
from pinfeed.training.memory_model.models import call_model


@dataclass(frozen=True)
class StepSpec:
    """Model, loss and settings of a training step, without the batch.

    Attributes:
        model: The model.
        loss: Function of outputs and targets.
        modules: Every module whose parameters receive gradients, the model first.
        reduction: Whether the loss is the mean or the sum of its terms; None if this is unknown.
        count: Function that returns the number of terms for a batch of targets.
        context: Function that makes the context for forward passes and losses, such as autocast.
        scale: Function applied to the loss before the backward pass, such as a loss scaler.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    modules: Sequence[nn.Module]
    reduction: Reduction | None
    count: Count
    context: Callable[[], AbstractContextManager[Any]]
    scale: Callable[[torch.Tensor], torch.Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that require gradients, each once."""
        found: dict[int, nn.Parameter] = {}
        for module in self.modules:
            found.update((id(p), p) for p in module.parameters() if p.requires_grad)
        return list(found.values())

    @property
    def training_modes(self) -> tuple[bool, ...]:
        """Training mode of each module, in the order of ``modules()``."""
        return tuple(module.training for root in self.modules for module in root.modules())

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss of some samples."""
        with self.context():
            return self.loss(call_model(self.model, inputs), targets)

    def count_terms(self, inputs: Any, targets: Any) -> float:
        """Return the number of terms in the loss of some samples."""
        return float(n_samples(inputs) if targets is None else self.count(targets))

    def backward_whole(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Add the gradients of the whole batch in one backward pass, and return its loss."""
        loss = self.forward(inputs, targets)
        self.scale(loss).backward()
        return loss.detach()


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


@contextlib.contextmanager
def gradient_transaction(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Add the gradients that the block computes; if the block raises, restore all gradients.

    Within the block the parameters have no gradients.
    """
    with gradients_set_aside(parameters):
        yield
        computed = [p.grad for p in parameters]
    for p, gradient in zip(parameters, computed, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def batch_norms(model: nn.Module) -> list[str]:
    """Return the modules that normalize over the batch, such as ``module '1' (BatchNorm1d)``.

    Their output for a sample depends on the other samples of its chunk.
    """
    return [
        f"module {name!r} ({type(norm).__name__})" if name else f"the model ({type(norm).__name__})"
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
    ]
