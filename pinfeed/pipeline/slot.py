"""Slot: what a reader hands to the loop; DeviceSlot: a slot with buffers of a device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pinfeed.devices.device import Event, Stream, Tensor
from pinfeed.pipeline.part_memory import Place, Staging
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.stores.host_rows import UnreadPart


@dataclass
class Slot:
    """One batch, or several small ones, that a reader thread hands to the loop.

    A reader fills it, the consumer lends its batches and then reserves it again.
    """

    number: int = 0
    """Number of the first batch."""
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
        self.error = None
        self.rows = None


@dataclass
class DeviceSlot(Slot):
    """A slot with staging memory, memory of a device, and the events that guard both."""

    staging: Staging = field(default_factory=dict)
    """Page-locked memory of each staged part; batches reuse it."""
    index_staging: Staging = field(default_factory=dict)
    """Page-locked memory of the row indices of each group; batches reuse it."""
    sources: list[UnreadPart] = field(default_factory=list)
    """Parts that the device reads itself; kept until the reads are done."""
    memory: list[Place | None] = field(default_factory=list)
    """Device memory for each part of the next fill."""
    index_memory: list[Place | None] = field(default_factory=list)
    """Device memory for the row indices of each group of the next fill."""
    needed: list[int] = field(default_factory=list)
    """Bytes of device memory that each part of this fill took; 0 for an adopted part."""
    adopted_nbytes: int = 0
    """Known bytes of the adopted parts of this fill."""
    index_needed: list[int] = field(default_factory=list)
    """Bytes of device memory that the row indices of each group took."""
    compute: Stream | None = None
    """Stream of the consumer thread when the memory was allocated, or when it was lent last."""
    released: Event | None = None
    """Event after the work that may still use an earlier tensor in the same memory."""
    filled: Event | None = None
    """Event after the copies of the last fill, and after ``device_transform``."""
    transform_outputs: list[Tensor] = field(default_factory=list)
    """Tensors that ``device_transform`` has returned."""

    def clear(self) -> None:
        """Drop the batches and the memory of the device; staging memory stays."""
        super().clear()
        self.sources = []
        self.memory = []
        self.index_memory = []
        self.compute = None
        self.released = None
        self.transform_outputs = []
