"""PendingWrite: a write-back between the loop and its stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinfeed.devices.base import Event, Stream, Tensor
from pinfeed.pipeline.forwarding import Write, WriteLog
from pinfeed.pipeline.sources.base import RowGroup


@dataclass
class HeldValues:
    """Values of a write-back, on the device.

    For each group of rows there is one tensor per store, and None for a store that stays unchanged.
    """

    tensors: list[list[Tensor | None]]
    compute: Stream
    """Stream of the training thread when the values were taken."""
    ready: Event
    """Event behind the computation of the values."""


@dataclass
class PendingWrite:
    """A write-back that is not completed."""

    write: Write[HeldValues]
    groups: Sequence[RowGroup]
    """Rows that are written, and their stores."""
    log: WriteLog[HeldValues]
    """Log of the loop that the write belongs to."""
    batch: int
    """Number of the batch that the values belong to."""

    def is_computed(self) -> bool:
        """Tell whether the device has computed the values."""
        return self.write.values.ready.is_done()
