"""OptimizerGroup: several optimizers used as one; MissingStepCheck: forgotten calls of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.combined_optimizer import row_optimizers

GradientVersion = tuple[int, int, int]
"""A gradient: index of its parameter, address of its memory, number of writes to it."""


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters that an optimizer steps."""
    # The parameters of a RowOptimizer change from batch to batch.
    parameters = getattr(optimizer, "parameters", None)
    if parameters is not None:
        return list(parameters())
    return [p for group in optimizer.param_groups for p in group["params"]]


class OptimizerGroup:
    """Several optimizers used as one.

    Args:
        optimizers: One optimizer, or several that have different parameters.
        schedulers: One scheduler, several or None; stepped after every epoch.
        clip_norm: Largest norm of all gradients together; None for no clipping.
        scaler: A ``torch.amp.GradScaler``, or None.

    Raises:
        ArgumentError: If one of them is invalid.
    """

    def __init__(
        self, optimizers: Any, schedulers: Any, clip_norm: float | None, scaler: Any
    ) -> None:
        self.optimizers = _as_sequence(optimizers, "optimizer", "step", "zero_grad")
        self.schedulers = _as_sequence(schedulers, "scheduler", "step")
        if not self.optimizers:
            raise ArgumentError(
                "optimizer= is empty; expected a torch optimizer, or a list of torch optimizers"
            )
        for one in (*self.optimizers, *self.schedulers):
            if isinstance(one, type):
                raise ArgumentError(
                    f"got the class {one.__name__}; expected an object; give {one.__name__}(...)"
                )
        is_number = hasattr(clip_norm, "__float__") and not isinstance(clip_norm, bool)
        if clip_norm is not None and not (is_number and clip_norm > 0):
            raise ArgumentError(f"clip_norm={clip_norm!r}: expected a number above 0, or None")
        self._clip_norm = clip_norm
        self._scaler = scaler

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers."""
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    def check_steps(self, model: nn.Module, loss: Any) -> None:
        """Check that an optimizer steps a parameter of the model or the loss.

        No optimizer does if the model was copied or made again after the optimizer.

        Raises:
            ArgumentError: If no optimizer steps such a parameter.
        """
        if any(map(row_optimizers, self.optimizers)):
            return
        modules = [module for module in (model, loss) if isinstance(module, nn.Module)]
        parameters = (p for module in modules for p in module.parameters())
        trainable = {id(p) for p in parameters if p.requires_grad}
        if trainable and trainable.isdisjoint(id(p) for p in self.parameters()):
            raise ArgumentError(
                f"optimizer= steps none of the {len(trainable)} parameters of the model; expected "
                "an optimizer of this model's parameters; make it from model.parameters() of the "
                "model that the Trainer gets"
            )

    def step(self) -> None:
        """Clip the gradients if the user gave ``clip_norm``, and step all optimizers."""
        if self._clip_norm is not None:
            if self._scaler is not None:
                for optimizer in self.optimizers:
                    self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), self._clip_norm)
        for optimizer in self.optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step_schedulers(self, loss: float) -> None:
        """Step the schedulers after an epoch; ReduceLROnPlateau gets the loss of the epoch."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()


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
        has_scaler: Whether a scaler may skip steps.
    """

    def __init__(self, optimizers: Sequence[Any], *, has_scaler: bool) -> None:
        self._optimizers = optimizers
        hookable = [one for one in optimizers if hasattr(one, "register_step_post_hook")]
        self._sees_steps = not has_scaler and len(hookable) == len(optimizers)
        self._warned: set[str] = set()
        self.epoch_begins()
        self._hooks = [one.register_step_post_hook(self._on_step) for one in hookable]

    def close(self) -> None:
        """Remove the hooks. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def epoch_begins(self) -> None:
        """Forget the gradients and counts of the previous epoch."""
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
        for i, parameter in enumerate(parameters_of(optimizer)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                return i, parameter.grad.data_ptr(), parameter.grad._version
        return None

    def _warn(self, call: str, message: str) -> None:
        if call not in self._warned:
            self._warned.add(call)
            warnings.warn(message, LoopWarning, stacklevel=4)


def _as_sequence(value: Any, name: str, *methods: str) -> Sequence[Any]:
    """Return one object or several as a sequence.

    Raises:
        ArgumentError: If an object lacks one of the methods.
    """
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in found:
        for method in methods:
            if not callable(getattr(one, method, None)):
                raise ArgumentError(
                    f"{name}={one!r} has no {method}(); expected a torch {name}, or a list of "
                    f"torch {name}s"
                )
    return found
