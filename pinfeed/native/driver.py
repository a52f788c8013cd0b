"""Driver: the calls of a device that compiled functions make; DriverTable: those of CUDA."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pinfeed.native.engine import Engine
    from pinfeed.native.writer import RowWriter

NOT_READY = 600
"""Result of ``query`` for an event that its stream has not passed."""

_SYMBOLS = {
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "exchange_capture_mode": "cuThreadExchangeStreamCaptureMode",
    "create": "cuEventCreate",
    "destroy": "cuEventDestroy_v2",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "query": "cuEventQuery",
    "sync": "cuEventSynchronize",
    "copy": "cuMemcpyAsync",
    "launch": "cuLaunchKernel",
}
"""Name of each call in the driver, in the order of ``pf_driver`` in pinfeed.h."""


class DriverEvent(Protocol):
    """Event of a driver; the driver uses it again when nothing refers to it."""

    handle: int

    def sync(self) -> None:
        """Block the calling thread until the last record has passed."""


class Driver(Protocol):
    """The driver of one device, and how its errors are raised."""

    @property
    def address(self) -> int:
        """Address of a ``pf_driver`` of pinfeed.h."""
        ...

    def event(self) -> DriverEvent:
        """Return an event for the caller to record."""
        ...

    def start(self, engine: Engine, n_threads: int) -> None:
        """Start the threads of an engine: call ``engine.start``, or play the threads itself."""

    def start_writer(self, writer: RowWriter, n_threads: int) -> None:
        """Start the threads of a writer: call ``writer.start``, or play the threads itself."""

    def raise_error(self, code: int) -> None:
        """Raise the error that a call of the driver has returned."""


class DriverTable(ctypes.Structure):
    """The structure ``pf_driver`` of pinfeed.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("context", *_SYMBOLS)]

    @classmethod
    def of(cls, context: int, functions: Mapping[str, Any]) -> DriverTable:
        """Return a table of functions of ctypes, which the caller keeps alive.

        Args:
            context: Handle that ``push`` makes current.
            functions: The functions, by the names of the fields.
        """
        addresses = [ctypes.cast(functions[name], ctypes.c_void_p).value for name in _SYMBOLS]
        return cls(context, *addresses)

    @property
    def address(self) -> int:
        """Address of the table."""
        return ctypes.addressof(self)


@functools.cache
def driver_table(index: int) -> DriverTable | None:
    """Return the calls of the driver for a GPU; None if this machine has no such driver.

    Args:
        index: Number of the GPU, as torch counts them.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        functions = {name: cuda[symbol] for name, symbol in _SYMBOLS.items()}
    except (OSError, AttributeError):
        return None
    gpu = ctypes.c_int()
    context = ctypes.c_void_p()
    # The context that torch uses. It is retained until the process ends, as torch's own is.
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(gpu), index)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
    ):
        return None
    return DriverTable.of(context.value or 0, functions)
