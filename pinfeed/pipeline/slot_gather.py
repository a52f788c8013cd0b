"""SlotGather: reads the parts of a batch into a slot's staging memory, ready to be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Buffer, Device, Tensor
from pinfeed.pipeline.part_memory import SHARED, PartMemory, Place, known_nbytes, shared_nbytes
from pinfeed.pipeline.slot import DeviceSlot
from pinfeed.pipeline.sources.source import HostBatch
from pinfeed.stores.host_rows import UnreadPart, gather_pieces, part_nbytes

_BYTES = np.dtype(np.uint8)

RunAll = Callable[[Sequence[Callable[[], object]]], None]
"""Makes several calls, maybe in several threads, and returns when all have ended."""

Copy = tuple[npt.NDArray[Any], Tensor]
"""Staging memory, and the tensor that it is copied to."""


def run_in_turn(calls: Sequence[Callable[[], object]]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


@dataclass
class Gathered:
    """Copies and reads to queue for a batch, after its staged parts have been read."""

    staged: list[Copy] = field(default_factory=list)
    """Copies of staged parts."""
    indices: list[Copy] = field(default_factory=list)
    """Copies of the row indices that the device needs to read rows itself."""
    shared_until: tuple[Buffer, int] | None = None
    """Buffer of small parts, and end of the last staged part; one copy moves all of these."""
    direct: list[tuple[list[tuple[UnreadPart, Tensor]], Tensor | None]] = field(
        default_factory=list
    )
    """Parts that the device reads itself, with their tensors, and their row indices."""
    is_late: bool = False
    """Whether memory was allocated, or a part adopted, after the slot was reserved."""
    are_indices_late: bool = False
    """Whether memory of row indices was allocated after the slot was reserved."""


class SlotGather:
    """Reads the parts of batches into slots, and gives each part a tensor; it queues no copies.

    Args:
        device: Device that the batches are moved to.
        parts: Memory of the parts.
        indices: Memory of the row indices of each group of parts.
        check_stop: Raises an error when the loop has ended; called between steps.
    """

    def __init__(
        self,
        device: Device,
        parts: PartMemory,
        indices: PartMemory,
        check_stop: Callable[[], None],
    ) -> None:
        self._device = device
        self._parts = parts
        self._indices = indices
        self._check_stop = check_stop
        self.run_all: RunAll = run_in_turn
        """Makes the calls that gather a long part, and returns when all have ended."""

    def gather(self, slot: DeviceSlot, batch: HostBatch) -> Gathered:
        """Read the staged parts of a batch (reader).

        The slot then has a tensor for each part, and one for the positions of shared rows.
        """
        slot.tensors = []
        slot.needed = []
        slot.adopted_nbytes = 0
        slot.index_needed = []
        slot.sources = []
        gathered = Gathered()
        parts = batch.all_parts()
        group_of: dict[int, int] = {}
        if n_shared := shared_nbytes(slot.memory):
            self._parts.staging(slot.staging, SHARED, (n_shared,), _BYTES)
        for g, group in enumerate(batch.groups):
            group_of |= {group.first + i: g for i in range(len(group.stores))}
        # The parts that the device reads itself, by group of rows; None for parts without a group.
        direct: dict[int | None, list[tuple[UnreadPart, Tensor]]] = {}
        for i, part in enumerate(parts):
            place = self._place(slot, i, part, gathered)
            # A small part in shared memory is copied with the others, unless kernels read its rows.
            if place is None:
                pass
            elif (i in group_of or not place.is_shared) and self._device.reaches(part):
                direct.setdefault(group_of.get(i), []).append((part, slot.tensors[i]))
                slot.sources.append(part)
            else:
                self._read(slot, i, part, place, gathered)
        for g in range(len(batch.groups)):
            self._add_indices(slot, batch, g, direct.pop(g, []), gathered)
        if None in direct:
            gathered.direct.append((direct[None], None))
        if gathered.shared_until is not None:
            buffer, end = gathered.shared_until
            whole = self._device.tensor(buffer, (end,), _BYTES)
            gathered.staged.append((slot.staging[SHARED][:end], whole))
        return gathered

    def _place(
        self, slot: DeviceSlot, i: int, part: UnreadPart, gathered: Gathered
    ) -> Place | None:
        """Give part ``i`` a tensor; return its memory, or None if the part itself is adopted."""
        assert slot.compute is not None
        tensor = self._device.adopt(part, slot.compute)
        if tensor is not None:
            gathered.is_late = True
            slot.needed.append(0)
            slot.adopted_nbytes += known_nbytes(tensor)
            slot.tensors.append(tensor)
            return None
        nbytes = part_nbytes(part)
        place, is_reserved = self._parts.place(slot.memory, i, nbytes, slot.compute)
        gathered.is_late |= not is_reserved
        slot.needed.append(nbytes)
        slot.tensors.append(self._device.tensor(place.buffer, part.shape, part.dtype, place.offset))
        return place

    def _read(
        self, slot: DeviceSlot, i: int, part: UnreadPart, place: Place, gathered: Gathered
    ) -> None:
        """Read a part into staging memory, and add its copy."""
        if place.is_shared:
            end = place.offset + slot.needed[i]
            staged = slot.staging[SHARED]
            out = staged[place.offset : end].view(part.dtype).reshape(part.shape)
            gathered.shared_until = place.buffer, end
        else:
            out = self._parts.staging(slot.staging, i, part.shape, part.dtype)
            gathered.staged.append((out, slot.tensors[i]))
        self._check_stop()
        pieces = gather_pieces(part, out, self._check_stop)
        if pieces is None:
            part.read(out, self._check_stop)
        else:
            self.run_all(pieces)

    def _add_indices(
        self,
        slot: DeviceSlot,
        batch: HostBatch,
        g: int,
        direct: list[tuple[UnreadPart, Tensor]],
        gathered: Gathered,
    ) -> None:
        """Add the reads of a group's parts, and the copy of the row indices that they need."""
        assert slot.compute is not None
        group = batch.groups[g]
        slot.index_needed.append(0)
        stores = [store for store in group.stores if self._device.reaches(store)] if direct else []
        dtype = self._device.index_dtype(stores, group.rows) if stores else None
        if dtype is None:
            if direct:
                gathered.direct.append((direct, None))
            return
        slot.index_needed[g] = nbytes = len(group.rows) * dtype.itemsize
        place, is_reserved = self._indices.place(slot.index_memory, g, nbytes, slot.compute)
        gathered.are_indices_late |= not is_reserved
        tensor = self._device.tensor(place.buffer, group.rows.shape, dtype)
        out = self._indices.staging(slot.index_staging, g, group.rows.shape, dtype)
        out[...] = group.rows
        gathered.indices.append((out, tensor))
        gathered.direct.append((direct, tensor))
        batch.groups[g] = group._replace(indices=tensor)
