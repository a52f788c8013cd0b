"""Conditions of a measurement: the GPU's link, clocks and power, huge pages, and NUMA nodes.

A value that the machine does not report is None.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.processes import bound, end
from benchmarks.gpu.recorder import Fields

_QUERY = {
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_max": "pcie.link.width.max",
    "sm_mhz": "clocks.sm",
    "sm_mhz_max": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
_LIMIT_S = 5.0
_HUGE_PAGES = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


def gpu_state(load: Callable[[], object] | None = None) -> Fields:
    """Return what nvidia-smi reports about the GPU.

    Args:
        load: Work that runs again and again until nvidia-smi has ended, and returns when it is
            complete. An idle link drops to its first generation, and idle clocks drop, too.
    """
    found: Fields = dict.fromkeys(_QUERY)
    asked = dict(_QUERY)
    while asked:
        status, output = _nvidia_smi(list(asked.values()), load)
        values = output.split("\n")[0].split(",")
        if status == 0 and len(values) == len(asked):
            return found | dict(zip(asked, map(_number, values), strict=True))
        # nvidia-smi reports nothing at all if it does not know one of the names.
        unknown = [name for name, field in asked.items() if f'"{field}"' in output]
        if not unknown:
            break
        for name in unknown:
            del asked[name]
    return found


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


def _nvidia_smi(names: Sequence[str], load: Callable[[], object] | None) -> tuple[int | None, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ""
    bus = _bus_id()
    command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    if bus is not None:
        command.append(f"--id={bus}")
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            bound(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit_s = time.monotonic() + _LIMIT_S
        try:
            while load and process.poll() is None and time.monotonic() < limit_s:
                load()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, limit_s - time.monotonic()))
        finally:
            end(process)
        output.seek(0)
        return process.returncode, output.read().strip()


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


def _number(text: str) -> float | None:
    # A field that the GPU does not have is "[N/A]" or "[Not Supported]".
    with contextlib.suppress(ValueError):
        return float(text)
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
