"""SlotGather: reads the parts of a batch into a slot's staging memory, ready to be copied."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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


class DirectReads(NamedTuple):
    """Parts that the device reads itself in one call."""

    parts: Sequence[int]
    """Indices of the parts."""
    group: int | None = None
    """Position of their group among those of the batch; None for parts of no group."""
    index_part: int | None = None
    """Index of the part with the row indices; None if the device needs none."""
    pairs: PositionRange | None = None
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
    adopted: Sequence[int]
    """Indices of the parts that the device takes as they are."""
    reads: Sequence[DirectReads]
    """The parts that the device reads itself."""


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
        parts = list(batch.all_parts())
        n_batch = len(parts)
        staged, direct, adopted = self._ways(batch, parts, reads_rows=reads_rows)
        reads = self._reads(batch, parts, direct)
        staged += range(n_batch, len(parts))
        types: dict[int, BatchPart] = {}
        nbytes = [0] * len(parts)
        for i in (*staged, *direct):
            shape, dtype = parts[i].shape, parts[i].dtype
            nbytes[i] = math.prod(shape) * dtype.itemsize
            types[i] = BatchPart(shape, dtype, nbytes[i])
        # Small parts come first, because they share memory.
        staged.sort(key=nbytes.__getitem__)
        direct.sort(key=nbytes.__getitem__)
        order = staged + direct
        layout = self._layout([types[i] for i in order], len(staged))
        memory = self._memory.slot_staging(
            slot.staging,
            [*layout.offsets, layout.nbytes][len(staged)],
            functools.partial(self._full, nbytes, staged),
        )
        # Parts are read in their own order, which functions of the user may depend on.
        for i, offset in sorted(zip(staged, layout.offsets, strict=False)):
            self._check_stop()
            shape, dtype, _ = types[i]
            parts[i].read(np.ndarray(shape, dtype, memory, offset), self._check_stop)
        of_batch = nbytes[: len(batch.parts)]
        self._memory.learn(of_batch, len(batch.batches))
        return Gathered(layout, order, memory, parts, n_batch, sum(of_batch), adopted, reads)

    def _ways(
        self, batch: HostBatch, parts: Sequence[UnreadPart], *, reads_rows: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the indices of parts that are staged, read by the device itself, and adopted."""
        device = self._device
        rows = {i for group in batch.groups for i in group.parts} if reads_rows else ()
        staged: list[int] = []
        direct: list[int] = []
        adopted: list[int] = []
        for i, part in enumerate(parts):
            way = staged
            if i in rows:
                way = direct
            elif type(part) is ArrayPart:
                # Only stores and values of the user are asked about.
                pass
            elif device.adopts(part):
                # Only the user knows what an adopted value can be asked for.
                way = adopted
            elif device.reaches(part) and not (self.copies_values and hasattr(part, "host_value")):
                way = direct
            way.append(i)
        return staged, direct, adopted

    def _full(self, nbytes: Sequence[int], staged: Sequence[int]) -> int:
        """Return the bytes of the staged parts of a full slot."""
        capacity = dict(enumerate(self._memory.capacity))
        return sum(
            aligned(max(nbytes[i], self.batches_per_slot * capacity.get(i, 0))) for i in staged
        )

    def _reads(
        self, batch: HostBatch, parts: list[UnreadPart], direct: Sequence[int]
    ) -> list[DirectReads]:
        """Return the calls that read the parts which the device reads itself.

        The row indices that it needs are added to ``parts``, unless the batch has them.
        """
        found = []
        left = set(direct)
        unread = [None] * len(batch.groups) if batch.shared is None else batch.shared.unread
        n_batch = len(parts)
        for g, (group, pairs) in enumerate(zip(batch.groups, unread, strict=True)):
            own = [i for i in group.parts if i in left]
            if not own:
                continue
            left.difference_update(own)
            index_part = group.ids_part
            if pairs is not None:
                index_part = n_batch - 1
            elif index_part is None:
                stores = [group.stores[i - group.first] for i in own]
                dtype = self._device.index_dtype(stores, group.rows)
                if dtype is not None:
                    index_part = len(parts)
                    parts.append(ArrayPart(group.rows.astype(dtype)))
            found.append(DirectReads(own, g, index_part, pairs))
        # Those of no group come first, because they may be row indices of a group.
        return [DirectReads(sorted(left)), *found] if left else found

    def _layout(self, parts: list[BatchPart], n_staged: int) -> RowLayout:
        last = self._last
        if last is None or last[:2] != (parts, n_staged):
            # Another thread may do the same for a batch of other sizes.
            self._last = last = parts, n_staged, RowLayout.of(parts, n_staged)
        return last[2]
