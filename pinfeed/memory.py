"""What is free on the host: the least of what the machine, its control groups and the process's own limits leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil


def free_host_bytes(*, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate.

    The page cache counts as free: in the machine's figure by psutil, in a control group's by its ``inactive_file``. A group is bound by
    every group above it, so the process's own path is walked up to the root; versions 1 and 2 are understood.
    """
    free = [psutil.virtual_memory().available, *_cgroup_free(proc, root)]
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            used = psutil.Process().memory_info()
            free.append(soft - (used.vms if limit == resource.RLIMIT_AS else used.data))
    return max(0, min(free))


def _cgroup_free(proc: Path, root: Path) -> Iterator[int]:
    for directory, limit_file, usage_file, file_key in _cgroups(proc, root):
        try:
            text = (directory / limit_file).read_text().strip()
            if text == "max":
                continue
            free = int(text) - int((directory / usage_file).read_text())
        except (OSError, ValueError):
            continue  # no controller here, or not ours to read
        yield free + _droppable(directory / "memory.stat", file_key)


def _droppable(stat: Path, key: str) -> int:
    """Bytes of page cache that the kernel would give up; 0 where it does not say."""
    try:
        return sum(int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith(f"{key} "))
    except (OSError, ValueError):
        return 0


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The process's groups from its own up to the root: directory, limit file, usage file, key of droppable page cache."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            yield directory, *names
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent


def resident_bytes() -> dict[str, int]:
    """Resident memory of this process in bytes, by kind.

    ``anonymous``, ``file`` (mapped from files), ``shared`` (what CUDA allocates page-locked, too), and the ``peak`` of their sum.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem", "peak": "VmHWM"}
    return {name: int(fields[field].split()[0]) * 1024 for name, field in names.items()}
