"""Where batches go. ``resolve`` finds a device by name; frameworks are loaded only when it does."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from pinfeed.devices.base import Device, Event, Stream
from pinfeed.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from pinfeed.devices.cpu import HostDevice
    from pinfeed.devices.cuda import CudaDevice

__all__ = ["CudaDevice", "Device", "Event", "HostDevice", "Stream", "resolve", "torch_device"]


def __getattr__(name: str) -> Any:
    """``HostDevice`` and ``CudaDevice``, which load torch."""
    modules = {"CudaDevice": "pinfeed.devices.cuda", "HostDevice": "pinfeed.devices.cpu"}
    if name in modules:
        return getattr(importlib.import_module(modules[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def resolve(device: Any, *, n_spare: int) -> Device:
    """The device of that name.

    Args:
        device: ``"auto"`` for CUDA where there is one (``cuda_index`` tells which) and else the
            CPU; ``"cpu"``, ``"cuda"``, ``"cuda:1"``; a ``torch.device``; or a Device, which is
            given back as it is and stays its owner's.
        n_spare: Free blocks of host memory that a device made here keeps for reuse.

    Raises:
        DeviceError: There is no such device.
    """
    if hasattr(device, "current_stream"):
        found: Device = device
        return found
    import torch

    from pinfeed.devices.cpu import HostDevice
    from pinfeed.devices.cuda import CudaDevice

    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{cuda_index(os.environ.get('LOCAL_RANK'), torch.cuda.device_count(), torch.cuda.current_device())}"
    wanted = torch_device(device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
    return (
        HostDevice(n_spare=n_spare)
        if wanted.type == "cpu"
        else CudaDevice(wanted.index, n_spare=n_spare)
    )


def torch_device(
    device: Any, expected: str = "'cpu', 'cuda' or 'cuda:N'", *, exists: bool = False
) -> torch.device:
    """The ``torch.device`` of that name, which is the CPU or a CUDA device.

    Args:
        device: As ``torch.device`` takes it.
        expected: The names that the caller accepts, for the error.
        exists: Require that this machine has it.

    Raises:
        DeviceError: There is no such device, or pinfeed does not support it.
    """
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device={device!r} is not a device; expected {expected}") from error
    if wanted.type not in ("cpu", "cuda"):
        raise DeviceError(f"device={str(wanted)!r} is not supported; expected {expected}")
    if exists and wanted.type == "cuda":
        from pinfeed.devices.cuda import check_gpu

        check_gpu(wanted.index)
    return wanted


def cuda_index(local_rank: str | None, n_devices: int, current: int) -> int:
    """The GPU of a process that was started with others: each takes the one with its number on this machine.

    Args:
        local_rank: That number, as torchrun's environment has it; None of a process on its own.
        n_devices: GPUs that this process sees; one, where the launcher has dealt them out already.
        current: torch's current one. One that is not the first was chosen, with
            ``torch.cuda.set_device``, and is kept.
    """
    mine = int(local_rank) if local_rank and local_rank.isdecimal() else 0
    return mine if current == 0 and mine < n_devices else current
