"""MissingCalls: watches a training loop, and warns of a forgotten step or zero_grad."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten

GradientVersion = tuple[int, int, int]
"""A gradient: index of its parameter, address of its memory, number of writes to it."""

_MANY = 1000
"""Backward passes without a step that are no accumulation of gradients."""


class InfinityBatchWarning(Warning):
    """A setting is probably a mistake, or a training loop lacks a call."""


def warn(message: str, stacklevel: int) -> None:
    """Warn with InfinityBatchWarning; a stack level of 2 is the caller of this function."""
    warnings.warn(message, InfinityBatchWarning, stacklevel=stacklevel)


class MissingCalls:
    """Watches a training loop, and warns once for each call that it lacks.

    - ``zero_grad``: A backward pass adds to gradients that a step has already used. The check
      compares the gradients with those after the step, so the user may clear them in any way.
    - ``step``: An epoch ends that had backward passes and no step, or there are 1000 backward
      passes without a step.

    Several backward passes before a step are allowed, because they accumulate gradients. Hooks
    notice every backward pass and every step, also those that the user's code calls. They only
    take notes, because a backward pass may run in a thread of torch; ``report`` warns.

    Args:
        optimizer: Optimizer of the loop. An optimizer without hooks is not watched.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._sees_steps = hasattr(optimizer, "register_step_post_hook")
        if self._sees_steps:
            optimizer.register_step_post_hook(self._on_step)
        self._messages: dict[str, str] = {}
        self._warned: set[str] = set()
        self.epoch_begins()

    def epoch_begins(self) -> None:
        """Forget the gradients and counts of the previous epoch."""
        self._after_step: GradientVersion | None = None
        """A gradient, as the last step left it."""
        self._n_backward = 0
        """Backward passes since the last step."""
        self._n_steps = 0
        """Steps in this epoch."""

    def watch(self, outputs: Any) -> None:
        """Notice the backward pass of the outputs of a batch."""
        for _, leaf in flatten(outputs)[0]:
            if self._sees_steps and isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._on_backward)
                return

    def epoch_ends(self) -> None:
        """Check that an epoch with backward passes had a step."""
        if self._n_backward and not self._n_steps:
            self._miss_step()

    def report(self) -> None:
        """Warn of missing calls, at the line that called the caller."""
        for call, message in self._messages.items():
            if call not in self._warned:
                self._warned.add(call)
                warn(message, 4)
        self._messages.clear()

    def _on_backward(self, _: torch.Tensor) -> None:
        if self._after_step is not None and self._after_step == self._gradient_version():
            self._messages["zero_grad"] = (
                "backward() adds to gradients that step() has already used; call zero_grad() "
                "after each step()"
            )
        self._after_step = None
        self._n_backward += 1
        if self._n_backward == _MANY:
            self._miss_step()

    def _on_step(self, *_: Any) -> None:
        self._n_steps += 1
        self._n_backward = 0
        self._after_step = self._gradient_version()

    def _miss_step(self) -> None:
        self._messages["step"] = (
            f"{self._n_backward} backward passes of an epoch had no step(); call step() after "
            "backward()"
        )

    def _gradient_version(self) -> GradientVersion | None:
        """Return the version of the optimizer's first gradient; None if it has no gradient.

        No value is read, because that would wait for the device.
        """
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                return i, parameter.grad.data_ptr(), parameter.grad._version
        return None
