"""StepRun: a training step on tensors without data, with a tracker of its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.storage_tracker import StorageTracker
from pinfeed.training.memory_model.tensor_specs import SampleSpec


class Step(Protocol):
    """Function that computes the gradients of a batch.

    Its result lives until the next step, as the variables of a training loop do.
    """

    def __call__(self, run: StepRun, batch_size: int) -> Any: ...


class StepRun:
    """Parts of a training step that a Step composes.

    Args:
        model: The model, on fake tensors.
        loss: Function of outputs and targets.
        samples: Shapes and dtypes of inputs and targets; None for no targets.
        autocast: Function that makes the context for forward passes and losses.
        tracker: Tracker of the memory of the step.

    Attributes:
        model: The model.
        tracker: The tracker.
        held: Outputs and loss of the previous step, while they are alive.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        samples: tuple[SampleSpec, SampleSpec | None],
        autocast: Callable[[], AbstractContextManager[Any]],
        tracker: StorageTracker,
    ) -> None:
        self.model = model
        self._loss = loss
        self._samples = samples
        self._autocast = autocast
        self.tracker = tracker
        self.held: tuple[Any, ...] = ()

    def batch(self, n: int) -> tuple[Any, Any]:
        """Return inputs and targets of ``n`` samples."""
        self.tracker.enter("batch")
        inputs, targets = self._samples
        made_inputs = inputs.batch(n, _empty)
        return made_inputs, None if targets is None else targets.batch(n, _empty)

    def outputs(self, inputs: Any) -> Any:
        """Run the forward pass."""
        self.tracker.enter("forward")
        with self._autocast():
            return call_model(self.model, inputs)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss."""
        self.tracker.enter("forward")
        with self._autocast():
            found: torch.Tensor = self._loss(outputs, targets)
            return found

    def backward(self, loss: Any) -> None:
        """Run the backward pass, and label the gradients."""
        self.tracker.enter("backward")
        loss.backward()
        self.tracker.label((p.grad for p in self.model.parameters()), "gradients")


def plain_step(run: StepRun, batch_size: int) -> Any:
    """Run forward pass, loss and backward pass of the whole batch."""
    inputs, targets = run.batch(batch_size)
    outputs = run.outputs(inputs)
    run.held = run.held[1:]
    loss = run.loss(outputs, targets)
    # The variables of a loop keep their values until the next step assigns them again.
    run.held = (outputs, loss) if run.tracker.is_cpu else ()
    run.backward(loss)
    return inputs, targets, outputs, loss


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
