"""Devices that batches are copied to: the CPU and CUDA GPUs.

``resolve`` finds a device by name, and only then loads its framework.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pinfeed.devices.device import Device, Event, Stream
from pinfeed.errors import DeviceError

if TYPE_CHECKING:
    import torch

    DeviceLike: TypeAlias = str | torch.device | Device
    """The argument ``device``: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a ``torch.device``,
    or a simulated device.
    """
else:
    # Programs may read signatures, and need not load torch for it.
    DeviceLike = Any

__all__ = [
    "Device",
    "DeviceLike",
    "Event",
    "Stream",
    "chosen_device",
    "is_cpu",
    "resolve",
    "torch_device",
]


def resolve(device: DeviceLike, *, n_spare: int) -> Device:
    """Return the device of a name.

    Args:
        device: ``"auto"`` for a CUDA GPU if the machine has one (``cuda_index`` selects it), and
            the CPU otherwise; ``"cpu"``, ``"cuda"``, ``"cuda:1"``; a ``torch.device``; or a Device,
            which is returned unchanged and which the caller closes.
        n_spare: Free blocks of host memory that a new device keeps for reuse.

    Raises:
        DeviceError: If the device does not exist.
    """
    if hasattr(device, "current_stream"):
        return cast(Device, device)
    from pinfeed.devices.cpu import HostDevice
    from pinfeed.devices.cuda import CudaDevice

    wanted = chosen_device(device)
    if wanted.type == "cpu":
        return HostDevice(n_spare=n_spare)
    return CudaDevice(wanted.index, n_spare=n_spare)


def chosen_device(device: Any) -> torch.device:
    """Return torch's device of a name; ``"auto"`` as in ``resolve``.

    Raises:
        DeviceError: If it is neither the CPU nor a CUDA device.
    """
    import torch

    if device == "auto" and torch.cuda.is_available():
        local_rank = os.environ.get("LOCAL_RANK")
        index = cuda_index(local_rank, torch.cuda.device_count(), torch.cuda.current_device())
        return torch.device("cuda", index)
    return torch_device("cpu" if device == "auto" else device)


def is_cpu(device: Any) -> bool:
    """Return whether ``resolve`` delivers batches of a device in host memory.

    Raises:
        DeviceError: If ``device`` is no device.
    """
    if hasattr(device, "current_stream"):
        return bool(device.unified)
    if device == "auto":
        import torch

        return not torch.cuda.is_available()
    return torch_device(device).type == "cpu"


def torch_device(device: Any) -> torch.device:
    """Return the ``torch.device`` of a name that is not "auto": the CPU or a CUDA GPU.

    Raises:
        DeviceError: If ``device`` is no device, or pinfeed does not support it.
    """
    import torch

    expected = "'auto', 'cpu', 'cuda' or 'cuda:N'"
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device={device!r} is not a device; expected {expected}") from error
    if wanted.type not in ("cpu", "cuda"):
        raise DeviceError(f"device={str(wanted)!r} is not supported; expected {expected}")
    return wanted


def cuda_index(local_rank: str | None, n_devices: int, current: int) -> int:
    """Return the number of the GPU that a process uses by default.

    A process that a launcher started with others uses the GPU of its local rank.

    Args:
        local_rank: Number of the process on this machine, as torchrun sets it in the environment;
            None for a single process.
        n_devices: GPUs that this process sees; 1 if the launcher has assigned one to each process.
        current: torch's current GPU. If it is not the first, the user has chosen it with
            ``torch.cuda.set_device``, and it is kept.
    """
    rank = int(local_rank) if local_rank and local_rank.isdecimal() else 0
    return rank if current == 0 and rank < n_devices else current
