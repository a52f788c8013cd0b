"""WholeSteps: contexts of steps that compute a whole batch at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.training.large_batch.recompute import recomputed
from pinfeed.training.offload.offload import Offload


class WholeSteps:
    """Contexts of steps that compute a whole batch at once, by strategy.

    Args:
        device: Device of the model.
        config: Memory limits; None for the free memory.
    """

    def __init__(self, device: torch.device, config: MemoryLimits | None) -> None:
        self._device = device
        self._config = config
        self._offload: Offload | None = None

    def context(
        self, strategy: str, modules: Sequence[nn.Module]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass; the first module is the model."""
        if strategy == "checkpoint":
            return recomputed(modules[0])
        if strategy != "offload":
            return contextlib.nullcontext()
        if self._offload is None:
            limit = None if self._config is None else self._config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit)
        return self._offload.step(*modules)

    def close(self) -> None:
        """Free page-locked memory. Further calls do nothing."""
        if self._offload is not None:
            self._offload.close()
