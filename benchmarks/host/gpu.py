"""A GPU without hardware: torch.cuda, and pinfeed's CUDA device, on the driver of driver.c.

Tensors of the GPU are in host memory. As in torch's bindings, other threads run Python during a
record, a wait, a synchronization, the end of an event and a copy, but not during a query. The
Python code around these calls is shorter than torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from pinfeed.devices import cuda, cuda_driver, kernels, row_copies
from pinfeed.memory.pages import huge
from pinfeed.native.driver import DriverTable

_SOURCE = Path(__file__).with_name("driver.c")
_FLAGS = "-std=gnu11 -O2 -Wall -Wextra -fPIC -shared -pthread"
_N_ARGUMENTS = {
    "create": 2,
    "destroy": 1,
    "record": 2,
    "wait": 3,
    "query": 1,
    "sync": 1,
    "copy": 4,
    "launch": 11,
}


class Driver(NamedTuple):
    """The compiled driver."""

    released: Any
    """Its functions, during which other threads run Python."""
    held: Any
    """Its functions, during which they do not."""


@functools.cache
def driver() -> Driver:
    """Return the driver, compiled at the first call."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "driver.so")
        command = [*shlex.split(os.environ.get("CC", "cc")), *_FLAGS.split()]
        subprocess.run([*command, str(_SOURCE), "-o", path], check=True)
        found = Driver(ctypes.CDLL(path), ctypes.PyDLL(path))
    for library in found:
        library.sim_stream.restype = ctypes.c_void_p
        for name, n in _N_ARGUMENTS.items():
            function = library[f"sim_{name}"]
            # A number of bytes is passed as an address is.
            function.argtypes = [ctypes.c_void_p] * n
            setattr(library, name, function)
    return found


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda_event: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        if self.cuda_event is None:
            # torch creates an event when it is recorded.
            handle = ctypes.c_void_p()
            driver().held.create(ctypes.addressof(handle), 0)
            self.cuda_event = handle.value
        driver().released.record(self.cuda_event, (stream or current_stream()).cuda_stream)

    def synchronize(self) -> None:
        driver().released.sync(self.cuda_event)

    def query(self) -> bool:
        return driver().held.query(self.cuda_event) == 0

    def __del__(self) -> None:
        if self.cuda_event is not None:
            driver().released.destroy(self.cuda_event)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream: int = driver().held.sim_stream() if handle is None else handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_event(self, event: Event) -> None:
        driver().released.wait(self.cuda_stream, event.cuda_event, 0)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


_DEFAULT = Stream(handle=0)
_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", _DEFAULT)


def current_raw_stream(index: int) -> int:
    return current_stream().cuda_stream


class StreamContext:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        _current.stream = self._stream

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before


_host_copy = torch.Tensor.copy_


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between the host and the GPU if ``non_blocking``, or else on the host."""
    if not non_blocking:
        return _host_copy(target, source)
    addresses = target.data_ptr(), source.data_ptr()
    driver().released.copy(*addresses, target.nbytes, current_stream().cuda_stream)
    return target


class Module:
    """Kernels that were compiled already; see ``pinfeed.devices.kernels.CudaModule``."""

    def __init__(self, *_: Any) -> None: ...

    def handle(self, name: str) -> int:
        """Return the handle of a kernel."""
        words = name.split("_")
        kind = 1 + ("gather", "scatter", "copy").index(words[0])
        return kind + {"int64": 4, "pair": 8}.get(words[-1], 0)


def choose_route(device: Any, stores: Any, wanted: str | None, default: str) -> str:
    """Take the route that was asked for, although no memory is page-locked."""
    device.is_direct = wanted == "direct"
    return ""


def driver_table(index: int) -> DriverTable:
    """Return the calls of the driver."""
    return DriverTable.in_dll(driver().held, "sim_driver")


_CUDA = {
    "Event": Event,
    "Stream": Stream,
    "stream": StreamContext,
    "current_stream": current_stream,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": contextlib.nullcontext,
    "get_device_name": lambda device=None: "simulated GPU",
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
    "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
}


@contextlib.contextmanager
def simulated_gpu(*, moves: bool) -> Iterator[cuda.CudaDevice]:
    """Put the driver in the place of torch.cuda, and give pinfeed's device on it.

    Args:
        moves: Whether copies move bytes.
    """
    driver().held.sim_move(moves)
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.multiple(torch.cuda, **_CUDA),
            mock.patch.multiple(torch.Tensor, copy_=copy_, record_stream=lambda *_: None),
            mock.patch.multiple(
                torch._C, create=True, _cuda_getCurrentRawStream=current_raw_stream
            ),
            mock.patch.object(cuda, "staging_memory", lambda _, nbytes: huge(max(1, nbytes))),
            mock.patch.object(cuda_driver, "driver_table", driver_table),
            mock.patch.object(kernels, "CudaModule", Module),
            mock.patch.object(row_copies, "CudaModule", Module),
            mock.patch.object(cuda.CudaDevice, "choose_route", choose_route),
        ):
            stack.enter_context(patch)
        for cached in (cuda_driver.cuda_driver, row_copies.row_copy_kernel):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        device = stack.enter_context(contextlib.closing(cuda.CudaDevice(0)))
        # The device creates its tensors on this device, and recognizes them by it.
        device._device = torch.device("cpu")
        yield device
        # Objects that hold events may be in reference cycles.
        gc.collect()
