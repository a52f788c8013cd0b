"""StepOptions: keyword options of ``Trainer`` for its steps."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import torch

from pinfeed.validation.options import Default


class StepOptions(TypedDict, total=False):
    """Options of a training step: keyword arguments of ``Trainer``.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1))]
        >>> loss = torch.nn.MSELoss()
        >>> with pinfeed.Trainer(model, loss, adam, loader, clip_norm=1.0) as trainer:
        ...     history = trainer.train(1)

    Attributes:
        scheduler: One scheduler or several; the Trainer steps them after every epoch. None for
            no scheduler.
        clip_norm: Largest norm of all gradients together; None does not clip.
        scaler: A ``torch.amp.GradScaler``; None does not scale the loss.
        autocast: Dtype of autocast for forward passes and losses; None uses no autocast.
    """

    scheduler: Annotated[Any, Default(None)]
    clip_norm: Annotated[float | None, Default(None)]
    scaler: Annotated[Any, Default(None)]
    autocast: Annotated[torch.dtype | None, Default(None)]
