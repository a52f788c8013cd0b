"""Writer: takes the values of a loop that are to be written back, as PendingWrite objects.

``Transfer`` is the writer of a device with streams, and ``HostWrites`` that of a device that uses
host memory. They add the copies and the write to the stores, and ``Transfer`` adds the waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from pinfeed.devices.device import Device, Event, RowCopy, Stream, Tensor, TensorRange
from pinfeed.errors import WriteBackError
from pinfeed.pipeline.cache_transfer import CacheTransfer
from pinfeed.pipeline.forwarding import HeldValues, Write, WriteLog, forwards
from pinfeed.pipeline.row_cache import ChangedRows
from pinfeed.pipeline.slot import Slot
from pinfeed.pipeline.sources.source import BatchValues, RowGroup
from pinfeed.profiling.counters import Counters
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


@dataclass
class PendingWrite:
    """A write-back that is not completed."""

    number: int
    """Position among all write-backs."""
    write: Write
    groups: Sequence[RowGroup]
    """Rows that are written, and their stores."""
    log: WriteLog
    """Log of the loop of this write."""
    staged: list[StagedRows] = field(default_factory=list)
    """Values that are copied to staging memory, to be scattered from there."""
    arrived: Event | None = None
    """Event after the copies."""
    begun: Event | None = None
    """Timed event before the copies; None if they are not timed."""
    started_s: float = 0.0
    """Time at which the copies were queued."""
    error: Exception | None = None
    """Error of queueing them."""

    @property
    def batch(self) -> int:
        """Number of the batch that the values belong to."""
        return self.write.batch

    def is_computed(self) -> bool:
        """Return whether the device has computed the values."""
        return self.write.values.ready.is_done()


class Writer:
    """Takes values of one loop at a time that are to be written back to their stores.

    Args:
        device: Device of the values.
        counters: Counters of the loop.
    """

    def __init__(self, device: Device, counters: Counters) -> None:
        self.device: Any = device
        self.counters = counters
        self.log = WriteLog()
        """Writes that some gathered batch may not have seen."""
        self.caches = CacheTransfer(counters)
        # Numbers of write-backs. Another thread that closes the feeder may take a number, too.
        self._numbers = itertools.count()

    def capture_values(self, batch: BatchValues, *, copied: bool) -> PendingWrite:
        """Take values that are to be written back (consumer).

        Args:
            batch: The values.
            copied: Whether to copy the values. They may be the batch itself, and the user may
                change them immediately.

        Raises:
            WriteBackError: If a row occurs twice.
        """
        compute = self.device.current_stream()
        number, groups, values = batch
        _require_distinct(batch)
        held: list[list[Tensor | None]] = []
        for group, tensors in zip(groups, values, strict=True):
            kept = list(tensors) if tensors is not None else []
            if group.cached is not None:
                kept = list(self.caches.put(group.cached, tensors, compute))
            elif copied:
                kept = [
                    None if tensor is None else self._copy(tensor, group, i, compute)
                    for i, tensor in enumerate(kept)
                ]
            held.append(kept)
        written = [group.as_written() for group in groups]
        return self._pending(self.log, number, written, held, compute)

    def write_to_stores(self, pending: PendingWrite) -> None:
        """Write values to their stores (a writer, or the consumer at depth 0)."""
        raise NotImplementedError

    def capture_cached(self, group: RowGroup, changed: ChangedRows) -> PendingWrite:
        """Take rows of a cache that are to be written back (consumer)."""
        # With a log of their own, these rows are written even if another write has failed, and no
        # log keeps their values afterwards.
        compute = self.device.current_stream()
        values = [list(changed.values)]
        return self._pending(WriteLog(), self.caches.batch, [group], values, compute)

    def _copy(self, value: Tensor, group: RowGroup, i: int, compute: Stream) -> Any:
        """Copy values of a group's store ``i``."""
        raise NotImplementedError

    def _shared_positions(self, slot: Slot) -> Tensor:
        """Return the positions of shared rows of a batch, on the device."""
        raise NotImplementedError

    def _await_values(self, values: HeldValues, g: int, compute: Stream) -> None:
        """Make the current stream wait for values of group ``g``, from another stream.

        A device that uses host memory needs no wait.
        """

    def _update_rows(self, slot: Slot, compute: Stream) -> None:
        """Copy newer values and cached rows to a batch that is about to be lent (consumer)."""
        batch = slot.batch
        assert batch is not None
        if batch.shared is not None and (writes := self.log.since(slot.seen)):
            positions = self._shared_positions(slot)
            for g, group in enumerate(batch.groups):
                for write, shared in forwards(writes, g, slot.number, batch.shared.overlaps[g]):
                    values = write.values
                    if compute != values.compute:
                        self._await_values(values, g, compute)
                    earlier = TensorRange(positions, shared.earlier[0], shared.n_rows)
                    later = TensorRange(positions, shared.begin, shared.n_rows)
                    copies = [
                        RowCopy(held, slot.tensors[group.first + i], earlier, later)
                        for i, held in enumerate(values.tensors[g])
                        if held is not None
                    ]
                    self.device.copy_rows(copies, compute)
        self.caches.lend(batch, slot.tensors, slot.number, compute)

    def _pending(
        self,
        log: WriteLog,
        batch: int,
        groups: Sequence[RowGroup],
        held: list[list[Tensor | None]],
        compute: Stream,
    ) -> PendingWrite:
        """Return the write-back of values that the consumer thread has just queued."""
        is_whole = [
            all(tensor is not None for tensor in tensors) if tensors else None for tensors in held
        ]
        write = log.append(batch, is_whole, HeldValues(held, compute, compute.record()))
        return PendingWrite(next(self._numbers), write, groups, log)


def _require_distinct(batch: BatchValues) -> None:
    """Check that no row of a group that is written occurs twice.

    Raises:
        WriteBackError: If one does.
    """
    for group, tensors in zip(batch.groups, batch.values, strict=True):
        if tensors is not None and group.repeated is not None:
            raise WriteBackError(
                f"write_back of {len(group.rows)} rows in which row {group.repeated} appears more "
                "than once; expected each row only once; give unique rows to the feeder, or sum "
                "the changes of each row first"
            )
