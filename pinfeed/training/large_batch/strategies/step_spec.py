"""StepSpec: the model, the loss and the settings of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.training.large_batch.strategies.loss_reduction import Count, Reduction
from pinfeed.training.large_batch.strategies.micro_batches import n_samples
from pinfeed.training.memory_model.models import call_model


@dataclass(frozen=True)
class StepSpec:
    """Model, loss and settings of a training step, without the batch.

    Attributes:
        model: The model.
        loss: Function of outputs and targets.
        modules: Every module whose parameters receive gradients, the model first.
        reduction: Whether the loss is the mean or the sum of its terms.
        count: Function that returns the number of terms for a batch of targets.
        context: Function that makes the context for forward passes and losses, such as autocast.
        scale: Function applied to the loss before the backward pass, such as a loss scaler.
    """

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    modules: Sequence[nn.Module]
    reduction: Reduction
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
