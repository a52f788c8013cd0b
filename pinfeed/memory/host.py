"""What is free on the host: the least of what the machine, its control groups and the process's own limits leave."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_STATUS = "/proc/self/status"
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Of a control group of each version: its limit, its usage, and what memory.stat calls page cache that can be dropped."""


class Limit(NamedTuple):
    """Something that bounds the host memory of this process, in bytes."""

    name: str
    """``machine``, ``control group /its/path``, ``RLIMIT_AS`` or ``RLIMIT_DATA``."""
    total: int
    free: int
    """What this process may still allocate, by this limit. The page cache counts as free."""


def free_host_bytes(*, proc: Path = PROC, root: Path = ROOT) -> int:
    """Bytes that this process may still allocate: the least that its limits leave."""
    return max(0, min(limit.free for limit in host_limits(proc=proc, root=root)))


def host_limits(*, proc: Path = PROC, root: Path = ROOT) -> list[Limit]:
    """Every limit that there is, the machine's memory first; some are larger than that.

    The page cache counts as free: in the machine's figure by psutil, in a control group's by its
    ``inactive_file``. A group is bound by every group above it, so the process's own path is walked
    up to the root; versions 1 and 2 are understood. Without ``/proc`` control groups are not found,
    and the page cache of the machine does not count as free.
    """
    limits = [_machine(), *_group_limits(proc, root)]
    for name, which in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA)):
        soft = resource.getrlimit(which)[0]
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(name, soft, soft - _used(which)))
    return limits


def _machine() -> Limit:
    try:
        machine = psutil.virtual_memory()
    except (OSError, psutil.Error):
        # Without /proc, sysinfo(2) still tells.
        total, free = (
            os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
            for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
        )
        return Limit("machine", total, free)
    return Limit("machine", machine.total, machine.available)


def _used(which: int) -> int:
    """Bytes of this process that count against a limit of its address space or of its data; without ``/proc``, the least that it can be."""
    try:
        used = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return _peak_bytes()
    return int(used.vms if which == resource.RLIMIT_AS else used.data)


def _peak_bytes() -> int:
    """The most memory that this process has had resident, as getrusage(2) tells, which needs no ``/proc``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lock_limit() -> int | None:
    """Bytes that this process may lock by itself, ``ulimit -l``; None without a limit.

    A CUDA driver need not keep to it.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def core_quota(*, proc: Path = PROC, root: Path = ROOT) -> float | None:
    """Cores' worth of time that control groups grant, the least of them; None without a limit."""
    found = []
    for directory, version in _groups("cpu", proc, root):
        with contextlib.suppress(OSError, ValueError):
            # No controller here, or no limit.
            if version == 2:
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
                )
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _group_limits(proc: Path, root: Path) -> Iterator[Limit]:
    for directory, version in _groups("memory", proc, root):
        limit_file, usage_file, file_key = _FILES[version]
        try:
            text = (directory / limit_file).read_text().strip()
            if text == "max":
                continue
            free = int(text) - int((directory / usage_file).read_text())
        except (OSError, ValueError):
            # No controller here, or not ours to read.
            continue
        name = f"control group /{directory.relative_to(root)}"
        yield Limit(name, int(text), free + _droppable(directory / "memory.stat", file_key))


def _droppable(stat: Path, key: str) -> int:
    """Bytes of page cache that the kernel would give up; 0 where it does not say."""
    try:
        return sum(
            int(line.split()[1])
            for line in stat.read_text().splitlines()
            if line.startswith(f"{key} ")
        )
    except (OSError, ValueError):
        return 0


def _groups(controller: str, proc: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """The process's groups from its own up to the root: directory and version."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controller, 1
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            yield directory, version
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent


def resident_bytes() -> dict[str, int | None]:
    """Resident memory of this process in bytes, by kind; None for a kind that the system does not tell.

    ``anonymous``, ``file`` (mapped from files), ``shared`` (shared with other processes, such as
    the workers of a DataLoader; the kernel counts what CUDA allocates page-locked as shared, too),
    and the ``peak`` of their sum. Without ``/proc`` only the peak is known.
    """
    try:
        with open(_STATUS) as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        fields = {}
    names = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem", "peak": "VmHWM"}
    found = {
        name: int(fields[field].split()[0]) * 1024 if field in fields else None
        for name, field in names.items()
    }
    return found if found["peak"] is not None else {**found, "peak": _peak_bytes()}
