"""SlotGather: reads the parts of a batch into a slot's staging memory, ready to be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device
from pinfeed.devices.layout import BatchPart, RowLayout, aligned
from pinfeed.pipeline.part_memory import PartMemory
from pinfeed.pipeline.slot import DeviceSlot
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch
from pinfeed.stores.host_rows import UnreadPart


@dataclass
class Gathered:
    """A batch whose staged parts were read, and what is left to do on the device."""

    layout: RowLayout
    """Layout of the parts that are copied or read by the device."""
    order: Sequence[int]
    """Index in ``parts`` of each part of the layout; those in staging memory come first."""
    staged: npt.NDArray[np.uint8]
    """Staging memory of these."""
    parts: Sequence[UnreadPart]
    """All parts: those of the batch, positions of shared rows, and row indices."""
    n_batch: int
    """Number of parts that are not row indices."""
    direct: Sequence[int]
    """Indices of the parts that the device reads itself."""
    index_of: dict[int, int] = field(default_factory=dict)
    """For a group of rows that the device reads, the index of the part with its row indices."""


class SlotGather:
    """Reads the parts of batches into slots, and plans their memory; it queues no copies.

    Args:
        device: Device that the batches are moved to.
        memory: Staging memory of the slots.
        check_stop: Raises an error when the loop has ended; called between steps.
    """

    def __init__(self, device: Device, memory: PartMemory, check_stop: Callable[[], None]) -> None:
        self._device = device
        self._memory = memory
        self._check_stop = check_stop
        # Most batches have the parts of the one before.
        self.batches_per_slot = 1
        """Batches of a full slot."""
        self._last: tuple[list[BatchPart], RowLayout] | None = None

    def gather(self, slot: DeviceSlot, batch: HostBatch) -> Gathered:
        """Read the staged parts of a batch (reader)."""
        device = self._device
        parts = list(batch.all_parts())
        n_batch = len(parts)
        moved = [i for i, part in enumerate(parts) if not device.adopts(part)]
        direct = [i for i in moved if device.reaches(parts[i])]
        index_of = self._index_parts(batch, parts, direct)
        moved += range(n_batch, len(parts))
        sizes = {i: BatchPart.of(tuple(parts[i].shape), parts[i].dtype) for i in moved}
        order = sorted(moved, key=lambda i: (i in direct, sizes[i].nbytes))
        layout = self._layout([sizes[i] for i in order])
        n_staged = len(order) - len(direct)
        nbytes = [*layout.offsets, layout.nbytes][n_staged]
        capacity = dict(enumerate(self._memory.capacity))
        full = sum(
            aligned(max(sizes[i].nbytes, self.batches_per_slot * capacity.get(i, 0)))
            for i in order[:n_staged]
        )
        staged = self._memory.slot_staging(slot.staging, nbytes, full)
        # Parts are read in their own order, which functions of the user may depend on.
        for i, offset in sorted(zip(order[:n_staged], layout.offsets, strict=False)):
            part = parts[i]
            out = staged[offset : offset + sizes[i].nbytes].view(part.dtype).reshape(part.shape)
            self._check_stop()
            part.read(out, self._check_stop)
        return Gathered(layout, order, staged, parts, n_batch, direct, index_of)

    def _index_parts(
        self, batch: HostBatch, parts: list[UnreadPart], direct: Sequence[int]
    ) -> dict[int, int]:
        """Add the row indices that the device needs to parts; return where those of a group are."""
        found: dict[int, int] = {}
        for g, group in enumerate(batch.groups):
            if not any(group.first <= i < group.first + len(group.stores) for i in direct):
                continue
            stores = [store for store in group.stores if self._device.reaches(store)]
            dtype = self._device.index_dtype(stores, group.rows)
            if dtype is not None:
                found[g] = len(parts)
                parts.append(ArrayPart(group.rows.astype(dtype)))
        return found

    def _layout(self, parts: list[BatchPart]) -> RowLayout:
        last = self._last
        if last is None or last[0] != parts:
            # Another thread may do the same for a batch of other sizes.
            self._last = last = parts, RowLayout.of(parts)
        return last[1]
