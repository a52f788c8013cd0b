"""The machine: memory and its limits, cores, the GPU or why there is none, packages."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import warnings
from typing import Any

from pinfeed.errors import DeviceError, MissingDependency
from pinfeed.memory.host import core_quota, free_host_bytes, host_limits, lock_limit
from pinfeed.native.library import why_not
from pinfeed.validation.suggestions import REQUIREMENTS


def host_values(cuda: str | None) -> dict[str, Any]:
    """Describe memory in bytes, cores, the compiled part of pinfeed, and optional packages.

    Args:
        cuda: CUDA version of torch, which CuPy must match; None without a GPU.

    Returns:
        ``memory`` of the machine; ``free``, which a feeder may still take; ``limits`` that are
        less than the memory; ``lock_limit``, the bytes that the process may lock, or None;
        ``cores`` that the process may use; ``core_quota``, the cores of CPU time that control
        groups grant, or None; ``compiled_problem``, the reason why the compiled part is not used,
        or an empty text; ``packages``, the version or None by the extra that installs each.
    """
    machine, *others = host_limits()
    cupy = f"cuda{cuda.split('.')[0]}" if cuda else ""
    extras = [one for one in sorted(REQUIREMENTS) if one == cupy or not one.startswith("cuda")]
    return {
        "memory": machine.total,
        "free": free_host_bytes(),
        "limits": [one._asdict() for one in others if one.total < machine.total],
        "lock_limit": lock_limit(),
        "cores": len(os.sched_getaffinity(0)),
        "core_quota": core_quota(),
        "compiled_problem": why_not(),
        "packages": {extra: _version_of(package_of(extra)) for extra in extras},
    }


def package_of(extra: str) -> str:
    """Return the package that an extra of pinfeed installs."""
    return REQUIREMENTS[extra].partition(">")[0]


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_values() -> dict[str, Any]:
    """Describe torch, and the GPU that it can use.

    Returns:
        ``name``, which is empty without a GPU; the ``count`` of GPUs; ``total`` and ``free`` bytes
        of the current one; version of ``torch``; CUDA version ``torch_cuda`` of torch, and
        ``driver_cuda`` of the driver, or None; ``problem``, the reason why a GPU that seems to
        exist cannot be used, or why the GPU cannot read pinned memory itself, or an empty text.
    """
    import torch

    versions = str(torch.__version__), torch.version.cuda, driver_cuda()
    found = dict(zip(("torch", "torch_cuda", "driver_cuda"), versions, strict=True))
    with warnings.catch_warnings(record=True) as said:
        # torch warns of a driver that is too old.
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        reasons = " ".join(str(warning.message).splitlines()[0] for warning in said)
        problem = gpu_problem(*versions, reasons)
        return {"name": "", "count": 0, "total": 0, "free": 0, **found, "problem": problem}
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    gpu = {"name": name, "count": torch.cuda.device_count(), "total": total, "free": free}
    return {**gpu, **found, "problem": pinning_problem()}


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
    # Drivers run programs of older and newer minor versions.
    if int(driver.split(".")[0]) < int(torch_cuda.split(".")[0]):
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


def pinning_problem() -> str:
    """Say why the GPU cannot read rows in page-locked memory itself; empty if it can."""
    from pinfeed.stores.pinned import PinnedStore

    try:
        PinnedStore.empty((1,), "uint8").close()
    except (MissingDependency, DeviceError) as error:
        return str(error)
    return ""
