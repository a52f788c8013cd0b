"""SimEngineDevice: a simulated device to which an engine moves rows; SimDriver: its driver."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.native.driver import NOT_READY, DriverTable
from pinfeed.native.engine import Engine
from pinfeed.native.library import library
from pinfeed.native.row_moves import (
    MAX_TABLES,
    KernelLaunch,
    RowDirection,
    RowMoves,
    Table,
    bucket_shift,
)
from pinfeed.native.writer import RowWriter
from pinfeed.stores.store import row_nbytes
from pinfeed.testing.sim import Choose, SimDevice, lazy
from pinfeed.testing.sim_streams import DeviceArray, SimEvent, SimStream

_FAILED = 999

_TABLE = np.dtype([("rows", "u8"), ("packed", "u8"), ("row_nbytes", "u4")], align=True)
MOVES = np.dtype(
    [("rows", "u8"), ("n_rows", "u4"), ("n_tables", "u4"), ("tables", _TABLE, MAX_TABLES)],
    align=True,
)
"""Argument of the kernels that move rows: ``pf_moves`` of pinfeed.h."""

_HANDLE = ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "push": [_HANDLE],
    "pop": [_HANDLE],
    "exchange_capture_mode": [_HANDLE],
    "create": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
    "destroy": [_HANDLE],
    "record": [_HANDLE, _HANDLE],
    "wait": [_HANDLE, _HANDLE, ctypes.c_uint],
    "query": [_HANDLE],
    "sync": [_HANDLE],
    "copy": [_HANDLE, _HANDLE, ctypes.c_size_t, _HANDLE],
    "launch": [_HANDLE, *[ctypes.c_uint] * 7, _HANDLE, ctypes.POINTER(ctypes.c_void_p), _HANDLE],
}
"""Types of the arguments of each call."""

PAIRS = 16
"""Handle of the kernel that reads rows by pairs; those of the others are the bytes of an index."""
SCATTER = 32
"""Handle of the kernel that writes rows by indices of int32."""
_PAIR = [("row", "i4"), ("place", "i4")]
_ENTRIES: dict[int, Any] = {4: "i4", 8: "i8", PAIRS: _PAIR, SCATTER: "i4"}


class SimDriver:
    """The driver calls of an engine, on the streams of a simulated device.

    The adversary of the device also decides when a thread of the engine gathers its next piece:
    the thread is the actor ``engine``, and runs in the caller's thread like everything else.

    Args:
        device: The device.
    """

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._guarded(getattr(self, f"_{name}")))
            for name, types in _ARGUMENTS.items()
        }
        self._table = DriverTable.of(1, self._functions)
        self.address = self._table.address
        self._handles = itertools.count(1)
        # Events by their handles; None until they are recorded.
        self._events: dict[int, SimEvent | None] = {}
        # Events of slots, which are created before the engine starts.
        self._slot_events: set[int] = set()
        self._writer_events: set[int] = set()
        self._error: BaseException | None = None
        self.is_blocking = False
        """Whether the host waits for an event."""

    def event(self) -> SimDriverEvent:
        """Return an event for the caller to record."""
        return SimDriverEvent(self, self._new_handle())

    def start(self, engine: Engine, n_threads: int) -> None:
        """Let the adversary gather pieces, if the engine has threads."""
        self._slot_events |= set(self._events)
        if n_threads:
            self._device._actors["engine"] = SimEngineThread(self, engine)

    def start_writer(self, writer: RowWriter, n_threads: int) -> None:
        """Let the adversary make the steps of a writer, if it has threads."""
        self._writer_events |= set(self._events) - self._slot_events
        if n_threads:
            self._device._actors["writer"] = SimWriterThread(self, writer)

    def raise_error(self, code: int) -> None:
        """Raise the error of the call that has failed."""
        assert self._error is not None, f"the engine reports error {code}, but no call has failed"
        raise self._error

    def _guarded(self, call: Callable[..., int | None]) -> Callable[..., int]:
        """Return a function that keeps an error, because none can pass through compiled code.

        A call that returns nothing has succeeded.
        """

        def guarded(*arguments: Any) -> int:
            try:
                # A handle of 0 is None.
                return call(*[argument or 0 for argument in arguments]) or 0
            except BaseException as error:
                self._error = error
                return _FAILED

        return guarded

    def _push(self, context: int) -> None:
        assert context == self._table.context

    def _pop(self, context: int) -> None:
        """Do nothing, because the device has one context."""

    def _exchange_capture_mode(self, mode: int) -> None:
        """Do nothing, because no graph is captured."""

    def _create(self, out: Any, flags: int) -> None:
        out[0] = self._new_handle()

    def _destroy(self, event: int) -> None:
        del self._events[event]

    def _record(self, event: int, stream: int) -> None:
        self._events[event] = self._stream(stream).record()

    def _wait(self, stream: int, event: int, flags: int) -> None:
        waiting = self._stream(stream)
        if not self._is_ignored({"read": 2, "write": 7}.get(waiting.name, 4)):
            recorded = self._events[event]
            assert recorded is not None
            waiting._enqueue(lambda: None, after=recorded)

    def _query(self, event: int) -> int:
        self._device._turn()
        recorded = self._events[event]
        return 0 if recorded is None or recorded.passed else NOT_READY

    def _sync(self, event: int) -> None:
        recorded = self._events[event]
        hazard = 1 if event in self._slot_events else 8 if event in self._writer_events else 9
        if recorded is not None and not self._is_ignored(hazard):
            self.is_blocking = True
            try:
                self._device._force(recorded)
            finally:
                self.is_blocking = False

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        queue = self._stream(stream)
        pinned = [*self._owners(source, nbytes), *self._owners(to, nbytes)]
        assert pinned or queue.name not in ("read", "write"), "the device uses pageable memory"

        def run() -> None:
            assert all(owner() is not None for owner in pinned), (
                "a copy of the engine uses freed host memory"
            )
            ctypes.memmove(to, source, nbytes)

        queue._enqueue(run)

    def _launch(self, kernel: int, *arguments: Any) -> None:
        """Queue a read or a write of rows, with the argument of the kernels of a GPU."""
        stream, pointers = arguments[7:9]
        (moves,) = np.frombuffer(ctypes.string_at(pointers[0], MOVES.itemsize), MOVES)
        n_rows = int(moves["n_rows"])
        tables = moves["tables"][: moves["n_tables"]].tolist()
        owners = [self._owners(table, 1)[0] for table, _, _ in tables]
        entry = np.dtype(_ENTRIES[kernel])

        def run() -> None:
            found = ctypes.string_at(int(moves["rows"]), entry.itemsize * n_rows)
            entries = np.frombuffer(found, entry)
            places: Any = range(n_rows)
            if kernel == PAIRS:
                entries, places = entries["row"], entries["place"]
            for (table, packed, nbytes), owner in zip(tables, owners, strict=True):
                memory = owner()
                assert memory is not None, "a kernel of the engine uses freed host memory"
                # Numbers that were overwritten become others, which a GPU would not check.
                rows = entries % (memory.nbytes // nbytes)
                for row, place in zip(rows.tolist(), places, strict=True):
                    at, in_table = packed + int(place) % n_rows * nbytes, table + row * nbytes
                    to, source = (in_table, at) if kernel == SCATTER else (at, in_table)
                    ctypes.memmove(to, source, nbytes)

        self._stream(stream)._enqueue(run)

    def _owners(self, address: int, nbytes: int) -> list[weakref.ref[npt.NDArray[Any]]]:
        """Return references to the page-locked memory at an address, if there is some."""
        return [
            weakref.ref(memory)
            for (start, _), memory in self._device._pinned.items()
            if 0 <= address - start <= memory.nbytes - nbytes
        ]

    def _new_handle(self) -> int:
        handle = next(self._handles)
        self._events[handle] = None
        return handle

    def _stream(self, handle: int) -> SimStream:
        actors = self._device._actors.values()
        return next(one for one in actors if isinstance(one, SimStream) and one.handle == handle)

    def _is_ignored(self, hazard: int) -> bool:
        """Return whether to ignore the waits of a hazard; engine.c has their numbers."""
        site = ("engine.c", hazard)
        self._device.sites.add(site)
        return site == self._device._deaf_to


class SimDriverEvent:
    """Event of a SimDriver.

    Args:
        driver: The driver.
        handle: Handle of the event.
    """

    def __init__(self, driver: SimDriver, handle: int) -> None:
        self.handle = handle
        self._driver = driver
        driver._slot_events.add(handle)

    def sync(self) -> None:
        self._driver._sync(self.handle)


class SimThread:
    """The threads of an engine or of a writer, as one actor that makes one step at a time.

    Args:
        driver: Driver of the engine or writer.
        owner: The engine or writer.
    """

    def __init__(self, driver: SimDriver, owner: Engine | RowWriter) -> None:
        self._driver = driver
        self._owner: weakref.ref[Any] = weakref.ref(owner)

    @property
    def _ready(self) -> bool:
        owner = self._owner()
        return owner is not None and self._has_work(owner) and not self._driver.is_blocking

    def _advance(self) -> None:
        owner = self._owner()
        assert owner is not None
        self._work(owner)

    def _has_work(self, owner: Any) -> bool:
        raise NotImplementedError

    def _work(self, owner: Any) -> None:
        raise NotImplementedError


class SimWriterThread(SimThread):
    """The thread of a writer."""

    def _has_work(self, writer: RowWriter) -> bool:
        return writer.n_pending > 0 and not writer.is_busy

    def _work(self, writer: RowWriter) -> None:
        writer.step()


class SimEngineThread(SimThread):
    """The threads of an engine, which gather one piece at a time."""

    _number = 0

    def _has_work(self, engine: Engine) -> bool:
        return engine.is_open and self._number < engine.n_submitted

    def _work(self, engine: Engine) -> None:
        if not engine.help(self._number):
            self._number += 1


class SimEngineDevice(SimDevice):
    """A ``SimDevice`` to which an engine moves rows in memory.

    ``deaf_to`` may be ``("engine.c", number of the hazard)``.

    Args:
        choose: The adversary.
        has_engine: Whether there is an engine.
        options: The other arguments of ``SimDevice``.
    """

    def __init__(self, choose: Choose = lazy, *, has_engine: bool = False, **options: Any) -> None:
        super().__init__(choose, **options)
        if has_engine and library() is not None:
            self.engine_driver = SimDriver(self)

    def dense_address(self, tensor: DeviceArray) -> int:
        return self.address(tensor) if tensor._array.flags.c_contiguous else 0

    def row_moves(self, kind: RowDirection, stores: Mapping[int, Any]) -> RowMoves:
        tables = []
        for k, store in stores.items():
            tables.append(Table(self._pin(store.array), row_nbytes(store), k))
        # Rows of a long table are read in the order of groups of at least 4 rows.
        n_rows = max(store.n_rows for store in stores.values())
        kernel, shift = 4, -1
        if kind == "scatter":
            kernel = SCATTER
        elif n_rows > 16:
            kernel, shift = PAIRS, max(2, bucket_shift(n_rows))
        launches = [KernelLaunch(kernel, 1, 32, 1, [table]) for table in tables]
        return RowMoves(4, shift, launches)
