"""LoopFunctions: the functions of the user that change each batch of a loop."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from pinfeed.pipeline.host_gather import HostGather
from pinfeed.pipeline.sources.base import HostBatch, RowGroup
from pinfeed.pipeline.sources.batch_functions import BatchFunction
from pinfeed.pipeline.sources.dataloader import load_of


@dataclass(frozen=True)
class LoopFunctions:
    """The functions of the user that change each batch of a loop."""

    host: BatchFunction | None = None
    """Function of the batch on the host; None if there is none."""
    device: BatchFunction | None = None
    """Function of the batch on the device; None if there is none."""
    gather: HostGather | None = None
    """Reads the rows for ``host``, which the loop calls then; None if the source calls it."""
    epoch: int = 0
    """Number of the epoch that runs."""

    def __bool__(self) -> bool:
        return self.host is not None or self.device is not None

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which functions run as in a thread of their own."""
        if not self:
            return contextlib.nullcontext()
        from pinfeed.tensors.torch_modes import modes_of_a_new_thread

        return modes_of_a_new_thread()

    @property
    def take_generators(self) -> bool:
        """Whether a function gets a generator."""
        return bool(self.fingerprint)

    @property
    def fingerprint(self) -> dict[str, int]:
        """Seed of the generators, if a function gets one; a resumed loop must have the same."""
        for function in (self.host, self.device):
            if function is not None and function.takes_generator:
                return {"seed of functions": function.seed.number}
        return {}

    @property
    def are_called_in_loop(self) -> bool:
        """Whether the loop calls a function; otherwise the source calls the only one."""
        return self.device is not None or self.gather is not None

    def take_drawing_seconds(self) -> float:
        """Return the seconds in which the source has called ``host`` since this was asked last."""
        return self.host.take_seconds() if self.host is not None and self.gather is None else 0.0

    def on_rows(self, rows: Any, batch: HostBatch, number: int) -> HostBatch:
        """Return what ``host`` makes of the rows of a batch.

        Args:
            rows: The rows on the host, in the structure of their source.
            batch: The batch that they are.
            number: Number of the batch.
        """
        assert self.host is not None
        load = load_of(self.host(rows, self.epoch, number))
        load.batches = batch.batches
        # The loop is told the row indices, and cannot write the rows back.
        load.groups = [RowGroup(group.rows, 0, ()) for group in batch.groups]
        return load


NO_FUNCTIONS = LoopFunctions()
"""Functions of a loop whose batches stay as they are."""
