"""Warns of what a training loop may have forgotten."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class LoopWarning(UserWarning):
    """A training loop does what is hardly meant."""


class MissingStepCheck:
    """Sees what a loop does, and warns, once for each thing, of what it may have forgotten.

    - ``zero_grad``: a backward pass adds to gradients that a step has used already. It makes no
      difference who clears them, and how: what counts is whether they are as the step left them.
    - ``step``: gradients are cleared twice running that no step has used; or an epoch ends that had
      backward passes and no step.

    Several backward passes before a step are no mistake: that is how gradients are accumulated.
    Steps are seen whoever takes them; where that cannot be (optimizers without hooks, scalers that
    leave steps out), nothing is said of steps.

    Args:
        optimizers: Those of the loop.
        parameters: Gives those of an optimizer.
        has_scaler: Whether steps may be left out.
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
        self._sees_steps = not has_scaler and all(
            hasattr(optimizer, "register_step_post_hook") for optimizer in optimizers
        )
        # Of each optimizer a gradient, as its last step left it.
        self._used: dict[int, tuple[int, int, int] | None] = {}
        # Backward passes since the last step or clearing; clearings running that threw some away.
        self._n_backward = self._n_thrown = 0
        self._n_in_epoch = self._n_steps = 0
        self._warned: set[str] = set()
        hooks = [
            optimizer.register_step_post_hook
            for optimizer in optimizers
            if hasattr(optimizer, "register_step_post_hook")
        ]
        self._hooks = [
            register(lambda optimizer, *_: self.stepped([optimizer])) for register in hooks
        ]

    def close(self) -> None:
        """Look no longer. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def epoch_begins(self) -> None:
        """Whatever was before does not count."""
        self._used = {}
        self._n_backward = self._n_thrown = self._n_in_epoch = self._n_steps = 0

    def backward_begins(self) -> None:
        """Gradients are about to be added."""
        if any(
            used is not None and used == self._seen(self._optimizers[i])
            for i, used in self._used.items()
        ):
            self._warn(
                "zero_grad",
                "backward() adds to gradients that step() has used already; call zero_grad() after each step()",
            )
        self._used = {}
        self._n_backward = self._n_backward + 1
        self._n_in_epoch = self._n_in_epoch + 1

    def stepped(self, optimizers: Sequence[Any] | None = None) -> None:
        """Some optimizers have taken a step, or a scaler has left it out; all of them, if it is not said which."""
        self._n_steps += 1
        self._n_backward = self._n_thrown = 0
        for i, optimizer in enumerate(self._optimizers):
            if optimizers is None or any(optimizer is one for one in optimizers):
                self._used[i] = self._seen(optimizer)

    def cleared(self) -> None:
        """Gradients were cleared."""
        self._n_thrown = self._n_thrown + 1 if self._n_backward else 0
        self._n_backward = 0
        self._used = {}
        if self._n_thrown > 1 and self._sees_steps:
            self._warn(
                "step",
                "zero_grad() cleared gradients that no step() has used, twice running; call step() after backward()",
            )

    def epoch_ends(self) -> None:
        """Its last batch is done."""
        if self._n_in_epoch and not self._n_steps and self._sees_steps:
            self._warn(
                "step",
                f"an epoch of {self._n_in_epoch} backward passes ended without a step(); call step() after backward()",
            )

    def _seen(self, optimizer: Any) -> tuple[int, int, int] | None:
        """A gradient: which, where, and how often it was written to.

        No value is read, which would wait for the device.
        """
        for i, parameter in enumerate(self._parameters(optimizer)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                return i, parameter.grad.data_ptr(), parameter.grad._version
        return None

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, LoopWarning, stacklevel=4)
