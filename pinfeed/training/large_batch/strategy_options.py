"""StrategyOptions: the options of BigBatch and Trainer that determine the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.memory import limits
from pinfeed.training.large_batch.select import STRATEGIES
from pinfeed.training.memory_model.training_step import check_autocast
from pinfeed.validation.arguments import check_flag, whole_number


@dataclass(frozen=True)
class StrategyOptions:
    """Options of a BigBatch that determine how gradients are computed.

    Attributes:
        config: Memory limits; None for no limits.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        strategy: ``"auto"``, or the strategy that the user named.
        autocast: The dtype of autocast, or None.
        prove: Whether strategies are compared with the plain step before they are used.
    """

    config: limits.MemoryLimits | None
    chunk_size: int | None
    strategy: str
    autocast: torch.dtype | None
    prove: bool

    @property
    def has_limit(self) -> bool:
        """Whether there is a memory limit or a chunk size."""
        return self.config is not None or self.chunk_size is not None


def check_step(model: Any, loss: Any, options: StrategyOptions, scaler: Any) -> None:
    """Check the arguments of a BigBatch or a Trainer that a step depends on.

    Raises:
        ArgumentError: If one of them is invalid.
    """
    config = options.config
    strategy = options.strategy
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={model!r}: expected a torch module")
    if isinstance(loss, type):
        raise ArgumentError(
            f"loss={loss.__name__} is a class; expected a function of outputs and targets; give "
            f"loss={loss.__name__}()"
        )
    if not callable(loss):
        raise ArgumentError(f"loss={loss!r}: expected a function of outputs and targets")
    if config is not None and not isinstance(config, limits.MemoryLimits):
        raise ArgumentError(f"config={config!r}: expected a pinfeed.Config, or None")
    if options.chunk_size is not None:
        whole_number(options.chunk_size, "chunk_size")
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ArgumentError(
            f"strategy={strategy!r}: expected one of 'auto', {', '.join(map(repr, STRATEGIES))}"
        )
    check_autocast(options.autocast)
    is_class = isinstance(scaler, type)
    if scaler is not None and (is_class or not callable(getattr(scaler, "scale", None))):
        raise ArgumentError(f"scaler={scaler!r}: expected a torch.amp.GradScaler, or None")
    check_flag(options.prove, "prove")
