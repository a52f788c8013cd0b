"""DeviceBatches: moves batches that the loop's thread has, such as those of a loader, to a device.

No thread is needed: the device is asynchronous, so the loop takes the next batch after its training
step was queued. ``pinfeed/native/move.c`` shows the protocol of streams and events.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pinfeed.devices.device import Stream, Tensor
from pinfeed.devices.layout import BatchPart, RowLayout
from pinfeed.native.driver import NOT_READY, Driver, DriverEvent
from pinfeed.native.library import address_of, library, packing
from pinfeed.pipeline.device_rows import DeviceMover
from pinfeed.pipeline.part_memory import WHOLE, known_nbytes
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.slot import DeviceSlot, Slot
from pinfeed.pipeline.sources.source import HostBatch, HostLeaf, host_batch_of
from pinfeed.pipeline.transfer import Transfer

_pack_receive = packing(4)
# Other Python threads run while more bytes are staged.
_BRIEF_NBYTES = 1 << 20


class MovedBatch(NamedTuple):
    """A batch whose copies to the device are queued."""

    data: Any
    """The batch in the user's structure."""
    n_rows: int
    """Number of samples."""
    nbytes: int
    """Known bytes."""
    at: int
    """Number of its slot."""
    stream: Stream
    """Stream for which its memory was allocated."""
    state: Any
    """State of the loader after the batch."""


class DeviceBatches(DeviceMover):
    """Moves the batches of one loop at a time to a device, without threads.

    Args:
        transfer: Mover of the feeder, with the stream of the copies and the slots.
        driver: Driver of the device.
    """

    def __init__(self, transfer: Transfer, driver: Driver) -> None:
        found = library()
        assert found is not None
        super().__init__(transfer, driver)
        self._library = found
        self._side = transfer.read_stream.handle
        self._layout: LoaderLayout | None = None
        self._n_moved = 0
        # Event after the last copies that read the memory of a batch itself.
        self._reading: DriverEvent | None = None
        # For each slot the events ``released`` and ``copied``.
        self._events: list[tuple[DriverEvent, DriverEvent]] = []

    @property
    def is_stopping(self) -> bool:
        """Whether another thread ends the loop."""
        return self.transfer.is_stopping

    def begin(self, schedule: PrefetchSchedule) -> Sequence[DeviceSlot]:
        slots = super().begin(schedule)
        self._events = [(self.driver.event(), self.driver.event()) for _ in slots]
        return slots

    def finish_reads(self) -> None:
        """Wait until the memory of the last batch was read, because a loader may fill it again."""
        if self._reading is not None:
            self._reading.sync()
            self._reading = None

    def move(self, batch: Any, state: Any) -> MovedBatch:
        """Queue the copies of a batch to the device.

        Args:
            batch: The loader's batch.
            state: State of the loader after the batch.
        """
        from pinfeed.tensors.numpy_torch import plain_tensors, same_structure

        at = self._n_moved % len(self._slots)
        self._n_moved += 1
        compute = self.device.current_stream()
        tensors = plain_tensors(batch)
        if tensors is None:
            return self._move_any(at, host_batch_of(batch), compute, state)
        moved, nbytes = self._move(at, tensors, compute)
        n_rows = next((len(tensor) for tensor in tensors if tensor.ndim), 1)
        # Staged tensors are not read any more.
        self._slots[at].sources = [] if self._reading is None else [batch]
        self._slots[at].tensors = list(moved)
        return MovedBatch(same_structure(batch, moved), n_rows, nbytes, at, compute, state)

    def receive(self, moved: MovedBatch) -> bool:
        """Make later work of the loop see a batch, and return whether the device is idle."""
        compute = self.device.current_stream()
        slot = self._slots[moved.at]
        if compute != moved.stream:
            for tensor in slot.tensors:
                self.device.share(tensor, compute)
        slot.tensors = []
        released, copied = self._events[moved.at]
        request = (self.driver.address, compute.handle, released.handle, copied.handle)
        is_idle = self._library.receive(_pack_receive(*request))
        if is_idle < 0:
            self.driver.raise_error(-is_idle)
        return bool(is_idle)

    def lend(self, slot: Slot) -> deque[list[Tensor]]:
        """Return no tensors, because ``receive`` lends the batches."""
        return deque()

    def _move(
        self, at: int, tensors: Sequence[Any], compute: Stream
    ) -> tuple[Sequence[Tensor], int]:
        """Queue the copies of dense tensors; return them on the device, and their bytes."""
        layout = self._layout
        if layout is None or not layout.fits(tensors):
            self._layout = layout = LoaderLayout(tensors, self._is_reached)
        released, copied = self._events[at]
        staging = 0
        if layout.staged_nbytes:
            slot = self._slots[at]
            if len(slot.staging.get(WHOLE, ())) < layout.staged_nbytes:
                copied.sync()  # (1) larger memory replaces the one from which copies may still read
            memory = self.transfer.staging_of(slot, layout.staged_nbytes)
            staging = address_of(memory)
        found, _ = self.device.empty_parts(layout.memory, compute)
        request = packing(10 + layout.n_staged + 3 * len(tensors))(
            self.driver.address,
            compute.handle,
            self._side,
            released.handle,
            copied.handle,
            0,
            staging,
            layout.n_staged,
            len(tensors),
            0,
            *layout.offsets,
            *layout.nbytes,
            *map(self.device.address, found),
            *layout.sources(tensors),
        )
        is_brief = layout.staged_nbytes <= _BRIEF_NBYTES
        queue = self._library.queue if is_brief else self._library.queue_long
        code = queue(request)
        if code == NOT_READY:
            copied.sync()  # (1)
            code = queue(request)
        if layout.n_staged < len(tensors):
            self._reading = copied
        if self.transfer.is_stopping:
            # Another thread ends the loop, and may have waited for its copies before these.
            copied.sync()
        if code:
            self.driver.raise_error(code)
        return layout.in_batch_order(found), layout.memory.nbytes_of_rows

    def _move_any(self, at: int, batch: HostBatch, compute: Stream, state: Any) -> MovedBatch:
        """Queue the copies of a batch of any structure."""
        device = self.device
        parts: Sequence[Any] = batch.parts
        values = [device.adopt(part, compute) if device.adopts(part) else None for part in parts]
        nbytes = sum(known_nbytes(value) for value in values if value is not None)
        pairs = zip(parts, values, strict=True)
        tensors = [part.host_value for part, value in pairs if value is None]
        moved: Sequence[Tensor] = ()
        if tensors:
            moved, n = self._move(at, tensors, compute)
            nbytes += n
        else:
            self._events[at][1].sync()  # (1) copies may still read the last batch of the slot
        left = iter(moved)
        values = [next(left) if value is None else value for value in values]
        self._slots[at].sources = [] if self._reading is None else tensors
        self._slots[at].tensors = values
        return MovedBatch(batch.data(values), batch.batches[0][0], nbytes, at, compute, state)

    def _is_reached(self, tensor: Any) -> bool:
        return self.device.reaches(HostLeaf(tensor))


class LoaderLayout:
    """Places of the tensors of batches that have the same shapes and dtypes.

    Tensors that are staged come first, because one copy moves them.

    Args:
        tensors: Dense, contiguous tensors on the host.
        is_reached: Returns whether the device copies a tensor from where it is.
    """

    def __init__(self, tensors: Sequence[Any], is_reached: Callable[[Any], bool]) -> None:
        from pinfeed.tensors.numpy_torch import NUMPY

        self._is_reached = is_reached
        self._direct = list(map(is_reached, tensors))
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        direct = self._direct
        order = sorted(range(len(tensors)), key=lambda i: (direct[i], tensors[i].nbytes))
        is_sorted = order == list(range(len(tensors)))
        self._order = None if is_sorted else order
        self._places = sorted(range(len(order)), key=order.__getitem__)
        parts = [BatchPart.of(tuple(tensors[i].shape), NUMPY[tensors[i].dtype]) for i in order]
        self.memory = memory = RowLayout.of(parts)
        """Layout of the memory of the device, in the order of ``sources``."""
        self.n_staged = n = len(tensors) - sum(direct)
        """Number of tensors that are staged."""
        self.staged_nbytes = [*memory.offsets, memory.nbytes][n]
        """Bytes of staging memory."""
        self.offsets = memory.offsets[:n]
        """Offset of each staged tensor in staging memory."""
        self.nbytes = [part.nbytes for part in parts]
        """Bytes of each tensor in this order."""

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Return whether tensors have the shapes and dtypes of this layout, and move as these."""
        return (
            len(tensors) == len(self._shapes)
            and [tensor.shape for tensor in tensors] == self._shapes
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and all(map(self._is_reached, itertools.compress(tensors, self._direct)))
        )

    def sources(self, tensors: Sequence[Any]) -> list[int]:
        """Return the address of each tensor, in the order of ``memory``."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return addresses if self._order is None else [addresses[i] for i in self._order]

    def in_batch_order(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors of the device in the order of the batch."""
        return tensors if self._order is None else [tensors[i] for i in self._places]
