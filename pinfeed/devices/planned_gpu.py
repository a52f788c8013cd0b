"""PlannedGpu: a stand-in for a GPU, for plans on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.devices.cpu import HostDevice
from pinfeed.errors import ArgumentError, DeviceError
from pinfeed.stores.host_rows import HostArray
from pinfeed.stores.store import Store


class PlannedGpu(HostDevice):
    """Device for plans only, with its own memory, so that plans use the staged route.

    ``Feeder(..., device=PlannedGpu()).plan`` is the plan of a feeder on a machine with a GPU,
    created on a machine without one. The batches of the feeder would stay on the host. The plan
    stages rows of page-locked tables, because the faster route can only be measured on the GPU.
    """

    name = "cuda"
    unified = False

    def choose_route(self, stores: Sequence[Store], n_rows: int, wanted: str | None) -> str:
        if wanted == "direct":
            raise DeviceError(
                "route='direct': this machine has no GPU that could read the rows; leave route out"
            )
        return ""

    def reaches(self, source: HostArray | Store) -> bool:
        return False

    def free_bytes(self) -> int:
        raise ArgumentError(
            "free GPU memory is unknown without a GPU; give gpu_memory_limit (--gpu-limit)"
        )
