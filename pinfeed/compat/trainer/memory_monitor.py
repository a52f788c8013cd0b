"""MemoryMonitor: labelled snapshots of the memory of the device and of the process."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from pinfeed.compat.trainer.history import write_table
from pinfeed.devices import torch_device
from pinfeed.devices.cuda import check_gpu
from pinfeed.errors import DeviceError
from pinfeed.memory.units import human
from pinfeed.profiling.stats import ProcessMemory


@dataclass(frozen=True)
class Snapshot:
    """Memory of the device and of the process at one moment, in bytes.

    The numbers of the device are None without a GPU. The numbers of the process are None if the
    system does not report them.

    Examples:
        >>> from pinfeed.compat.trainer import MemoryMonitor
        >>> snapshot = MemoryMonitor().snapshot("after loading")
        >>> snapshot.label, snapshot.peak > 0
        ('after loading', True)

    Attributes:
        label: Label that the caller gave.
        allocated: Device memory of torch's tensors.
        reserved: Device memory that torch's allocator holds, ``allocated`` included.
        split: Free parts of reserved blocks that are partly in use. The allocator cannot return
            them to the device.
        free: Device memory that any process may still take.
        total: All memory of the device.
        anonymous: Resident memory of the process that is neither mapped from a file, nor shared,
            nor pinned by pinfeed.
        file: Resident memory that is mapped from files.
        shared: Shared memory: batches of a DataLoader's worker processes, and pinned memory that
            CUDA allocates.
        pinned: Memory that pinfeed has page-locked (pinned).
        peak: Largest resident memory since the process began.
    """

    label: str
    allocated: int | None
    reserved: int | None
    split: int | None
    free: int | None
    total: int | None
    anonymous: int | None
    file: int | None
    shared: int | None
    pinned: int
    peak: int | None


class MemoryMonitor:
    """Labelled snapshots of memory; ``str(monitor)`` is a table of all snapshots.

    Examples:
        >>> from pinfeed.compat.trainer import MemoryMonitor
        >>> monitor = MemoryMonitor()
        >>> tensor = torch.zeros(1000, 1000)
        >>> snapshot = monitor.snapshot("after loading")
        >>> print(monitor)
        label ...

    A snapshot does not wait for the device, because torch counts its allocations on the host.
    ``free`` may change at any moment, because other processes and running kernels take memory.

    Args:
        device: A CUDA device, or the CPU to measure the process only. None is the current CUDA
            device, or the CPU if there is no GPU.

    Attributes:
        snapshots: All snapshots, in the order in which they were taken.

    Raises:
        DeviceError: If ``device`` is neither the CPU nor a GPU that exists.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        has_gpu = torch.cuda.is_available()
        found = None if device is None else torch_device(device, "'cpu', 'cuda', 'cuda:N' or None")
        if found is not None and found.type == "cuda":
            if not has_gpu:
                raise DeviceError(
                    f"device={device!r}: this machine has no GPU; give device=None or 'cpu'"
                )
            check_gpu(found.index)
        self._on_gpu = has_gpu and (found is None or found.type == "cuda")
        self._device = found
        self.snapshots: list[Snapshot] = []

    def snapshot(self, label: str = "") -> Snapshot:
        """Take a snapshot and return it."""
        found = Snapshot(str(label), *self._device_memory(), **vars(ProcessMemory.now()))
        self.snapshots.append(found)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshots as a table (.csv) or as a list of objects (.json).

        Raises:
            ArgumentError: If the path has another ending.
        """
        write_table(path, [dataclasses.asdict(one) for one in self.snapshots])

    def __str__(self) -> str:
        names = [one.name for one in dataclasses.fields(Snapshot)]
        rows = [[_cell(value) for value in dataclasses.astuple(one)] for one in self.snapshots]
        return tabulate(
            rows,
            headers=names,
            colalign=("left", *["right"] * (len(names) - 1)) if rows else None,
            disable_numparse=True,
        )

    def _device_memory(self) -> tuple[int | None, int | None, int | None, int | None, int | None]:
        if not self._on_gpu:
            return None, None, None, None, None
        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        # Before its first allocation, torch has no statistics.
        allocated, reserved, split = (int(stats.get(f"{kind}.all.current", 0)) for kind in kinds)
        return allocated, reserved, split, free, total


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return human(value) if isinstance(value, int) else str(value)
