"""Conditions of a measurement: the GPU's link, clocks and power, huge pages, and NUMA nodes.

A value that the machine does not report is None.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import nvml
from benchmarks.gpu.recorder import Fields

# Seconds of work before the GPU is asked: an idle link and idle clocks need some to speed up.
_LOADED_S = 0.05
_HUGE_PAGES = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


def gpu_state(load: Callable[[], object] | None = None) -> Fields:
    """Return the clocks, the power and the link of the GPU.

    Args:
        load: Work that runs again and again until the GPU was asked, and returns when it is
            complete. An idle link drops to its first generation, and idle clocks drop, too.
    """
    gpu = _gpu()
    if gpu is None:
        return dict(nvml.UNKNOWN)
    found: Fields = {}

    def ask() -> None:
        time.sleep(_LOADED_S if load else 0)
        found.update(gpu.state())

    thread = threading.Thread(target=ask)
    thread.start()
    while load and thread.is_alive():
        load()
    thread.join()
    return found


def clocks() -> Fields:
    """Return the clock, the power and the throttle reasons now; empty without a GPU."""
    gpu = _gpu()
    return {} if gpu is None else gpu.clocks()


def memory_state(array: np.ndarray) -> Fields:
    """Return bytes of the mappings that hold an array: in all, in huge pages, on each NUMA node."""
    begin = array.ctypes.data
    end_of_array = begin + array.nbytes
    found: Fields = {"mapped_bytes": None, **dict.fromkeys(_HUGE_PAGES), "numa_bytes": None}
    for first, last, sizes in _mappings():
        if first < end_of_array and last > begin:
            found["mapped_bytes"] = (found["mapped_bytes"] or 0) + last - first
            for name in _HUGE_PAGES:
                if name in sizes:
                    found[name] = (found[name] or 0) + sizes[name]
    # Mappings may have grown since, so their ends may differ from those above.
    starts = [(int(line.split()[0], 16), line) for line in _lines("/proc/self/numa_maps")]
    of_array = [one for one in starts if begin < one[0] < end_of_array]
    before = [one for one in starts if one[0] <= begin][-1:]
    for _, line in before + of_array:
        page = re.search(r"kernelpagesize_kB=(\d+)", line)
        nodes = found["numa_bytes"] or {}
        for node, n_pages in re.findall(r"\bN(\d+)=(\d+)", line):
            nodes[node] = nodes.get(node, 0) + int(n_pages) * 1024 * int(page[1] if page else 4)
        found["numa_bytes"] = nodes
    return found


def host_state() -> Fields:
    """Return the mode of huge pages, and the NUMA nodes of the GPU and of the process's cores."""
    huge = re.search(r"\[(\w+)\]", "".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled")))
    bus = _bus_id()
    node = _lines(f"/sys/bus/pci/devices/{bus.lower()}/numa_node") if bus else []
    cores = os.sched_getaffinity(0)
    nodes = {
        int(path.parent.name.removeprefix("node")): _cores("".join(_lines(path)))
        for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    }
    return {
        "transparent_huge_pages": huge[1] if huge else None,
        "gpu_numa_node": int(node[0]) if node else None,
        "process_numa_nodes": sorted(one for one in nodes if nodes[one] & cores) or None,
        "numa_nodes": len(nodes) or None,
    }


@functools.cache
def _gpu() -> nvml.Gpu | None:
    """Return torch's current GPU; None if there is none, or nothing describes it."""
    bus_id = _bus_id()
    try:
        return None if bus_id is None else nvml.Gpu(bus_id)
    except OSError:
        return None


def _bus_id() -> str | None:
    """Return the PCI address of torch's current GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:
        # Older versions of torch do not report the address.
        return None


def _mappings() -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield the first address, the end, and sizes in bytes, of each mapping of this process."""
    sizes: dict[str, int] = {}
    edges: tuple[int, int] | None = None
    for line in _lines("/proc/self/smaps"):
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if edges:
                yield *edges, sizes
            edges = int(head[1], 16), int(head[2], 16)
            sizes = {}
        elif entry := re.match(r"(\w+): +(\d+) kB", line):
            sizes[entry[1]] = 1024 * int(entry[2])
    if edges:
        yield *edges, sizes


def _cores(text: str) -> set[int]:
    """Return the cores of a list such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {core for a, b in ranges for core in range(int(a), int(b or a) + 1)}


def _lines(path: str | Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
