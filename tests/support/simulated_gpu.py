"""SimulatedGPU: the functions of torch.cuda's allocator, on the CPU, with caps and workspaces."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROUND = 512
GPU = torch.device("cuda", 0)


class SimulatedGPU:
    """A GPU that counts memory, while its tensors are on the CPU.

    In its context, all new tensors are on the GPU. The allocator reuses a freed block only for a
    tensor of the same size. When it reaches its cap or the end of the device, it returns its unused
    blocks to the device, which counts as a retry, and then raises torch's error. The simulation is
    exact and repeatable.

    Args:
        monkeypatch: Replaces the functions of ``torch.cuda`` until the end of the test.
        total: Bytes of the device.
        context: Bytes of this process outside the allocator.
        workspace: Bytes that the first matrix product allocates and keeps.
        libraries: Bytes outside the allocator that the first matrix product takes.

    Attributes:
        outside: Bytes outside the allocator, also those of other processes.
        allocated: Bytes of tensors.
        retries: Number of times at which the allocator returned unused blocks.
        caps: Caps that were set, in order, in bytes.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        total: int,
        context: int = 0,
        workspace: int = 0,
        libraries: int = 0,
    ) -> None:
        self.total = total
        self.outside = context
        self.allocated = 0
        self.retries = 0
        self.caps: list[int] = []
        self._first_product = workspace, libraries
        self._peak = 0
        self._unused: Counter[int] = Counter()
        """Number of unused blocks of each size."""
        self._sizes: dict[int, int] = {}
        """Size of the block of each living storage, by its address."""
        self._modes = contextlib.ExitStack()
        for name, function in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda device: None,
            "mem_get_info": lambda device: (total - self.outside - self.reserved, total),
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self._peak,
            "memory_reserved": lambda device: self.reserved,
            "memory_stats": lambda device: {"num_alloc_retries": self.retries},
            "reset_peak_memory_stats": lambda device: setattr(self, "_peak", self.allocated),
            "empty_cache": self._unused.clear,
            "get_per_process_memory_fraction": lambda device: self.cap / total,
            "set_per_process_memory_fraction": self._set_fraction,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @property
    def reserved(self) -> int:
        """Bytes that the allocator has taken from the device."""
        return self.allocated + sum(size * n for size, n in self._unused.items())

    @property
    def cap(self) -> int:
        """Most bytes that the allocator may take."""
        return self.caps[-1] if self.caps else self.total

    def __enter__(self) -> SimulatedGPU:
        self._modes.enter_context(_OnCPU(self._sizes))
        self._modes.enter_context(_Allocations(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    def multiply(self) -> None:
        """Take the memory of the first matrix product."""
        workspace, libraries = self._first_product
        self._first_product = workspace, 0
        self.outside += libraries
        if workspace:
            self.malloc(-1, workspace)
        self._first_product = 0, 0

    def hold(self, storage: Any) -> None:
        """Allocate a block for a storage, until the storage dies."""
        key = storage._cdata
        if key not in self._sizes and storage.nbytes():
            self.malloc(key, storage.nbytes())
            weakref.finalize(storage, self._free, key).atexit = False

    def malloc(self, key: int, nbytes: int) -> None:
        """Allocate a block."""
        size = -(-nbytes // _ROUND) * _ROUND
        if self._unused[size]:
            self._unused[size] -= 1
        else:
            most = min(self.cap, self.total - self.outside)
            if self.reserved + size > most:
                self.retries += 1
                self._unused.clear()
            if self.reserved + size > most:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._sizes[key] = size
        self.allocated += size
        self._peak = max(self._peak, self.allocated)

    def _free(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.allocated -= size
        self._unused[size] += 1

    def _set_fraction(self, fraction: float, device: Any) -> None:
        assert 0 <= fraction <= 1
        self.caps.append(round(fraction * self.total))


class _OnCPU(TorchFunctionMode):
    """Puts tensors of the GPU on the CPU, where they say that they are on the GPU."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            is_on_gpu = args[0].untyped_storage()._cdata in self._sizes
            return GPU if is_on_gpu else torch.device("cpu")
        kwargs = kwargs or {}
        if func is not torch.device:
            # torch takes no structures of devices.
            args = [_as_cpu(value) for value in args]
            kwargs = {name: _as_cpu(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class _Allocations(TorchDispatchMode):
    """Allocates a block of the GPU for each new storage."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("mm", "addmm"):
            self._gpu.multiply()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._gpu.hold(leaf.untyped_storage())
        return out


def _as_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_gpu else value


def cupy_with_pool(nbytes: int) -> types.SimpleNamespace:
    """Return a module like CuPy whose memory pool has taken some bytes."""
    pool = types.SimpleNamespace(total_bytes=lambda: nbytes)
    device = contextlib.nullcontext
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=device), get_default_memory_pool=lambda: pool
    )
