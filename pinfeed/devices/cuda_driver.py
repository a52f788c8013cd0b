"""CudaDriver: calls of the driver of a GPU, without torch around them; CudaEvent: an event of it.

torch lets go of the interpreter's lock in each call that records an event, waits for it or frees
it, and another thread takes the lock. These calls keep it, except where a thread sleeps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch

from pinfeed.errors import DeviceError
from pinfeed.native.driver import NOT_READY, DriverTable, driver_table
from pinfeed.native.engine import Engine
from pinfeed.native.library import Library, library, packing
from pinfeed.native.row_moves import RowMove
from pinfeed.native.writer import RowWriter

ROW_COPY_FIELDS = 6
"""Fields of ``pf_row_copy`` of pinfeed.h."""
_pack_1 = packing(1)
_pack_2 = packing(2)
_pack_3 = packing(3)
_pack_5 = packing(5)


class CudaDriver:
    """The driver of a GPU; streams are given by their handles.

    Every method raises the error of the driver.

    Args:
        table: Its calls.
        found: The compiled functions that make them.
        device: The GPU.
    """

    def __init__(self, table: DriverTable, found: Library, device: torch.device) -> None:
        self._table = table
        self._library = found
        self._device = device
        self.address = table.address
        # Events that nothing refers to any more. A wait refers to the last record before it, so
        # an event may be recorded again while streams still wait for an earlier record.
        self._spare: list[int] = []

    @functools.cached_property
    def _released(self) -> CudaEvent:
        """Event that a call records, and for which it makes a stream wait.

        Calls keep the interpreter's lock, so all of them record the same one.
        """
        return self.event()

    def start(self, engine: Engine, n_threads: int) -> None:
        """Start the threads of an engine."""
        engine.start(n_threads)

    def start_writer(self, writer: RowWriter, n_threads: int) -> None:
        """Start the threads of a writer."""
        if n_threads:
            writer.start(n_threads)

    def record(self, stream: int) -> CudaEvent:
        """Return an event after all work of a stream so far."""
        event = self.event()
        self._check(self._library.record_event(_pack_3(self.address, event.handle, stream)))
        return event

    def event(self) -> CudaEvent:
        """Return an event for the caller to record."""
        try:
            return CudaEvent(self, self._spare.pop())
        except IndexError:
            return CudaEvent(self, self._new_event())

    def wait(self, stream: int, event: int) -> None:
        """Make later work of a stream wait for the event with a handle."""
        self._check(self._library.wait_event(_pack_3(self.address, stream, event)))

    def is_done(self, event: int) -> bool:
        """Return whether its stream has passed an event."""
        code = self._library.query_event(_pack_2(self.address, event))
        if code not in (0, NOT_READY):
            self.raise_error(code)
        return not code

    def sync(self, event: int) -> None:
        """Block the calling thread until the stream has passed an event; the thread sleeps."""
        if not self.is_done(event):
            self._check(self._library.sync_event(_pack_2(self.address, event)))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between two addresses, of which one is page-locked memory of the host."""
        self._check(self._library.queue_copy(_pack_5(self.address, to, source, nbytes, stream)))

    def queue(
        self,
        before: int,
        stream: int,
        copies: Sequence[int],
        moves: Sequence[RowMove],
        written: int = 0,
    ) -> CudaEvent:
        """Queue work in a stream, after all work of another one, and return an event after it.

        Args:
            before: Handle of the other stream.
            stream: Handle of the stream.
            copies: Address of the target, address of the page-locked source, and bytes of each
                copy.
            moves: Moves of rows.
            written: Handle of an event for which the moves wait; 0 for none.
        """
        released, done = self._released, self.event()
        request = [self.address, before, stream, released.handle, done.handle, written]
        # Nothing is staged.
        request += [0, 0, len(copies) // 3, len(moves)]
        request += [*copies[2::3], *copies[::3], *copies[1::3]]
        for move in moves:
            request += (*move.fields, len(move.devices), *move.devices)
        self._check(self._library.queue(packing(len(request))(*request)))
        return done

    def move_rows(self, stream: int, move: RowMove) -> None:
        """Queue a move of rows in a stream."""
        request = (self.address, stream, *move.fields, *move.devices)
        self._check(self._library.move_rows(packing(len(request))(*request)))

    def copy_rows(
        self, kernel: int, n_threads: int, most_blocks: int, stream: int, copies: Sequence[int]
    ) -> None:
        """Queue copies of rows between tensors of the GPU.

        Args:
            kernel: Handle of the kernel of row_copies.py.
            n_threads: Threads of a block.
            most_blocks: Largest number of blocks of a copy.
            stream: Handle of the stream.
            copies: The fields of each copy: ``pf_row_copy`` of pinfeed.h.
        """
        n = len(copies) // ROW_COPY_FIELDS
        request = (self.address, kernel, stream, n_threads, most_blocks, n, *copies)
        self._check(self._library.copy_rows(packing(len(request))(*request)))

    def free(self, event: int) -> None:
        """Use an event again."""
        self._spare.append(event)

    def raise_error(self, code: int) -> NoReturn:
        """Raise torch's own error, if the GPU has failed, or else a DeviceError."""
        torch.cuda.synchronize(self._device)
        raise DeviceError(
            f"a call of the CUDA driver on {self._device} failed with error {code}, while rows or "
            "a batch were moved; leave the loop"
        )

    def _new_event(self) -> int:
        event = self._library.create_event(_pack_1(self.address))
        if event <= 0:
            self.raise_error(-event)
        return event

    def _check(self, code: int) -> None:
        if code:
            self.raise_error(code)


class CudaEvent:
    """Event of the driver, which another CudaEvent uses when nothing refers to this one any more.

    Args:
        driver: The driver.
        handle: Handle of the event.
    """

    __slots__ = ("_driver", "handle")

    def __init__(self, driver: CudaDriver, handle: int) -> None:
        self._driver = driver
        self.handle = handle

    def __del__(self) -> None:
        self._driver.free(self.handle)

    def sync(self) -> None:
        self._driver.sync(self.handle)

    def is_done(self) -> bool:
        return self._driver.is_done(self.handle)

    def at_s(self) -> float:
        raise RuntimeError("the event is not timed")


@functools.cache
def cuda_driver(device: torch.device) -> CudaDriver | None:
    """Return the driver of a GPU; None without it, or without the compiled functions."""
    found = library()
    table = None if found is None else driver_table(device.index)
    if found is None or table is None:
        return None
    return CudaDriver(table, found, device)
