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
    """The loop has ended, so the batch is not needed any more."""


@dataclass
class Slot:
    """Buffers of one batch, or of several small ones, and the events that guard them."""

    staging: Staging = field(default_factory=dict)
    """Page-locked memory of each part that is staged; kept from batch to batch."""
    index_staging: Staging = field(default_factory=dict)
    """Page-locked memory of the row indices of each group; kept from batch to batch."""
    sources: list[HostArray] = field(default_factory=list)
    """Parts that the device reads itself; kept until it has read them."""
    memory: list[Place | None] = field(default_factory=list)
    """Device memory for each part of the next fill."""
    index_memory: list[Place | None] = field(default_factory=list)
    """Device memory for the row indices of each group of the next fill."""
    compute: Stream | None = None
    """Stream of the training thread when the memory was allocated."""
    released: Event | None = None
    """Event behind the work that may still use what the memory was before."""
    filled: Event | None = None
    """Event behind the copies of the last fill, and behind ``device_transform``."""
    batch: HostBatch | None = None
    """Contents of the slot."""
    rows: Any = None
    """Rows for ``host_transform`` on the host, in the structure of their source."""
    error: Exception | None = None
    """Error of the batch after those that the slot carries, if the slot was to carry it as well."""
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors on the device, one per part."""
    batch_tensors: deque[list[Tensor]] = field(default_factory=deque)
    """Tensors of each batch, on a device whose memory is the host's."""
    made: list[Tensor] = field(default_factory=list)
    """Tensors that ``device_transform`` has returned."""
    needed: list[int] = field(default_factory=list)
    """Bytes of device memory that each part of this fill took; 0 for a part that was adopted."""
    adopted_nbytes: int = 0
    """Bytes of the parts of this fill that were adopted, as far as they are known."""
    nbytes: int = 0
    """Bytes of the batches that were lent from the slot last."""
    index_needed: list[int] = field(default_factory=list)
    """Bytes of device memory that the row indices of each group took."""
    seen: int = 0
    """The gather saw every write-back numbered below this."""
    number: int = 0
    """Number of the first batch."""
    source_s: float = 0.0
    """Seconds in which the source made the batch, without ``host_transform``."""
    made_s: float = 0.0
    """Time at which the source or ``host_transform`` had made the batch."""
    rows_s: float = 0.0
    """Seconds in which rows were read for ``host_transform``."""
    read_s: float = 0.0
    """Seconds in which the source made the batch and its parts were gathered."""
    host_transform_s: float = 0.0
    """Seconds of ``host_transform``."""
    device_transform_s: float = 0.0
    """Seconds of ``device_transform``, which on a GPU only queues its work."""
    copy_wait_s: float = 0.0
    """Seconds between ``made_s`` and the gather, mostly a wait for the slot's last copies."""
    ready_s: float = 0.0
    """Time at which the host had filled the slot."""
