"""MissingStepCheck: warns about calls that a training loop may lack."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

GradientVersion = tuple[int, int, int]
"""A gradient: index of its parameter, address of its memory, number of writes to it."""


class LoopWarning(UserWarning):
    """A training loop probably lacks a call."""


class MissingStepCheck:
    """Observes a training loop, and warns once for each call that it may lack.

    - ``zero_grad``: A backward pass adds to gradients that a step has already used. The check
      compares the gradients with those after the step, so the user may clear them in any way.
    - ``step``: The loop clears gradients that no step has used, twice in a row. Or an epoch ends
      that had backward passes and no step.

    Several backward passes before a step are allowed, because they accumulate gradients. Hooks
    notice every step, also those that the user's code calls. Without such hooks, or with a scaler
    that may skip steps, the check does not warn about steps.

    Args:
        optimizers: Optimizers of the loop.
        parameters: Function that returns the parameters of an optimizer.
        has_scaler: Whether a scaler may skip steps.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        parameters: Callable[[Any], Iterable[torch.Tensor]],
        *,
        has_scaler: bool,
    ) -> None:
        self._optimizers = optimizers
        self._parameters = parameters
        hookable = [one for one in optimizers if hasattr(one, "register_step_post_hook")]
        self._sees_steps = not has_scaler and len(hookable) == len(optimizers)
        self._after_step: dict[int, GradientVersion | None] = {}
        """A gradient of each optimizer, as its last step left it."""
        self._n_backward = 0
        """Backward passes since the last step or clearing."""
        self._n_discarded = 0
        """Clearings in a row that discarded unused gradients."""
        self._n_in_epoch = 0
        """Backward passes in this epoch."""
        self._n_steps = 0
        """Steps in this epoch."""
        self._warned: set[str] = set()
        self._hooks = [one.register_step_post_hook(self._on_step) for one in hookable]

    def close(self) -> None:
        """Remove the hooks. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def epoch_begins(self) -> None:
        """Forget the gradients and counts of the previous epoch."""
        self._after_step = {}
        self._n_backward = 0
        self._n_discarded = 0
        self._n_in_epoch = 0
        self._n_steps = 0

    def backward_begins(self) -> None:
        """Check that a step has not used the gradients to which a backward pass will add."""
        for i, used in self._after_step.items():
            if used is not None and used == self._gradient_version(self._optimizers[i]):
                self._warn(
                    "zero_grad",
                    "backward() adds to gradients that step() has already used; call zero_grad() "
                    "after each step()",
                )
                break
        self._after_step = {}
        self._n_backward += 1
        self._n_in_epoch += 1

    def stepped(self, optimizers: Sequence[Any] | None = None) -> None:
        """Record that optimizers have stepped, or that a scaler has skipped the step.

        Args:
            optimizers: The optimizers; None for all of them.
        """
        self._n_steps += 1
        self._n_backward = 0
        self._n_discarded = 0
        for i, optimizer in enumerate(self._optimizers):
            if optimizers is None or any(optimizer is one for one in optimizers):
                self._after_step[i] = self._gradient_version(optimizer)

    def cleared(self) -> None:
        """Record that gradients were cleared, and check whether a step has used them."""
        self._n_discarded = self._n_discarded + 1 if self._n_backward else 0
        self._n_backward = 0
        self._after_step = {}
        if self._n_discarded > 1 and self._sees_steps:
            self._warn(
                "step",
                "zero_grad() cleared gradients that no step() has used, twice in a row; call "
                "step() after backward()",
            )

    def epoch_ends(self) -> None:
        """Check that an epoch with backward passes had a step."""
        if self._n_in_epoch and not self._n_steps and self._sees_steps:
            self._warn(
                "step",
                f"an epoch of {self._n_in_epoch} backward passes ended without a step(); call "
                "step() after backward()",
            )

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self.stepped([optimizer])

    def _gradient_version(self, optimizer: Any) -> GradientVersion | None:
        """Return the version of an optimizer's first gradient; None if it has no gradient.

        No value is read, because that would wait for the device.
        """
        for i, parameter in enumerate(self._parameters(optimizer)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                return i, parameter.grad.data_ptr(), parameter.grad._version
        return None

    def _warn(self, call: str, message: str) -> None:
        if call not in self._warned:
            self._warned.add(call)
            warnings.warn(message, LoopWarning, stacklevel=4)
