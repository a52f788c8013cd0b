"""Slot: what a reader hands to the loop; DeviceSlot: a slot with buffers of a device.

JobParts and JobMemory: what an engine gathers for a slot, and the memory of its batches.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pinfeed.devices.device import Event, Stream, Tensor
from pinfeed.devices.layout import BatchPart, RowLayout
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.native.row_moves import StagedIndices
from pinfeed.pipeline.part_memory import Staging
from pinfeed.pipeline.sources.source import HostBatch


@dataclass
class Slot:
    """One batch, or several small ones, that a reader thread hands to the loop.

    A reader fills it, the consumer lends its batches and then reserves it again.
    """

    turn: int = 0
    """Number of this use of a slot in the loop, in which threads take their turns."""
    epoch: int = 0
    """Number of the epoch of the batches."""
    number: int = 0
    """Number of the first batch in its epoch."""
    batch: HostBatch | None = None
    """The batches on the host; None when they are lent."""
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors on the device, one per part."""
    batch_tensors: deque[list[Tensor]] = field(default_factory=deque)
    """Tensors of each batch, if they are on the host."""
    nbytes: int = 0
    """Bytes of the batches."""
    error: Exception | None = None
    """Error of a batch; raised after the slot's other batches."""
    failure: Exception | None = None
    """Error of the copies to the device; raised instead of all batches."""
    seen: int = 0
    """The gather saw all writes numbered below this."""
    source_s: float = 0.0
    """Seconds that the source took to make the batch, without ``host_transform``."""
    source_done_s: float = 0.0
    """Time at which the source or ``host_transform`` had made the batch."""
    read_s: float = 0.0
    """Seconds that making the batch and gathering its parts took."""
    ready_s: float = 0.0
    """Time at which the host had filled the slot."""
    copy_wait_s: float = 0.0
    """Seconds from ``source_done_s`` to the gather, mostly a wait for the slot's last copies."""
    rows: Any = None
    """Rows for ``host_transform`` on the host, in the structure of their source."""
    rows_s: float = 0.0
    """Seconds that reading these rows took."""
    host_transform_s: float = 0.0
    """Seconds of ``host_transform``."""
    device_transform_s: float = 0.0
    """Seconds of ``device_transform``, which on a GPU only queues its work."""

    def clear(self) -> None:
        """Drop the batches, because the loop has ended."""
        self.batch = None
        self.tensors = []
        self.batch_tensors = deque()
        self.error = self.failure = None
        self.rows = None


@dataclass
class DeviceSlot(Slot):
    """A slot with staging memory, and the events that guard it and memory of a device."""

    staging: Staging = field(default_factory=dict)
    """Page-locked memory of the staged parts; batches reuse it."""
    gathered: Any = None
    """Staged parts and their layout; None when the copies are queued."""
    on_device: Callable[[Slot], object] | None = None
    """Calls ``device_transform`` when the copies are queued; None for none."""
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Context in which the copies are queued."""
    sources: Sequence[Any] = ()
    """Parts that the device reads itself; kept until the reads are done."""
    indices: list[Tensor] = field(default_factory=list)
    """Row indices on the device."""
    compute: Stream | None = None
    """Stream of the consumer thread when the memory was allocated, or when it was lent last."""
    copied: Event | None = None
    """Event after the copies of the last batches."""
    filled: Event | None = None
    """Event after the copies, and after ``device_transform``."""
    transform_outputs: list[Tensor] = field(default_factory=list)
    """Tensors that ``device_transform`` has returned."""

    def clear(self) -> None:
        """Drop the batches and the memory of the device; staging memory stays."""
        super().clear()
        self.gathered = None
        self.on_device = None
        self.context = contextlib.nullcontext
        self.sources = ()
        self.indices = []
        self.compute = None
        self.transform_outputs = []


def raise_kept(slot: Slot) -> NoReturn:
    """Raise the error that a slot has kept."""
    error = slot.failure or slot.error
    slot.failure = slot.error = None
    try:
        assert error is not None
        raise error
    finally:
        # The error's traceback keeps this frame, which must not keep the error.
        del error


RowType = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of a row."""


class JobParts(NamedTuple):
    """The parts of a job, of which each has something for every row."""

    sources: Sequence[MemoryRows | StagedIndices]
    """Rows or row indices that the engine gathers."""
    row_types: Sequence[RowType]
    """Rows of each source, and then of each store that the device reads itself."""
    places: Sequence[int] | None = None
    """Position of each store's rows among these; None if they are the rows of the stores."""

    def layout(self, n: int) -> RowLayout:
        """Return the layout of ``n`` rows."""
        return RowLayout.of([BatchPart.of((n, *shape), dtype) for shape, dtype in self.row_types])

    @property
    def staged_nbytes(self) -> int:
        """Bytes that the engine gathers for each row."""
        return sum(source.row_nbytes for source in self.sources)


class JobMemory(NamedTuple):
    """Memory of the batches of one job."""

    tensors: deque[list[Tensor]]
    """Tensors of each batch."""
    outs: Sequence[int]
    """Places of the rows of each source; see ``Engine.submit``."""
    owner: object
    """Object that keeps the memory alive."""
    devices: Sequence[int] = ()
    """Address of the rows of each source on the device."""
    stream: int = 0
    """Handle of the stream whose later work may use this memory."""
