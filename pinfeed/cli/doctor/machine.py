"""The machine: memory and its limits, cores, the GPU or why there is none, optional packages."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import warnings
from dataclasses import dataclass
from typing import Any

from pinfeed.errors import DeviceError, MissingDependency
from pinfeed.memory.host import Limit, core_quota, free_host_bytes, host_limits, lock_limit


@dataclass(frozen=True)
class Host:
    """Memory in bytes, and cores."""

    memory: int
    free: int
    """Memory that a feeder may still take: the least that the machine and the limits leave."""
    limits: tuple[Limit, ...]
    """Limits that are less than the memory of the machine."""
    lock_limit: int | None
    cores: int
    usable_cores: int
    """Cores that this process may run on."""
    core_quota: float | None
    """Cores of CPU time that control groups grant; None without a limit."""

    @classmethod
    def now(cls) -> Host:
        """Look at the machine as it is now."""
        machine, *others = host_limits()
        limits = tuple(limit for limit in others if limit.total < machine.total)
        cores = os.cpu_count() or 1
        return cls(
            machine.total,
            free_host_bytes(),
            limits,
            lock_limit(),
            cores,
            len(os.sched_getaffinity(0)),
            core_quota(),
        )


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use, or the reason why torch has none.

    Attributes:
        name: Name of torch's current GPU; empty if there is none.
        count: Number of GPUs that torch can use.
        total: Memory of the current GPU, in bytes.
        free: Free memory of the current GPU, in bytes.
        torch: Version of torch.
        torch_cuda: The CUDA version that torch was built for; None for a build without.
        driver_cuda: The newest CUDA version that the driver supports; None without a driver.
        problem: The reason why a GPU that seems to exist cannot be used, and what to do; empty if
            nothing is wrong.
    """

    name: str
    count: int
    total: int
    free: int
    torch: str
    torch_cuda: str | None
    driver_cuda: str | None
    problem: str

    @classmethod
    def now(cls) -> Gpu:
        """Query torch and the driver."""
        import torch

        driver = driver_cuda()
        with warnings.catch_warnings(record=True) as said:
            # torch warns of a driver that is too old.
            warnings.simplefilter("always")
            usable = torch.cuda.is_available()
        versions = str(torch.__version__), torch.version.cuda, driver
        if usable:
            free, total = torch.cuda.mem_get_info()
            return cls(
                torch.cuda.get_device_name(),
                torch.cuda.device_count(),
                total,
                free,
                *versions,
                problem="",
            )
        reasons = " ".join(str(warning.message).splitlines()[0] for warning in said)
        return cls("", 0, 0, 0, *versions, problem=gpu_problem(*versions, reasons))


def gpu_problem(torch: str, torch_cuda: str | None, driver: str | None, said: str) -> str:
    """Say why torch cannot use a GPU although there is a driver; empty without a driver.

    Args:
        torch: Version of torch.
        torch_cuda: CUDA version that torch was built for; None for a build without.
        driver: CUDA version of the driver; None without a driver.
        said: The warnings of torch.
    """
    if driver is None:
        return ""
    if torch_cuda is None:
        return (
            f"there is an NVIDIA driver, but torch {torch} is built without CUDA; run pip install "
            "--force-reinstall torch"
        )
    if _version(driver) < (_version(torch_cuda)[0], 0):
        return (
            f"torch {torch} is built for CUDA {torch_cuda}, but the driver supports CUDA "
            f"{driver}; update the driver, or install an older torch"
        )
    return (
        f"there is an NVIDIA driver (CUDA {driver}), but torch {torch} (CUDA {torch_cuda}) "
        f"finds no usable GPU; {said or 'see nvidia-smi'}"
    )


def driver_cuda() -> str | None:
    """Return the newest CUDA version of the driver, such as ``12.4``; None without a driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return None


@dataclass(frozen=True)
class Package:
    """An optional package."""

    name: str
    extra: str
    """The extra of pinfeed that installs it."""
    purpose: str
    here: bool
    problem: str = ""


def packages(gpu: Gpu) -> list[Package]:
    """List the optional packages.

    CuPy must match the CUDA version of torch, and is listed only if there is a GPU.
    """
    found = [
        Package("matplotlib", "plot", "timeline plots", _is_here("matplotlib")),
        Package("h5py", "hdf5", "rows of HDF5 files", _is_here("h5py")),
        Package("zarr", "zarr", "rows of Zarr arrays", _is_here("zarr")),
        Package("pyarrow", "parquet", "columns of Parquet files", _is_here("pyarrow")),
        Package("safetensors", "safetensors", "rows of safetensors files", _is_here("safetensors")),
        Package("fsspec", "remote", "remote files: s3://, gs://, https://", _is_here("fsspec")),
    ]
    if gpu.name:
        problem = _pinning_problem()
        extra = f"cuda{_version(gpu.torch_cuda or '13')[0]}"
        purpose = "tables in page-locked (pinned) memory that the GPU reads directly"
        found.insert(0, Package("CuPy", extra, purpose, not problem, problem))
    return found


def _pinning_problem() -> str:
    """Say why rows cannot be page-locked; empty if they can."""
    from pinfeed.stores import PinnedStore

    try:
        PinnedStore.empty((1,), "uint8")
    except (MissingDependency, DeviceError) as error:
        return str(error)
    return ""


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def limit_values(limit: Limit) -> dict[str, Any]:
    """Describe a limit for scripts."""
    return {"name": limit.name, "bytes": limit.total, "free_bytes": max(0, limit.free)}
