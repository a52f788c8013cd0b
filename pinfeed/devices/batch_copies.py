"""Copies of a batch to a device, and writes of its rows, by the single calls of any device.

A device whose driver takes them together does the same in one call. The numbers of hazards are
those of transfer.py and row_window.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.devices.layout import RowLayout
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.store import Store

if TYPE_CHECKING:
    from pinfeed.devices.device import Device, Event


class PartReads(NamedTuple):
    """Parts that the device reads itself, as ``Device.read`` takes them."""

    parts: Sequence[tuple[UnreadPart, Any]]
    indices: Any = None


class BatchCopies(NamedTuple):
    """Copies of a batch to the device."""

    staged: npt.NDArray[np.uint8]
    """Staging memory of the first parts."""
    layout: RowLayout
    """Layout of all parts."""
    wholes: Sequence[Any]
    """Tensor of each block."""
    reads: Sequence[PartReads] = ()
    written: Any = None
    """Event after which the device may read parts itself; None if it may at once."""


class RowWrites(NamedTuple):
    """Distinct rows that the device writes itself, as ``Device.write`` takes them."""

    values: Sequence[tuple[Store, Any]]
    rows: Rows
    indices: Any = None


def share_each(device: Device, tensors: Iterable[Any], stream: Any) -> None:
    """Share the memory of tensors with a stream; the device frees it after the stream's work.

    Args:
        device: Device of the tensors.
        tensors: The tensors. None among them is skipped.
        stream: The stream.
    """
    for tensor in tensors:
        if tensor is not None:
            device.share(tensor, stream)


class SingleCalls:
    """The part of a device that copies and writes batches by its other calls."""

    def copy_batch(
        self: Device, batch: BatchCopies, streams: tuple[Any, Any], *, timed: bool
    ) -> tuple[Event | None, Event]:
        compute, side = streams
        side.wait(compute.record())  # (2) kernels may still use an earlier tensor in this memory
        staged, layout, wholes, reads, written = batch
        if written is not None:
            side.wait(written)  # (13) the newest values may not be in the stores yet
        begun = side.record(timed=True) if timed else None
        for block, whole, (begin, end) in zip(
            layout.blocks, wholes, layout.staged_blocks(len(staged)), strict=False
        ):
            shape, dtype = block.row
            if len(block.parts) == 1:
                ((shape, dtype, _),) = block.parts
            else:
                shape = (-1, *shape)
            self.copy(staged[begin:end].view(dtype).reshape(shape), whole, side)
        for parts, indices in reads:
            self.read(parts, side, indices)
        return begun, side.record(timed=timed)

    def write_batch(
        self: Device, writes: Sequence[RowWrites], streams: tuple[Any, Any], *, timed: bool
    ) -> tuple[Event | None, Event]:
        compute, side = streams
        side.wait(compute.record())  # (7) the values may not be computed yet
        begun = side.record(timed=True) if timed else None
        for values, rows, indices in writes:
            self.write(values, rows, side, indices)
        return begun, side.record(timed=timed)
