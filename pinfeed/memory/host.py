"""Host memory: what the machine, control groups and process limits leave, and what is in use."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from pinfeed.memory.page_locked import locked_bytes
from pinfeed.memory.units import human

PROC = "/proc/self/cgroup"
ROOT = "/sys/fs/cgroup"
_STATUS = "/proc/self/status"
_FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        b"total_inactive_file",
        b"total_active_file",
    ),
    2: ("memory.max", "memory.current", b"inactive_file", b"active_file"),
}
"""Files of a control group by version: the limit, the usage, and two keys of memory.stat.

The keys name the page cache that can be dropped, and the page cache that was used more than once.
"""


class Limit(NamedTuple):
    """A bound on the host memory of this process, in bytes."""

    name: str
    """``machine``, ``control group /its/path``, ``RLIMIT_AS`` or ``RLIMIT_DATA``."""
    total: int
    free: int
    """Bytes that this limit still allows to allocate. The page cache counts as free."""
    active_file: int = 0
    """Page cache in bytes that does not count as free, because it was used more than once."""


class FreeHostMemory(NamedTuple):
    """Host memory under all limits of this process at one moment, in bytes."""

    allocatable: int
    """Bytes that this process may still allocate."""
    page_cache: int
    """Bytes of files that the page cache can hold, including its current contents."""


def free_host_memory() -> FreeHostMemory:
    """Return the memory that the limits of this process leave."""
    limits = host_limits()
    return FreeHostMemory(
        max(0, min(limit.free for limit in limits)),
        max(0, min(limit.free + limit.active_file for limit in limits)),
    )


def free_host_bytes() -> int:
    """Return the bytes that this process may still allocate under all of its limits."""
    return free_host_memory().allocatable


def host_limits() -> list[Limit]:
    """List every limit, the machine's memory first; some limits are larger than that.

    The page cache counts as free: psutil does so for the machine, and ``inactive_file`` reports it
    for a control group. Parent groups also bound a group, so the function follows the path of the
    process up to the root. Versions 1 and 2 are supported. Without ``/proc``, no control groups are
    found, and the page cache of the machine does not count as free.
    """
    limits = [_machine(), *_group_limits()]
    for name, which in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA)):
        soft = resource.getrlimit(which)[0]
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(name, soft, soft - _used(which)))
    return limits


def _machine() -> Limit:
    try:
        machine = psutil.virtual_memory()
    except (OSError, psutil.Error):
        # Without /proc, sysinfo(2) still knows.
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        return Limit("machine", total, os.sysconf("SC_AVPHYS_PAGES") * page)
    return Limit("machine", machine.total, machine.available)


def _used(which: int) -> int:
    """Return the bytes of this process that count against RLIMIT_AS or RLIMIT_DATA.

    Without ``/proc``, the result is a lower bound.
    """
    try:
        used = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return _peak_bytes()
    return int(used.vms if which == resource.RLIMIT_AS else used.data)


def _peak_bytes() -> int:
    """Return the peak resident memory of this process; without ``/proc``, by getrusage(2)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lock_limit() -> int | None:
    """Return the bytes that this process may lock, ``ulimit -l``; None without a limit.

    A CUDA driver need not obey the limit.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def core_quota() -> float | None:
    """Return the cores of CPU time that control groups grant; None without a limit."""
    found = []
    for group, version in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            # The group has no controller, or no limit.
            if version == 2:
                quota, period = _read(f"{group}/cpu.max").split()
            else:
                quota = _read(f"{group}/cpu.cfs_quota_us")
                period = _read(f"{group}/cpu.cfs_period_us")
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _group_limits() -> Iterator[Limit]:
    for group, version in _groups("memory"):
        limit_file, usage_file, inactive, active = _FILES[version]
        try:
            text = _read(f"{group}/{limit_file}").strip()
            if text == b"max":
                continue
            total = int(text)
            free = total - int(_read(f"{group}/{usage_file}"))
        except (OSError, ValueError):
            # The group has no controller, or this process may not read it.
            continue
        statistics = b""
        with contextlib.suppress(OSError):
            statistics = _read(f"{group}/memory.stat")
        name = f"control group {group.removeprefix(ROOT) or '/'}"
        free += _bytes_of(inactive, statistics)
        yield Limit(name, total, free, _bytes_of(active, statistics))


def _bytes_of(key: bytes, statistics: bytes) -> int:
    """Return the bytes of page cache of a kind; 0 if the kernel does not report them."""
    found = re.search(rb"^%b (\d+)$" % key, statistics, re.MULTILINE)
    return int(found[1]) if found else 0


def _groups(controller: str) -> Iterator[tuple[str, int]]:
    """Yield directory and version of the process's groups, from its own up to the root."""
    try:
        lines = os.fsdecode(_read(PROC)).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = ROOT
            version = 2
        elif controller in controllers.split(","):
            base = f"{ROOT}/{controller}"
            version = 1
        else:
            continue
        group = base + path.rstrip("/")
        while len(group) >= len(base):
            yield group, version
            group = os.path.dirname(group)


def _read(path: str) -> bytes:
    """Return the contents of a file of the kernel; a buffer would take as long as the read."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def resident_bytes() -> dict[str, int | None]:
    """Return the resident memory of this process in bytes, by kind.

    The kinds are ``anonymous``, ``file`` (mapped from files), ``shared``, and the ``peak`` of their
    sum. Shared memory is shared with other processes, such as the workers of a DataLoader; the
    kernel also counts page-locked memory of CUDA as shared. Without ``/proc``, only the peak is
    known, and the other kinds are None.
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


@dataclass(frozen=True, repr=False)
class ProcessMemory:
    """Resident memory of the process in bytes, by kind, for pinfeed and all other code together.

    A kind that the system does not report is None.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> memory = feeder.stats.memory
        >>> memory.pinned >= 0
        True

    Attributes:
        anonymous: Bytes that are neither mapped from a file, nor shared, nor page-locked by
            pinfeed.
        file: Bytes mapped from files: libraries, and touched pages of memory maps, including
            pinfeed's. The kernel may drop such pages at any time.
        shared: Bytes of shared memory, mostly batches from the worker processes of a DataLoader.
            The kernel also counts memory that CUDA allocates page-locked (torch's ``pin_memory``).
        pinned: Bytes that pinfeed page-locked (pinned).
        peak: Largest sum of all kinds since the process began, in bytes.
    """

    anonymous: int | None
    file: int | None
    shared: int | None
    pinned: int
    peak: int | None

    @classmethod
    def now(cls) -> ProcessMemory:
        """Return the current memory of this process."""
        resident = resident_bytes()
        locked = locked_bytes()
        if (nbytes := resident["anonymous"]) is not None:
            resident["anonymous"] = max(0, nbytes - locked)
        return cls(**resident, pinned=locked)

    def __repr__(self) -> str:
        kinds = dataclasses.asdict(self).items()
        return ", ".join(
            f"{name} {'unknown' if nbytes is None else human(nbytes)}" for name, nbytes in kinds
        )


def trim_heap() -> None:
    """Return the freed memory of all threads to the system.

    glibc keeps freed blocks of up to 32 MiB in the heap of the thread that allocated them. With
    other C libraries, this function does nothing.
    """
    # Only glibc has malloc_trim(3).
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> None:
    """Make malloc return freed blocks of 1 MiB or more to the system at once, from now on.

    By default, glibc does so only until the first such block is freed. After that, its heap keeps
    up to half as much memory again as is in use. With other C libraries, nothing changes.
    """
    m_mmap_threshold = -3  # mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)
