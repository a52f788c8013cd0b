"""DriverTable: the calls of the CUDA driver that compiled functions make, looked up at run time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

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
