"""What happens to gradients: scaled back, clipped, used by one or more optimizers, cleared; and schedulers at the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pinfeed.errors import ArgumentError


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Those that an optimizer steps."""
    # A RowOptimizer's change from batch to batch.
    own = getattr(optimizer, "parameters", None)
    return (
        list(own())
        if own is not None
        else [p for group in optimizer.param_groups for p in group["params"]]
    )


class OptimizerGroup:
    """Optimizers as one.

    Args:
        optimizers: One, or several of different parameters.
        schedulers: One, several or none; of epochs.
        clip_norm: The norm of all gradients together is at most this.
        scaler: A ``torch.amp.GradScaler``.

    Raises:
        ArgumentError: What cannot be.
    """

    def __init__(
        self, optimizers: Any, schedulers: Any, clip_norm: float | None, scaler: Any
    ) -> None:
        self.optimizers = _several(optimizers, "optimizer", "step", "zero_grad")
        self.schedulers = _several(schedulers, "scheduler", "step")
        if not self.optimizers:
            raise ArgumentError("optimizer= is empty; expected a torch optimizer, or several")
        if isinstance(
            optimizer := next(
                (one for one in (*self.optimizers, *self.schedulers) if isinstance(one, type)), None
            ),
            type,
        ):
            raise ArgumentError(
                f"got the class {optimizer.__name__}; expected what it makes, as {optimizer.__name__}(model.parameters())"
            )
        is_number = hasattr(clip_norm, "__float__") and not isinstance(clip_norm, bool)
        if clip_norm is not None and not (is_number and clip_norm > 0):
            raise ArgumentError(f"clip_norm={clip_norm!r}: expected a number above 0, or None")
        self._clip_norm = clip_norm
        self._scaler = scaler

    def parameters(self) -> list[torch.Tensor]:
        """Those of all optimizers."""
        return [
            parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)
        ]

    def step(self) -> None:
        """Use the gradients."""
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

    def epoch_ends(self, loss: float) -> None:
        """Tell the schedulers."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()


def _several(value: Any, name: str, *methods: str) -> Sequence[Any]:
    """One as a sequence, checked."""
    found = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in found:
        for method in methods:
            if not callable(getattr(one, method, None)):
                raise ArgumentError(
                    f"{name}={one!r} has no {method}(); expected a torch {name}, or a list of them"
                )
    return found
