"""Clocks, power, throttle reasons and link of a GPU, from NVIDIA's management library (NVML).

A query takes a few milliseconds and starts no process, so it can be made while the GPU works.
"""

from __future__ import annotations

import ctypes
from typing import Any

from benchmarks.gpu.recorder import Fields

LIBRARY = "libnvidia-ml.so.1"

_QUERIES: dict[str, tuple[Any, ...]] = {
    "pcie_gen": ("nvmlDeviceGetCurrPcieLinkGeneration",),
    "pcie_gen_max": ("nvmlDeviceGetMaxPcieLinkGeneration",),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth",),
    "pcie_width_max": ("nvmlDeviceGetMaxPcieLinkWidth",),
    # 1 is the clock of the multiprocessors, and 2 that of the memory.
    "sm_mhz": ("nvmlDeviceGetClockInfo", 1),
    "sm_mhz_max": ("nvmlDeviceGetMaxClockInfo", 1),
    "memory_mhz": ("nvmlDeviceGetClockInfo", 2),
    "power_w": ("nvmlDeviceGetPowerUsage",),
    "temperature_c": ("nvmlDeviceGetTemperature", 0),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons",),
}
_CLOCKS = ("sm_mhz", "power_w", "throttle_reasons")
_REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
UNKNOWN: Fields = dict.fromkeys(_QUERIES)
"""The fields if there is no GPU or no library."""


class Gpu:
    """One GPU, as the library describes it. A value that the GPU does not have is None.

    Args:
        bus_id: Address of the GPU on the PCI bus, such as ``0000:1a:00.0``.
        library: Name or path of the library.

    Raises:
        OSError: If the library cannot be loaded, or does not know the GPU.
    """

    def __init__(self, bus_id: str, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        self._handle = ctypes.c_void_p()
        code = self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByPciBusId_v2(
            bus_id.encode(), ctypes.byref(self._handle)
        )
        if code:
            raise OSError(f"{library} does not describe the GPU {bus_id}: error {code}")

    def state(self) -> Fields:
        """Return all fields."""
        return {name: self._value(name) for name in _QUERIES}

    def clocks(self) -> Fields:
        """Return what may change between two rounds of a measurement."""
        return {name: self._value(name) for name in _CLOCKS}

    def _value(self, name: str) -> Any:
        function, *arguments = _QUERIES[name]
        value = ctypes.c_ulonglong()
        try:
            code = self._library[function](self._handle, *arguments, ctypes.byref(value))
        except AttributeError:
            # An older or newer library may not have the function.
            return None
        if code:
            return None
        if name == "power_w":
            return value.value / 1000
        if name == "throttle_reasons":
            return [text for bit, text in _REASONS.items() if value.value & bit]
        return value.value
