"""Page-locked host memory that CUDA copies from and to without blocking the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch

from pinfeed.errors import DeviceError
from pinfeed.memory.page_locked import REGISTER, page_locked
from pinfeed.memory.pages import Bytes


def staging_memory(device: torch.device, nbytes: int) -> Bytes:
    """Return page-locked host memory, shape (nbytes,), for copies from and to one GPU.

    Raises:
        DeviceError: If the system or the driver refuses to lock the memory.
    """
    # The unlock function must not keep the CudaDevice alive, because its pool keeps the memory.
    lock = functools.partial(_call_runtime, device, "cudaHostRegister")
    try:
        return page_locked(
            nbytes,
            lambda address, size: lock(address, size, REGISTER),
            functools.partial(unlock_on, device),
        )
    except DeviceError as error:
        raise DeviceError(f"{error}; use a smaller batch or depth, or raise `ulimit -l`") from error


def unlock_on(device: torch.device, address: int) -> None:
    """Unlock page-locked memory.

    Raises:
        RuntimeError: If the driver refuses. The next call of the runtime does not report it again.
    """
    _call_runtime(device, "cudaHostUnregister", address)


def _call_runtime(device: torch.device, name: str, *args: int) -> None:
    # Without the guard, a thread that has not used this GPU would create a context on another one.
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = getattr(runtime, name)(*args)
    if code != runtime.cudaError.success:
        _forget_error()
        raise RuntimeError(f"{name} failed with CUDA error {int(code)}")


def _forget_error() -> None:
    """Clear the code of a failed call.

    The runtime keeps the code, and the next kernel launch of any library would report it. torch
    cannot clear it.
    """
    # Some builds have the runtime under another name.
    with contextlib.suppress(OSError):
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError()
