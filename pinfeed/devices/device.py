"""Device, Stream and Event: the protocols between pinfeed and an accelerator.

Rule 1: everything above this layer uses an accelerator through these protocols only. Rule 2: an
Event is recorded once. ``Stream.record`` returns a new event, so no thread can wait for an event
that still marks an earlier point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.devices.batch_copies import BatchCopies, RowWrites
from pinfeed.devices.layout import RowLayout
from pinfeed.native.driver import Driver
from pinfeed.native.row_moves import RowDirection, RowMoves
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import UnreadPart
from pinfeed.stores.store import Array, Store
from pinfeed.threads.call import Workers

Tensor = Any
"""Tensor on the device: a torch tensor, or an array of a simulated device."""
Buffer = Any
"""Raw memory on the device."""


OVERLAP_CHUNK_BYTES = 8 << 20
"""Most bytes that a device copies at once of the rows that batches share."""


class TensorRange(NamedTuple):
    """Numbers [begin, begin + n) of a tensor on the device, int32, shape (m,)."""

    tensor: Tensor
    begin: int
    n: int


class RowPairs(NamedTuple):
    """Rows to read, each with its place in the batch: n pairs of int32 from number ``begin`` on."""

    tensor: Tensor
    begin: int
    n: int


class RowCopy(NamedTuple):
    """Copy of rows between tensors on the device: ``target[into] = source[taken]``."""

    source: Tensor
    target: Tensor
    taken: TensorRange | None = None
    """Positions in ``source``; None for all rows in order."""
    into: TensorRange | None = None
    """Positions in ``target``, as for ``taken``."""


class Event(Protocol):
    """Point in a stream."""

    def sync(self) -> None:
        """Block the calling thread until the stream has passed the event."""

    def is_done(self) -> bool:
        """Return whether the stream has passed the event."""
        ...

    def at_s(self) -> float:
        """Return the time at which the stream passed the event, in ``time.perf_counter()`` seconds.

        The event was recorded with ``timed=True``, and is done.
        """
        ...


class Stream(Protocol):
    """Queue of work that the device does in order. Objects for the same stream are equal."""

    @property
    def handle(self) -> int:
        """Handle of the stream, for the driver."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """Return a new event after all work so far.

        Args:
            timed: Whether ``Event.at_s`` is available.
        """
        ...

    def wait(self, event: Any) -> None:
        """Make later work of the stream wait for the event, without blocking the host."""


class Device(Protocol):
    """Streams, worker threads, memory and copies of one accelerator.

    A device receives only streams and events that it has created.
    """

    @property
    def name(self) -> str:
        """Name of the device in torch's spelling: ``cpu``, ``cuda:0``."""
        ...

    @property
    def unified(self) -> bool:
        """Whether the device uses the host's memory.

        If so, ``empty`` returns an array of bytes, rows are gathered into it, and one limit applies
        to all memory. All work is done when it is queued, the device can read every store directly,
        and ``write`` and ``copy_rows`` accept arrays as well as tensors.
        """
        ...

    @property
    def engine_driver(self) -> Driver | None:
        """Driver by which an engine moves rows to this device; None if no engine can."""
        ...

    def stream(self, name: str) -> Stream:
        """Return a side stream. Its owner calls this once."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream in which the work of the calling thread runs."""
        ...

    def in_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which ``stream`` is the current stream of the calling thread."""
        ...

    def worker(self, name: str, n_threads: int = 1) -> Workers:
        """Return threads that may use this device.

        Calls begin in the order in which they were submitted.
        """
        ...

    def empty(self, nbytes: int, stream: Any) -> Buffer:
        """Return memory for work in ``stream``; after it is freed, only this stream reuses it."""
        ...

    def empty_parts(self, layout: RowLayout, stream: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors in new memory, for work in the consumer thread's current stream.

        Args:
            layout: Shapes, dtypes and blocks of the memory.
            stream: The current stream of the calling thread.

        Returns:
            A tensor for each part, and one for each block. They keep the memory.
        """
        ...

    def address(self, tensor: Tensor) -> int:
        """Return the address of a tensor, for the driver."""
        ...

    def tensor(
        self, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
    ) -> Tensor:
        """Return a part of a buffer as a tensor, which keeps the buffer alive.

        Args:
            buffer: Memory of the device.
            shape: Shape of the tensor.
            dtype: Its dtype.
            offset: First byte in the buffer, a result of ``layout.aligned``.
        """
        ...

    def cut(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor as a separate tensor on the same memory."""
        ...

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return consecutive rows of a tensor as separate tensors on the same memory.

        Args:
            tensor: The tensor.
            sizes: Number of rows of each result; all rows together.
        """
        ...

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return page-locked memory, shape (nbytes,), for copies that do not block the host."""
        ...

    def copy(self, src: Tensor | Array, dst: Tensor | Array, stream: Any) -> None:
        """Queue a copy between staging memory and a tensor, or between tensors."""

    def copy_batch(
        self, batch: BatchCopies, streams: tuple[Any, Any], *, timed: bool
    ) -> tuple[Event | None, Event]:
        """Queue the copies of staging memory and the reads of a batch, after all work of a stream.

        Args:
            batch: Copies and reads of the batch.
            streams: Stream that may still use the memory of the batch, and that of the copies.
            timed: Whether events are timed.

        Returns:
            A timed event before the copies, or None; and an event after all of them.
        """
        ...

    def write_batch(
        self, writes: Sequence[RowWrites], streams: tuple[Any, Any], *, timed: bool
    ) -> tuple[Event | None, Event]:
        """Queue writes of rows, after all work of a stream so far.

        Args:
            writes: The rows; none of them is without rows or values.
            streams: Stream that computes the values, and that of the writes.
            timed: Whether events are timed.

        Returns:
            A timed event before the writes, or None; and an event after them.
        """
        ...

    def copy_rows(self, copies: Sequence[RowCopy], stream: Any) -> None:
        """Queue copies of rows, in one launch if the device can.

        Args:
            copies: The copies, which may run in any order. No copy writes a row that another copy
                of them reads or writes.
            stream: Stream of the copies.
        """

    def adopts(self, part: UnreadPart) -> bool:
        """Return whether the value of a part is used or moved by itself, not copied."""
        ...

    def adopt(self, part: UnreadPart, stream: Any) -> Tensor:
        """Return the value of such a part on the device.

        If the value is not on the device, it is moved there in ``stream``, the stream of the
        consumer thread.
        """
        ...

    def choose_route(self, stores: Sequence[Store], wanted: str | None, default: str) -> str:
        """Choose the route of rows between the stores and the device.

        Args:
            stores: Stores of the rows.
            wanted: ``"direct"``, ``"staged"``, or None for the default.
            default: The route if it is possible.

        Returns:
            The reason if the rows take another route; otherwise an empty string.

        Raises:
            DeviceError: If the requested route is not possible.
        """
        ...

    def reaches(self, source: UnreadPart | Store) -> bool:
        """Return whether the device reads the part, or writes the store, without staging memory."""
        ...

    def index_dtype(self, stores: Sequence[Store], rows: Rows) -> np.dtype[Any] | None:
        """Return the dtype in which the device needs row indices in its own memory.

        Args:
            stores: Stores whose rows the device reads or writes directly.
            rows: The row indices.

        Returns:
            The dtype; None if the device needs no indices, such as for a run of consecutive rows.
        """
        ...

    def read(
        self,
        parts: Sequence[tuple[UnreadPart, Tensor]],
        stream: Any,
        indices: Tensor | RowPairs | None = None,
    ) -> None:
        """Queue reads of parts that the device can read directly into their tensors.

        Args:
            parts: The parts, each with its tensor.
            stream: Stream of the reads.
            indices: Row indices of the parts on the device, as int64 or in the dtype of
                ``index_dtype``; or pairs. If given, all parts are these rows of stores.
        """
        ...

    def write(
        self,
        values: Sequence[tuple[Store, Tensor]],
        rows: Rows,
        stream: Any,
        indices: Tensor | None = None,
    ) -> None:
        """Queue writes of distinct rows of stores that the device can write directly.

        Args:
            values: Stores, each with the values of the rows.
            rows: Row indices, shape (n,).
            stream: Stream of the writes.
            indices: The row indices on the device, as int64 or in the dtype of ``index_dtype``.
        """

    def share(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of a freed tensor until ``stream`` has done its work so far.

        This does nothing for a tensor that was allocated for that stream.
        """

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        """Return a tensor's shape, its dtype, and whether it is on this device.

        Returns:
            A tuple of the three, or None if ``value`` is not a dense tensor.
        """

    def named(self, name: str) -> AbstractContextManager[None]:
        """Return a context that names the work of the calling thread in the device's profiler."""
        ...

    def free_bytes(self) -> int:
        """Return the free memory of the device, in bytes."""
        ...

    def close(self) -> None:
        """Free spare memory. Batches that the loop has received stay valid."""


class EngineDevice(Device, Protocol):
    """A device that has an ``engine_driver``."""

    def row_moves(self, kind: RowDirection, stores: Mapping[int, Store]) -> RowMoves:
        """Return how compiled functions queue moves of rows by the device itself.

        Args:
            kind: Direction: a gather to the device, or a scatter of distinct rows from it.
            stores: Stores that the device reaches, at least one, by their positions in a batch.
        """
        ...

    def dense_address(self, tensor: Tensor) -> int:
        """Return the address of a dense tensor; 0 if its elements are not one after the other."""
        ...
