"""The tools of infinitybatch: snapshots of memory, seeds, comparisons."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from pinfeed.compat.infinitybatch.history import write_table
from pinfeed.memory.host import ProcessMemory

__all__ = [
    "CudaHistory",
    "CudaMemorySnapShot",
    "CudaMemorySnapshot",
    "compare_with_error_",
    "determinize",
    "is_equal_network",
    "is_equal_with_error",
]

ERROR_TOLERANCE = 1e-7

_LABEL_LENGTH = 20


class CudaMemorySnapShot:
    """Memory of a CUDA device and of this process at one moment, in bytes.

    The numbers of the device are zeros without a GPU. ``free`` may change at any moment, because
    other processes and running kernels take memory.

    Examples:
        >>> from pinfeed.compat.infinitybatch import tools
        >>> snapshot = tools.CudaMemorySnapShot()
        >>> snapshot.allocated <= snapshot.reserved <= snapshot.total
        True

    Args:
        device_id: Device to measure; None for the current device.
        synchronize: Whether to wait for the device first.
    """

    def __init__(
        self, device_id: torch.device | str | int | None = None, synchronize: bool = True
    ) -> None:
        has_gpu = torch.cuda.is_available()
        if has_gpu and synchronize:
            torch.cuda.synchronize(device_id)
        free, total = torch.cuda.mem_get_info(device_id) if has_gpu else (0, 0)
        # Before its first allocation, and without a GPU, torch has no statistics.
        stats: dict[str, int] = torch.cuda.memory_stats(device_id) if has_gpu else {}
        self.device = device_id
        """The device as it was given."""
        self.total = total
        """Bytes of the device's memory."""
        self.free = free
        """Bytes of the device's memory that any process may still take."""
        self.reserved = stats.get("reserved_bytes.all.current", 0)
        """Bytes that torch's allocator has reserved."""
        self.allocated = stats.get("allocated_bytes.all.current", 0)
        """Bytes of torch's tensors."""
        self.inactive = stats.get("inactive_split_bytes.all.current", 0)
        """Bytes of the free parts of reserved blocks that are partly in use. The allocator cannot
        return them to the device."""
        self.process = ProcessMemory.now()
        """Resident memory of the process, with its parts ``anonymous``, ``file``, ``shared``,
        ``pinned`` and ``peak``; a part that the system does not report is None."""

    @property
    def free_cache(self) -> int:
        """Bytes that torch's allocator has reserved and no tensor uses."""
        return self.reserved - self.allocated

    def as_dict(self) -> dict[str, int | None]:
        """Return all numbers by name."""
        names = ("total", "free", "reserved", "allocated", "free_cache", "inactive")
        return {name: getattr(self, name) for name in names} | vars(self.process)


CudaMemorySnapshot = CudaMemorySnapShot


class CudaHistory(list[tuple[str, CudaMemorySnapShot]]):
    """List of labelled snapshots; ``str(history)`` is a table.

    Examples:
        >>> from pinfeed.compat.infinitybatch import tools
        >>> history = tools.CudaHistory()
        >>> history.append("after loading")
        >>> print(history)
        CudaHistory:...
    """

    def __init__(self) -> None:
        super().__init__()

    def append(  # type: ignore[override]  # its documented arguments
        self, name: str, device_id: torch.device | str | int | None = None, synchronize: bool = True
    ) -> None:
        """Take a snapshot. The first 20 characters of its label are kept."""
        super().append((name[:_LABEL_LENGTH], CudaMemorySnapShot(device_id, synchronize)))

    def __deepcopy__(self, memo: Any) -> CudaHistory:
        made = type(self)()
        # ``append`` of this class would take a new snapshot.
        list.extend(made, (copy.deepcopy(one, memo) for one in self))
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshots as a table (.csv) or as a list of objects (.json).

        Raises:
            ArgumentError: If the path has another ending.
        """
        write_table(path, self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [{"name": name} | one.as_dict() for name, one in self]

    def __str__(self) -> str:
        if not self:
            return "CudaHistory is empty."
        rows = self._rows()
        headers = {name: name.capitalize() for name in rows[0]}
        options: Any = {"disable_numparse": True, "colalign": ["left"], "stralign": "right"}
        return "CudaHistory:\n" + tabulate(rows, headers, "github", missingval="-", **options)


def determinize(seed: int | None = None, be_deterministic: bool = True) -> None:
    """Seed the generators of Python, numpy and torch, and make cuDNN deterministic or fast.

    Args:
        seed: Seed of all generators. None stands for 0, or with ``be_deterministic=False`` for a
            seed that differs each time.
        be_deterministic: Whether cuDNN uses deterministic algorithms; False for the fastest ones.
    """
    torch.backends.cudnn.deterministic = be_deterministic
    torch.backends.cudnn.benchmark = not be_deterministic
    if seed is None and be_deterministic:
        seed = 0
    if seed is None:
        # This seeds every GPU, too.
        torch.seed()
    else:
        torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the global generator is meant
    random.seed(seed)


def is_equal_network(one: nn.Module, another: nn.Module) -> bool:
    """Return whether all parameters and buffers are equal, on any devices."""
    first, second = one.state_dict(), another.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(value.cpu(), second[name].cpu()) for name, value in first.items()
    )


def is_equal_with_error(one: torch.Tensor, another: torch.Tensor, detach: bool = True) -> bool:
    """Return whether two tensors have the same shape, and values within the tolerance.

    ``detach`` has no effect.
    """
    if one.shape != another.shape:
        return False
    first, second = (value.detach().cpu().double() for value in (one, another))
    return torch.allclose(first, second, rtol=0, atol=ERROR_TOLERANCE)


def compare_with_error_(one: Any, another: Any) -> bool:
    """Return whether two numbers differ by at most the tolerance."""
    return bool(one == another or abs(one - another) <= ERROR_TOLERANCE)
