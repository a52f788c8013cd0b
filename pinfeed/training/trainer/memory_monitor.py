"""MemoryMonitor: labelled snapshots of the memory of the device and of the process."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from pinfeed.devices import torch_device
from pinfeed.devices.cuda import check_gpu
from pinfeed.errors import DeviceError
from pinfeed.memory.units import human
from pinfeed.profiling.stats import ProcessMemory
from pinfeed.training.trainer import table_file


@dataclass(frozen=True)
class Snapshot:
    """Memory at one moment, in bytes.

    The device's is None where there is no GPU, the process's where the system does not tell it.

    Attributes:
        label: As it was given.
        allocated: Of the device: what torch's tensors take.
        reserved: What torch's allocator holds, ``allocated`` included.
        split: Of that, free parts of blocks of which other parts are taken: they cannot be given
            back to the device.
        free: What any process may still take.
        total: Of the device.
        anonymous: Of the process: resident memory that is neither mapped from a file, nor shared,
            nor page-locked by pinfeed.
        file: Mapped from files.
        shared: Shared memory: batches of a DataLoader's worker processes, and what CUDA allocates
            page-locked.
        pinned: Page-locked by pinfeed.
        peak: The most that resident memory has been since the process began.
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
    """Takes snapshots; ``str(monitor)`` is a table of them.

    A snapshot does not wait for the device: what torch has allocated is known on the host. ``free``
    is what it is at that moment, while other processes and kernels that are under way may take
    memory.

    Args:
        device: A CUDA device; None for the current one, or none where there is no GPU.

    Raises:
        DeviceError: ``device`` is neither the CPU nor a GPU that exists.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        there = torch.cuda.is_available()
        found = None if device is None else torch_device(device, "'cpu', 'cuda', 'cuda:N' or None")
        if found is not None and found.type == "cuda" and not there:
            raise DeviceError(
                f"device={device!r} was asked for, and there is no GPU here; take None"
            )
        if found is not None and found.type == "cuda":
            check_gpu(found.index)
        self._on_gpu = there and (found is None or found.type == "cuda")
        self._device = found
        self.snapshots: list[Snapshot] = []

    def snapshot(self, label: str = "") -> Snapshot:
        """Take one."""
        found = Snapshot(str(label), *self._of_device(), **vars(ProcessMemory.now()))
        self.snapshots.append(found)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshots as a table (.csv) or as a list of objects (.json).

        Raises:
            ArgumentError: The path ends in something else.
        """
        table_file.write(path, [dataclasses.asdict(one) for one in self.snapshots])

    def __str__(self) -> str:
        names = [one.name for one in dataclasses.fields(Snapshot)]
        rows = [[_cell(value) for value in dataclasses.astuple(one)] for one in self.snapshots]
        return tabulate(
            rows,
            headers=names,
            colalign=("left", *["right"] * (len(names) - 1)) if rows else None,
            disable_numparse=True,
        )

    def _of_device(self) -> tuple[int | None, int | None, int | None, int | None, int | None]:
        if not self._on_gpu:
            return None, None, None, None, None
        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        # torch has none before it allocates.
        allocated, reserved, split = (int(stats.get(f"{kind}.all.current", 0)) for kind in kinds)
        return allocated, reserved, split, free, total


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return human(value) if isinstance(value, int) else str(value)
