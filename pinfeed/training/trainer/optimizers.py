"""OptimizerGroup: one or more optimizers, gradient clipping, a loss scaler and schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.combined_optimizer import row_optimizers
from pinfeed.training.trainer.loop_checks import MissingStepCheck


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

    def missing_step_check(self) -> MissingStepCheck:
        """Return a check that warns if the loop does not step or does not clear gradients."""
        has_scaler = self._scaler is not None
        return MissingStepCheck(self.optimizers, parameters_of, has_scaler=has_scaler)

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
