"""PendingWrite: a write-back between the loop and its stores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from pinfeed.devices.device import Event, Stream, Tensor
from pinfeed.errors import WriteBackError
from pinfeed.pipeline.forwarding import Write, WriteLog
from pinfeed.pipeline.sources.source import RowGroup
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Store

# Bytes of the pieces in which rows in memory are scattered, so that threads can share the work.
_PIECE_NBYTES = 4 << 20


class StagedRows(NamedTuple):
    """Values of distinct rows in staging memory, and the store that they are written to."""

    store: Store
    rows: Rows
    values: npt.NDArray[Any]

    @property
    def is_in_memory(self) -> bool:
        """Whether several threads may scatter rows; other stores may not support that."""
        return type(self.store) in (ArrayStore, PinnedStore)

    def scatters(self) -> Iterator[Callable[[], object]]:
        """Yield calls that together scatter all rows; they may run at the same time."""
        n_pieces = max(1, min(self.values.nbytes // _PIECE_NBYTES, len(self.rows)))
        step = -(-len(self.rows) // n_pieces) or 1
        for begin in range(0, len(self.rows), step):
            piece = slice(begin, begin + step)
            yield functools.partial(self.store.scatter, self.rows[piece], self.values[piece])


def require_distinct(
    groups: Sequence[RowGroup], values: Sequence[Sequence[Tensor | None] | None]
) -> None:
    """Check that no row of a group that is written occurs twice.

    Raises:
        WriteBackError: If one does.
    """
    for group, tensors in zip(groups, values, strict=True):
        if tensors is not None and group.repeated is not None:
            raise WriteBackError(
                f"write_back of {len(group.rows)} rows in which row {group.repeated} appears more "
                "than once; expected each row only once; give unique rows to the feeder, or sum "
                "the changes of each row first"
            )


@dataclass
class HeldValues:
    """Values of a write-back, on the device.

    Each group of rows has one tensor per store, or None for an unchanged store.
    """

    tensors: list[list[Tensor | None]]
    compute: Stream
    """Stream of the consumer thread when the values were taken."""
    ready: Event
    """Event after the computation of the values."""


@dataclass
class PendingWrite:
    """A write-back that is not completed."""

    number: int
    """Position among all write-backs."""
    write: Write[HeldValues]
    groups: Sequence[RowGroup]
    """Rows that are written, and their stores."""
    log: WriteLog[HeldValues]
    """Log of the loop of this write."""
    staged: list[StagedRows] = field(default_factory=list)
    """Values that are copied to staging memory, to be scattered from there."""
    arrived: Event | None = None
    """Event after the copies."""
    begun: Event | None = None
    """Timed event before the copies; None if they are not timed."""
    source: npt.NDArray[Any] | None = None
    """Staging memory that the device reads to compute the values."""
    started_s: float = 0.0
    """Time at which the copies were queued."""

    @property
    def batch(self) -> int:
        """Number of the batch that the values belong to."""
        return self.write.batch

    def is_computed(self) -> bool:
        """Return whether the device has computed the values."""
        return self.write.values.ready.is_done()
