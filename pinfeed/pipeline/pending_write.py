"""PendingWrite: a write-back between the loop and its stores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from pinfeed.devices.base import Event, Stream, Tensor
from pinfeed.pipeline.forwarding import Write, WriteLog
from pinfeed.pipeline.sources.base import RowGroup
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import Store
from pinfeed.stores.pinned import PinnedStore

# Rows in memory are scattered in pieces, so that several threads can share the work.
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
        """Yield calls that scatter the rows together; they may be made at the same time."""
        n_pieces = max(1, min(self.values.nbytes // _PIECE_NBYTES, len(self.rows)))
        step = -(-len(self.rows) // n_pieces) or 1
        for begin in range(0, len(self.rows), step):
            piece = slice(begin, begin + step)
            yield functools.partial(self.store.scatter, self.rows[piece], self.values[piece])


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

    number: int
    """Position among all write-backs."""
    write: Write[HeldValues]
    groups: Sequence[RowGroup]
    """Rows that are written, and their stores."""
    log: WriteLog[HeldValues]
    """Log of the loop that the write belongs to."""
    staged: list[StagedRows] = field(default_factory=list)
    """Values that are copied to staging memory, to be scattered from there."""
    arrived: Event | None = None
    """Event behind the copies."""
    begun: Event | None = None
    """Timed event before the copies; None if they are not timed."""
    source: npt.NDArray[Any] | None = None
    """Staging memory from which the device computes the values."""
    started_s: float = 0.0
    """Time at which the copies were queued."""

    @property
    def batch(self) -> int:
        """Number of the batch that the values belong to."""
        return self.write.batch

    def is_computed(self) -> bool:
        """Tell whether the device has computed the values."""
        return self.write.values.ready.is_done()
