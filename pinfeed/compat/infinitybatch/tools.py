"""The tools of infinitybatch: snapshots of memory, seeds, comparisons."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from pinfeed.training.trainer.memory_monitor import MemoryMonitor

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

_LABEL = 20  # characters


class CudaMemorySnapShot:
    """Memory of a CUDA device at one moment, in bytes; zeros where there is none.

    Args:
        device_id: None for the current device.
        synchronize: Wait for the device first.
    """

    def __init__(
        self, device_id: torch.device | str | int | None = None, synchronize: bool = True
    ) -> None:
        there = torch.cuda.is_available()
        if there and synchronize:
            torch.cuda.synchronize(device_id)
        self._device = device_id
        self._found = MemoryMonitor(device_id if there else None).snapshot()

    @property
    def device(self) -> torch.device | str | int | None:
        """As it was given."""
        return self._device

    @property
    def total(self) -> int:
        """Of the device."""
        return self._found.total or 0

    @property
    def reserved(self) -> int:
        """What torch's allocator holds."""
        return self._found.reserved or 0

    @property
    def allocated(self) -> int:
        """What torch's tensors take."""
        return self._found.allocated or 0

    @property
    def free_cache(self) -> int:
        """What torch's allocator holds and no tensor takes."""
        return self.reserved - self.allocated


CudaMemorySnapshot = CudaMemorySnapShot


class CudaHistory(list[tuple[str, CudaMemorySnapShot]]):
    """Snapshots with their labels; printed, a table."""

    def __init__(self) -> None:
        super().__init__()

    def append(  # type: ignore[override]  # its documented arguments
        self, name: str, device_id: torch.device | str | int | None = None, synchronize: bool = True
    ) -> None:
        """Take a snapshot; of its label the first 20 characters are kept."""
        super().append((name[:_LABEL], CudaMemorySnapShot(device_id, synchronize)))

    def __deepcopy__(self, memo: Any) -> CudaHistory:
        made = type(self)()
        # Append takes a snapshot.
        list.extend(made, (copy.deepcopy(one, memo) for one in self))
        return made

    def __str__(self) -> str:
        if not self:
            return "CudaHistory is empty."
        rows = [(name, one.total, one.reserved, one.allocated) for name, one in self]
        headers = ("Name", "Total", "Reserved", "Allocated")
        return "CudaHistory:\n" + tabulate(
            rows,
            headers,
            tablefmt="github",
            colalign=("left", "right", "right", "right"),
            disable_numparse=True,
        )


def determinize(seed: int | None = None, be_deterministic: bool = True) -> None:
    """Seed the generators of Python, numpy and torch, and have cuDNN be deterministic or fast.

    Args:
        seed: None for 0, or, with ``be_deterministic=False``, for one that differs each time.
        be_deterministic: Of cuDNN: the same algorithms each time, or the fastest.
    """
    torch.backends.cudnn.deterministic = be_deterministic
    torch.backends.cudnn.benchmark = not be_deterministic
    if seed is None and be_deterministic:
        seed = 0
    if seed is None:
        # Of every GPU, too.
        torch.seed()
    else:
        torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # it is the global one that is meant
    random.seed(seed)


def is_equal_network(one: nn.Module, another: nn.Module) -> bool:
    """Whether all parameters and buffers are equal, on whatever devices."""
    first, second = one.state_dict(), another.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(value.cpu(), second[name].cpu()) for name, value in first.items()
    )


def is_equal_with_error(one: torch.Tensor, another: torch.Tensor, detach: bool = True) -> bool:
    """Whether two tensors have the same shape, and values within the tolerance; ``detach`` makes no difference any more."""
    if one.shape != another.shape:
        return False
    first, second = (value.detach().cpu().double() for value in (one, another))
    return bool(((first == second) | ((first - second).abs() <= ERROR_TOLERANCE)).all())


def compare_with_error_(one: Any, another: Any) -> bool:
    """Whether two numbers are within the tolerance of each other."""
    return bool(one == another or abs(one - another) <= ERROR_TOLERANCE)
