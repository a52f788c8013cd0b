"""Slot: the buffers of one batch, or of several small ones, and the events that guard them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pinfeed.devices.base import Event, Stream, Tensor
from pinfeed.pipeline.part_memory import Place, Staging
from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.stores.base import HostArray


class Cancelled(Exception):
    """Exception that ends the fill of a batch, because the loop has ended."""


@dataclass
class Slot:
    """Buffers of one batch, or of several small ones, and the events that guard them."""

    staging: Staging = field(default_factory=dict)
    """Page-locked memory of each staged part; batches reuse it."""
    index_staging: Staging = field(default_factory=dict)
    """Page-locked memory of the row indices of each group; batches reuse it."""
    sources: list[HostArray] = field(default_factory=list)
    """Parts that the device reads itself; kept until the reads are done."""
    memory: list[Place | None] = field(default_factory=list)
    """Device memory for each part of the next fill."""
    index_memory: list[Place | None] = field(default_factory=list)
    """Device memory for the row indices of each group of the next fill."""
    compute: Stream | None = None
    """Stream of the consumer thread when the memory was allocated, or when it was lent last."""
    released: Event | None = None
    """Event after the work that may still use an earlier tensor in the same memory."""
    filled: Event | None = None
    """Event after the copies of the last fill, and after ``device_transform``."""
    batch: HostBatch | None = None
    """Contents of the slot."""
    rows: Any = None
    """Rows for ``host_transform`` on the host, in the structure of their source."""
    error: Exception | None = None
    """Error of a batch that the slot should carry too, after the other batches."""
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors on the device, one per part."""
    batch_tensors: deque[list[Tensor]] = field(default_factory=deque)
    """Tensors of each batch, on a device that uses host memory."""
    made: list[Tensor] = field(default_factory=list)
    """Tensors that ``device_transform`` has returned."""
    needed: list[int] = field(default_factory=list)
    """Bytes of device memory that each part of this fill took; 0 for an adopted part."""
    adopted_nbytes: int = 0
    """Known bytes of the adopted parts of this fill."""
    nbytes: int = 0
    """Bytes of the batches that the slot has lent last."""
    index_needed: list[int] = field(default_factory=list)
    """Bytes of device memory that the row indices of each group took."""
    seen: int = 0
    """Number below which the gather saw every write-back."""
    number: int = 0
    """Number of the first batch."""
    source_s: float = 0.0
    """Seconds that the source took to make the batch, without ``host_transform``."""
    made_s: float = 0.0
    """Time at which the source or ``host_transform`` had made the batch."""
    rows_s: float = 0.0
    """Seconds that reading rows for ``host_transform`` took."""
    read_s: float = 0.0
    """Seconds that making the batch and gathering its parts took."""
    host_transform_s: float = 0.0
    """Seconds of ``host_transform``."""
    device_transform_s: float = 0.0
    """Seconds of ``device_transform``, which on a GPU only queues its work."""
    copy_wait_s: float = 0.0
    """Seconds between ``made_s`` and the gather, mostly a wait for the last copies of the slot."""
    ready_s: float = 0.0
    """Time at which the host had filled the slot."""
