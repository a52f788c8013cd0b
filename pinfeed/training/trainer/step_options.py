"""StepOptions: keyword options of ``Trainer`` for its steps."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import torch

from pinfeed.validation.options import Default


class StepOptions(TypedDict, total=False):
    """Options of a training step; the last arguments of ``Trainer``."""

    scheduler: Annotated[Any, Default(None)]
    """One scheduler, or several; they are stepped after every epoch."""
    clip_norm: Annotated[float | None, Default(None)]
    """Largest norm of all gradients together; None does not clip."""
    scaler: Annotated[Any, Default(None)]
    """A ``torch.amp.GradScaler``."""
    autocast: Annotated[torch.dtype | None, Default(None)]
    """Dtype of autocast for forward passes and losses; None uses no autocast."""
