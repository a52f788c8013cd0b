"""The machine: memory and its limits, cores, the GPU or why there is none, packages, the disk."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pinfeed.cli.bandwidth import random_rate, sequential_rates
from pinfeed.cli.conditions import PIECE_BYTES, cached_share, drop
from pinfeed.cli.report import saying
from pinfeed.errors import DeviceError, MissingDependency, described
from pinfeed.memory.host import Limit, core_quota, free_host_bytes, host_limits, lock_limit
from pinfeed.memory.units import human

# Bytes of a file that are read to measure the disk.
_SPAN_BYTES = 256 << 20
# Longest time of a measurement, and of writing a scratch file.
_READ_S = 0.7
_WRITE_S = 1.5
# Rows that a feeder reads at a time.
_N_RANDOM = 16


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
    optional = (
        ("matplotlib", "plot", "timeline plots"),
        ("h5py", "hdf5", "rows of HDF5 files"),
        ("zarr", "zarr", "rows of Zarr arrays"),
        ("pyarrow", "parquet", "columns of Parquet files"),
        ("safetensors", "safetensors", "rows of safetensors files"),
        ("fsspec", "remote", "remote files: s3://, gs://, https://"),
    )
    found = [
        Package(name, extra, purpose, importlib.util.find_spec(name) is not None)
        for name, extra, purpose in optional
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@dataclass(frozen=True)
class Disk:
    """The rates that reads of a file reached, in GB/s."""

    what: str
    nbytes: int
    sequential: float
    random: float | None
    """Rate of reading rows of ``row_nbytes`` in random order, 16 at a time."""
    row_nbytes: int
    cached: float | None
    """Share that stayed in the page cache; None if the kernel does not report it."""

    @property
    def cold(self) -> bool:
        """Whether the disk was measured and not the page cache."""
        return self.cached is not None and self.cached < 0.01

    def __str__(self) -> str:
        if self.cold:
            state = "which was dropped from the page cache first"
        elif self.cached is None:
            state = "but the kernel does not report whether the reads were served by the page cache"
        else:
            state = (
                f"but {self.cached:.0%} stayed in the page cache, so the rates are not those of "
                "the disk alone"
            )
        return f"The disk was measured with {self.what} ({human(self.nbytes)}), {state}."


def measure_disk(
    path: str | None, start: int, row_nbytes: int, directory: str | None
) -> tuple[Disk | None, str]:
    """Measure the disk on a file or on a scratch file.

    Args:
        path: The file; None, a folder or a very small file measures a scratch file.
        start: Offset of its first row, in bytes.
        row_nbytes: Bytes of a row.
        directory: Folder of a scratch file, which is then measured in any case; None prefers
            ``path``.

    Returns:
        The rates, or None and the reason why they could not be measured.
    """
    try:
        if directory is None and path is not None and _can_measure(path):
            with saying(f"reading {path}"):
                return _measured(path, path, start, row_nbytes), ""
    except OSError as error:
        return None, f"the disk could not be measured: {described(error)}"
    folder = os.path.abspath(directory or (os.path.dirname(path) if path else ""))
    try:
        with saying(f"writing and reading a scratch file in {folder}"), _scratch(folder) as scratch:
            return _measured(scratch, f"a scratch file in {folder}", 0, row_nbytes), ""
    except OSError as error:
        why = error.strerror or described(error)
        return None, (
            f"the disk could not be measured: no scratch file in {folder} ({why}); give a "
            "writable folder with --dir"
        )


def _can_measure(path: str) -> bool:
    """Return whether a path is a file that is large enough to measure the disk."""
    status = os.stat(path)
    return stat.S_ISREG(status.st_mode) and status.st_size >= PIECE_BYTES


@contextlib.contextmanager
def _scratch(folder: str) -> Iterator[str]:
    """Write a file for a short time; yield its name, and remove it in the end."""
    # Some file systems do not store zeros.
    piece = np.random.default_rng(0).bytes(PIECE_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".pinfeed-", buffering=0) as file:
        deadline = time.perf_counter() + _WRITE_S
        while file.tell() < _SPAN_BYTES and time.perf_counter() < deadline:
            file.write(piece)
        os.fsync(file.fileno())
        yield file.name


def _measured(path: str, what: str, start: int, row_nbytes: int) -> Disk:
    """Measure reads of the beginning of a file, after dropping it from the page cache.

    A file that was not in the cache is dropped again in the end.
    """
    span = min(os.stat(path).st_size, _SPAN_BYTES)
    before = cached_share([path], span)
    sequential = max(sequential_rates(path, stop=span, seconds=_READ_S).values())
    drop([path], span)
    # Pages that stay now were not dropped before the other reads either.
    cached = cached_share([path], span)
    n_rows = (span - start) // max(1, row_nbytes)
    at_random = None
    if row_nbytes and n_rows >= 4 * _N_RANDOM:
        rows = np.random.default_rng(0).permutation(n_rows)
        batches = np.array_split(rows, max(1, n_rows // 1024))
        at_random = random_rate(path, start, row_nbytes, batches, _N_RANDOM, seconds=_READ_S)
    if before is not None and before < 0.5:
        drop([path], span)
    return Disk(what, span, sequential, at_random, row_nbytes, cached)
