"""SlotGather: reads the parts of a batch into a slot's staging memory, ready to be copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Device
from pinfeed.devices.layout import BatchPart, RowLayout, aligned
from pinfeed.pipeline.forwarding import PositionRange
from pinfeed.pipeline.part_memory import PartMemory
from pinfeed.pipeline.slot import DeviceSlot
from pinfeed.pipeline.sources.source import ArrayPart, HostBatch
from pinfeed.stores.host_rows import UnreadPart


class GroupReads(NamedTuple):
    """Rows of a group that the device reads itself."""

    group: int
    """Position of the group among those of the batch."""
    parts: Sequence[int]
    """Indices of the parts with the rows of each store that it reads."""
    index_part: int | None
    """Index of the part with the row indices; None if the device needs none."""
    pairs: PositionRange | None
    """Which of these are the rows to read, each with its place; None for all rows in order."""


class Gathered(NamedTuple):
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
    nbytes: int
    """Bytes of the parts of the batch that are not adopted."""
    sources: Sequence[UnreadPart]
    """The parts that the device reads itself."""
    adopted: Sequence[int]
    """Indices of the parts that the device takes as they are."""
    direct: Sequence[int]
    """Indices of the parts that the device reads itself, other than rows of groups."""
    reads: Sequence[GroupReads]


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
        self.batches_per_slot = 1
        """Batches of a full slot."""
        self.copies_values = False
        """Whether the tensors of a loader are read at once, because it may fill them again."""
        # Most batches have the parts of the one before.
        self._last: tuple[list[BatchPart], int, RowLayout] | None = None

    def gather(self, slot: DeviceSlot, batch: HostBatch, *, reads_rows: bool) -> Gathered:
        """Read the staged parts of a batch (reader).

        Args:
            slot: The slot.
            batch: The batch.
            reads_rows: Whether the device reads all rows of groups itself.
        """
        device = self._device
        parts = list(batch.all_parts())
        n_batch = len(parts)
        adopted: set[int] = set()
        direct: set[int] = set()
        if reads_rows:
            direct.update(i for group in batch.groups for i in group.parts)
        for i, part in enumerate(parts):
            if i in direct:
                continue
            # Only the user knows what an adopted value can be asked for.
            if device.adopts(part):
                adopted.add(i)
            elif device.reaches(part) and not (self.copies_values and hasattr(part, "host_value")):
                direct.add(i)
        reads = self._reads(batch, parts, direct)
        sizes = {
            i: BatchPart.of(part.shape, part.dtype)
            for i, part in enumerate(parts)
            if i not in adopted
        }
        order = sorted(sizes, key=lambda i: (i in direct, sizes[i].nbytes))
        n_staged = len(order) - len(direct)
        layout = self._layout([sizes[i] for i in order], n_staged)
        nbytes = [*layout.offsets, layout.nbytes][n_staged]
        staged = self._memory.slot_staging(
            slot.staging, nbytes, lambda: self._full(sizes, order[:n_staged])
        )
        # Parts are read in their own order, which functions of the user may depend on.
        for i, offset in sorted(zip(order[:n_staged], layout.offsets, strict=False)):
            shape, dtype, part_nbytes = sizes[i]
            self._check_stop()
            out = np.ndarray(shape, dtype, staged[offset : offset + part_nbytes])
            parts[i].read(out, self._check_stop)
        of_batch = [sizes[i].nbytes if i in sizes else 0 for i in range(len(batch.parts))]
        self._memory.learn(of_batch, len(batch.batches))
        return Gathered(
            layout=layout,
            order=order,
            staged=staged,
            parts=parts,
            n_batch=n_batch,
            nbytes=sum(of_batch),
            sources=[parts[i] for i in sorted(direct)],
            adopted=sorted(adopted),
            direct=sorted(direct.difference(*(group.parts for group in reads))),
            reads=reads,
        )

    def _full(self, sizes: Mapping[int, BatchPart], staged: Sequence[int]) -> int:
        """Return the bytes of the staged parts of a full slot."""
        capacity = dict(enumerate(self._memory.capacity))
        return sum(
            aligned(max(sizes[i].nbytes, self.batches_per_slot * capacity.get(i, 0)))
            for i in staged
        )

    def _reads(
        self, batch: HostBatch, parts: list[UnreadPart], direct: set[int]
    ) -> list[GroupReads]:
        """Return the rows of groups that the device reads itself.

        The row indices that it needs are added to ``parts``, unless the batch has them.
        """
        found = []
        unread = [None] * len(batch.groups) if batch.shared is None else batch.shared.unread
        n_batch = len(parts)
        for g, (group, pairs) in enumerate(zip(batch.groups, unread, strict=True)):
            own = [i for i in group.parts if i in direct]
            if not own:
                continue
            index_part = group.ids_part
            if pairs is not None:
                index_part = n_batch - 1
            elif index_part is None:
                stores = [group.stores[i - group.first] for i in own]
                dtype = self._device.index_dtype(stores, group.rows)
                if dtype is not None:
                    index_part = len(parts)
                    parts.append(ArrayPart(group.rows.astype(dtype)))
            found.append(GroupReads(g, own, index_part, pairs))
        return found

    def _layout(self, parts: list[BatchPart], n_staged: int) -> RowLayout:
        last = self._last
        if last is None or last[:2] != (parts, n_staged):
            # Another thread may do the same for a batch of other sizes.
            self._last = last = parts, n_staged, RowLayout.of(parts, n_staged)
        return last[2]
