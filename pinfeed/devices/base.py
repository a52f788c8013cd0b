"""The seam between pinfeed and an accelerator: Device, Stream, Event.

Rule 1: everything above this layer speaks to an accelerator through these protocols only. Rule 2:
an Event is recorded once. ``Stream.record`` gives a new one; there is no re-record, so no stale
capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows
from pinfeed.stores.base import Array, HostArray, Store
from pinfeed.threads.call import Workers

Tensor = Any
"""What the device lends: a torch tensor on it (a simulated device has arrays of its own)."""
Buffer = Any
"""Raw memory of the device."""


class Event(Protocol):
    """A point in a stream."""

    def sync(self) -> None:
        """Block the host until the stream has come here."""

    def is_done(self) -> bool:
        """Whether it has."""
        ...

    def at_s(self) -> float:
        """When it had, in seconds of ``time.perf_counter()``: of an event that was recorded as timed, and is done."""
        ...


class Stream(Protocol):
    """A queue of work that the device does in order. Two objects for one stream are equal."""

    def record(self, *, timed: bool = False) -> Event:
        """A new event behind all work so far; ``timed``: that can tell when it was passed."""
        ...

    def wait(self, event: Any) -> None:
        """Let later work wait for the event; the host goes on."""


class Device(Protocol):
    """Streams, workers, memory and copies of one accelerator.

    It is given its own streams and events only.
    """

    @property
    def name(self) -> str:
        """As torch writes it: ``cpu``, ``cuda:0``."""
        ...

    @property
    def unified(self) -> bool:
        """Whether its memory is the host's: a batch is gathered where it is lent, and there is one limit."""
        ...

    def stream(self, name: str) -> Stream:
        """A side stream, made once by whoever owns it."""
        ...

    def current_stream(self) -> Stream:
        """The stream in which the calling thread's work runs."""
        ...

    def worker(self, name: str, n_threads: int = 1) -> Workers:
        """Threads that may use this device.

        Their calls begin in the order in which they were submitted.
        """
        ...

    def empty(self, nbytes: int, stream: Any) -> Buffer:
        """Memory for work in ``stream``; freed memory comes back to work in the same stream only."""
        ...

    def tensor(self, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """The beginning of a buffer as a tensor; it keeps the buffer alive."""
        ...

    def cut(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor as one of their own, on the same memory."""
        ...

    def staging(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, shape (nbytes,), for copies that do not block the host."""
        ...

    def copy(self, src: Tensor | Array, dst: Tensor | Array, stream: Any) -> None:
        """Queue a copy between staging memory and a tensor, or between tensors."""

    def copy_rows(
        self, src: Tensor, src_pos: Rows, dst: Tensor, dst_pos: Rows, stream: Any
    ) -> None:
        """Queue ``dst[dst_pos] = src[src_pos]``."""

    def adopt(self, part: HostArray, stream: Any) -> Tensor | None:
        """Lend the ``host_value`` of a part itself, moved here in the consumer's ``stream`` if need be; None if it is to be copied."""
        ...

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        """Decide how rows of the stores come and go, in batches of so many, before ``stream`` is asked for any.

        Args:
            stores: Whose rows.
            n_rows: Rows of a batch; 0 if that is not known.
            wanted: ``"direct"``, ``"staged"`` or None for the faster one.

        Returns:
            Why it was decided so; nothing where there is no choice.

        Raises:
            DeviceError: It cannot be as wanted.
        """
        ...

    def reaches(self, source: HostArray | Store) -> bool:
        """Whether the device reads the part, or writes the store, where it is, without staging."""
        ...

    def read(self, parts: Sequence[tuple[HostArray, Tensor]], stream: Any) -> Iterator[None]:
        """Queue the read of parts it reaches, each into its tensor, in steps as ``HostArray.read``."""
        ...

    def write(self, values: Sequence[tuple[Store, Tensor]], rows: Rows, stream: Any) -> None:
        """Queue the write of rows, each once, of stores it reaches."""

    def share(self, tensor: Tensor, stream: Any) -> None:
        """Once ``tensor`` is freed, keep its memory until ``stream`` has done its work so far; nothing if it is that stream's."""

    def describe(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any] | None, bool] | None:
        """Shape, dtype and whether it is on this device, of a tensor; None for anything else."""

    def named(self, name: str) -> AbstractContextManager[None]:
        """Show what the calling thread does meanwhile under this name, in a profiler of the device's."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that is free now, in bytes."""
        ...

    def close(self) -> None:
        """Free spare memory. Tensors that were lent stay valid."""
