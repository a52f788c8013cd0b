"""HostTransfer: moves batches on a device that uses host memory, such as the CPU.

Rows are gathered into the batch itself, in the thread that reads them. No work is queued in a
stream, so no thread waits for an event.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.base import Tensor
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.pipeline.host_memory import HostMemory
from pinfeed.pipeline.slot import Cancelled, Slot
from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.profiling.counters import Counters

if TYPE_CHECKING:
    from pinfeed.devices.cpu import HostDevice


class HostTransfer:
    """Gathers batches into memory of the host, for one loop at a time.

    Args:
        device: Device on the host.
        n_slots: Maximum number of slots.
        capacity: Bytes of each part of a full batch; empty if they are not known in advance.
        counters: Counters of the time that reading takes.
    """

    lend = staticmethod(operator.attrgetter("batch_tensors"))
    """Returns the tensors of each of the batches in a slot (consumer)."""

    def __init__(
        self, device: HostDevice, n_slots: int, capacity: Sequence[int], counters: Counters
    ) -> None:
        self.device = device
        self.counters = counters
        self.memory = HostMemory(device, capacity)
        self.slots: list[Slot] = [Slot() for _ in range(n_slots)]
        self.active_slots: Sequence[Slot] = ()
        """Slots that the running loop uses."""
        self.is_stopping = False

    def begin(self, n_slots: int, batches_per_slot: int) -> Sequence[Slot]:
        """Begin a loop.

        Args:
            n_slots: Number of slots that the loop uses.
            batches_per_slot: Number of batches in each slot.
        """
        unlock_freed()
        self.is_stopping = False
        self.memory.begin(batches_per_slot)
        self.active_slots = self.slots[:n_slots]
        return self.active_slots

    def stop(self) -> None:
        """End every fill at its next step, because the loop has ended. Any thread may call this."""
        self.is_stopping = True

    def check_stop(self) -> None:
        """Raise Cancelled if ``stop`` was called."""
        if self.is_stopping:
            raise Cancelled

    def fill(self, slot: Slot, batch: HostBatch, number: int) -> Slot:
        """Gather a batch (reader; one thread per slot).

        Args:
            slot: The slot.
            batch: Batch to gather, or several batches.
            number: Number of the first batch.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        tensors, slot.nbytes = self.memory.read(batch.parts, self.check_stop)
        slot.number = number
        slot.batch = batch
        slot.tensors = tensors
        slot.batch_tensors = (
            deque((tensors,)) if len(batch.batches) == 1 else self._cut(batch, tensors)
        )
        slot.ready_s = self.counters.now()
        slot.read_s = slot.source_s + slot.rows_s + slot.ready_s - slot.made_s
        return slot

    def transform(self, slot: Slot, function: Callable[[Any], Any]) -> None:
        """Call ``device_transform`` on the batch of a full slot (transform thread).

        Args:
            slot: The slot, which has one batch.
            function: Function of the batch in the user's structure.

        Raises:
            Cancelled: If ``stop`` was called.
        """
        self.check_stop()
        batch = slot.batch
        assert batch is not None
        tensors = slot.tensors
        if batch.n_data is None:
            # Only the function keeps the memory of its batch.
            slot.tensors = []
            slot.batch_tensors = deque(([],))
        made = function(batch.data(tensors))
        batch.rebuild = lambda tensors: made
        slot.ready_s = self.counters.now()

    def copy_to_host(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Return a copy of the values of a lent tensor (consumer)."""
        out: npt.NDArray[Any] = np.empty(shape, dtype)
        self.device.copy(tensor, out, None)
        return out

    def settle(self) -> None:
        """Do nothing, because all timestamps are known."""

    def quiesce(self) -> None:
        """Drop the batches in the slots."""
        for slot in self.slots:
            slot.clear()

    def close(self) -> None:
        """Free the slots."""
        self.slots = []
        self.active_slots = ()
        unlock_freed()

    def _cut(self, batch: HostBatch, tensors: list[Tensor]) -> deque[list[Tensor]]:
        """Return the tensors of each of the batches that were gathered together."""
        return deque(
            [self.device.cut(tensor, begin, end) for tensor in tensors]
            for begin, end in batch.ranges()
        )
