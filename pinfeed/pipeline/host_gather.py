"""HostGather: reads the rows of a batch into tensors on the host, for ``host_transform``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pinfeed.devices.base import Tensor
from pinfeed.pipeline.part_memory import PartMemory
from pinfeed.pipeline.sources.base import HostBatch
from pinfeed.stores.base import HostArray, part_nbytes


class HostGather:
    """Reads the rows of batches into tensors on the host. Several threads may call it.

    Args:
        capacity: Bytes of each part of a full batch; empty if they are unknown.
        n_batches: Number of batches for which memory is kept for reuse.
    """

    def __init__(self, capacity: Sequence[int], n_batches: int) -> None:
        from pinfeed.devices.cpu import HostDevice

        self._device = HostDevice(n_spare=n_batches * max(1, len(capacity)))
        self._parts = PartMemory(self._device, capacity, shares=False)

    def read(self, batch: HostBatch, check_stop: Callable[[], None]) -> Any:
        """Return the batch in the structure of its source, as tensors on the host.

        Args:
            batch: The batch.
            check_stop: Raises an error when the loop has ended; called between steps.
        """
        return batch.data([self._read(i, part, check_stop) for i, part in enumerate(batch.parts)])

    def close(self) -> None:
        """Free spare memory."""
        self._device.close()

    def _read(self, i: int, part: HostArray, check_stop: Callable[[], None]) -> Tensor:
        device = self._device
        stream = device.current_stream()
        memory = self._parts.allocate(i, part_nbytes(part), 1, stream)
        check_stop()
        part.read(np.ndarray(part.shape, part.dtype, memory), check_stop)
        return device.tensor(memory, part.shape, part.dtype)
