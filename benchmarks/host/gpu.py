"""A GPU without hardware: torch.cuda, and pinfeed's CUDA device, on the driver of driver.c.

Tensors of the GPU are in host memory. As in torch's bindings, other threads run Python during a
record, a wait, a synchronization, the end of an event and a copy, but not during a query. The
Python code around these calls is shorter than that of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pinfeed.devices import cuda
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.memory.pages import huge

_SOURCE = Path(__file__).with_name("driver.c")
_FLAGS = "-std=gnu11 -O2 -Wall -Wextra -fPIC -shared -pthread"
_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "create": [_POINTER],
    "destroy": [_POINTER],
    "record": [_POINTER, _POINTER],
    "wait": [_POINTER, _POINTER],
    "query": [_POINTER],
    "sync": [_POINTER],
    "copy": [_POINTER, _POINTER, ctypes.c_size_t, _POINTER],
    "launch": [],
    "stream": [],
    "move": [ctypes.c_int],
}
_DRIVER_TABLE = "driver_table"
"""Function of pinfeed that returns the address of a GPU's ``struct pf_driver``."""


class Driver:
    """The compiled driver.

    Attributes:
        released: Calls during which other threads run Python.
        held: Calls during which they do not.
        table: Address of its ``struct pf_driver``.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "driver.so")
            compiler = shlex.split(os.environ.get("CC", "cc"))
            subprocess.run([*compiler, *_FLAGS.split(), str(_SOURCE), "-o", path], check=True)
            released, held = ctypes.CDLL(path), ctypes.PyDLL(path)
        self.released = _functions(released)
        self.held = _functions(held)
        self.table = ctypes.addressof(ctypes.c_char.in_dll(released, "sim_driver"))


def _functions(library: ctypes.CDLL) -> SimpleNamespace:
    found = SimpleNamespace()
    for name, arguments in _ARGUMENTS.items():
        function = library[f"sim_{name}"]
        function.argtypes = arguments
        function.restype = _POINTER if name == "stream" else ctypes.c_int
        setattr(found, name, function)
    return found


@functools.cache
def driver() -> Driver:
    """Return the driver, compiled at the first use."""
    return Driver()


# ---- torch.cuda ----------------------------------------------------------------------------------


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda_event = 0

    def record(self, stream: Stream | None = None) -> None:
        if not self.cuda_event:
            # torch creates an event when it is recorded.
            handle = _POINTER()
            driver().held.create(ctypes.byref(handle))
            self.cuda_event = handle.value or 0
        driver().released.record(self.cuda_event, (stream or current_stream()).cuda_stream)

    def synchronize(self) -> None:
        driver().released.sync(self.cuda_event)

    def query(self) -> bool:
        return not driver().held.query(self.cuda_event)

    def __del__(self) -> None:
        if self.cuda_event:
            driver().released.destroy(self.cuda_event)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.cuda_stream: int = driver().held.stream()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_event(self, event: Event) -> None:
        driver().released.wait(self.cuda_stream, event.cuda_event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class _DefaultStream(Stream):
    def __init__(self) -> None:
        self.device = None
        self.cuda_stream = 0


class StreamContext:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        _current.stream = self._stream

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before


_current = threading.local()
_default = _DefaultStream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", _default)


_copy_on_host = torch.Tensor.copy_


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between the host and the GPU if ``non_blocking``, or else on the host."""
    if not non_blocking:
        return _copy_on_host(target, source)
    addresses = target.data_ptr(), source.data_ptr()
    driver().released.copy(*addresses, target.nbytes, current_stream().cuda_stream)
    return target


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
    "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
}
_TENSOR = {"copy_": _copy, "record_stream": lambda tensor, stream: None}


# ---- pinfeed's device ----------------------------------------------------------------------------


class SimulatedGpu(cuda.CudaDevice):
    """pinfeed's CUDA device, with tensors in host memory."""

    def __init__(self) -> None:
        super().__init__(0)
        # The device creates its tensors on this device, and recognizes them by it.
        self._device = torch.device("cpu")

    def copy_rows(self, copies: Any, stream: Any) -> None:
        driver().released.launch()
        super().copy_rows(copies, stream)


@contextlib.contextmanager
def simulated_gpu(*, moves: bool) -> Iterator[SimulatedGpu]:
    """Put the driver in the place of torch.cuda, and give pinfeed's device of its GPU.

    Args:
        moves: Whether copies move bytes.
    """
    driver().held.move(moves)
    patches = [
        mock.patch.multiple(torch.cuda, **_CUDA),
        mock.patch.multiple(torch.Tensor, **_TENSOR),
        mock.patch.object(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: current_stream().cuda_stream,
            create=True,
        ),
        mock.patch.object(cuda, "staging_memory", lambda device, nbytes: huge(max(1, nbytes))),
        *_table_patches(),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        with contextlib.closing(SimulatedGpu()) as device:
            yield device
        # Events end in this driver.
        gc.collect()
        unlock_freed()


def _table_patches() -> list[Any]:
    """Return patches that give pinfeed the address of the driver's table, where it asks for it."""
    if importlib.util.find_spec("pinfeed.native.driver") is not None:
        importlib.import_module("pinfeed.native.driver")
    modules = [module for name, module in sys.modules.items() if name.startswith("pinfeed.")]
    return [
        mock.patch.object(module, _DRIVER_TABLE, lambda index: driver().table)
        for module in modules
        if hasattr(module, _DRIVER_TABLE)
    ]
