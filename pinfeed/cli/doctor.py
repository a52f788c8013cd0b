"""``pinfeed doctor``: the machine, its packages and, given a file, how it would be read."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import itertools
import mmap
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from pinfeed.cli.inspect import Report, facts, in_words, source_of
from pinfeed.cli.plan import described, usual_batch
from pinfeed.errors import DeviceError, MissingDependency, PinfeedError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.host import core_quota, free_host_bytes, host_limits, lock_limit
from pinfeed.memory.units import human, human_rate
from pinfeed.native.library import why_not
from pinfeed.stores.page_cache import cached_pages, can_tell
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.suggestions import REQUIREMENTS, install_line

_SPAN_BYTES = 128 << 20
_PIECE_BYTES = 4 << 20
_N_THREADS = 4
# Longest time of each measurement.
_SECONDS = 0.5


def doctor(file: str | None) -> Report:
    """Report on the machine and, if it is given, on a file."""
    gpu = gpu_values()
    host = host_values(gpu["torch_cuda"] if gpu["name"] else None)
    values: dict[str, Any] = {"host": host, "gpu": gpu, "file": None}
    texts = [_machine_text(host, gpu)]
    errors = []
    if file is not None:
        try:
            values["file"], text = _file(file)
            texts.append(text)
        except (PinfeedError, OSError) as error:
            errors.append(in_words(error))
    return Report(values, "\n\n".join(texts), errors)


def _file(file: str) -> tuple[dict[str, Any], str]:
    """Describe a file for scripts and for people."""
    part = source_of([file])
    reads: dict[str, list[str]] = {}
    with contextlib.closing(part.open()) as store:
        for name, shuffle in {"in order": False, "shuffled": True}.items():
            with Feeder(store, batch_size=usual_batch(store), shuffle=shuffle) as feeder:
                reads[name] = list(feeder.plan.notes)
    rates = None
    if isinstance(part.path, str) and not has_protocol(part.path):
        rates = ReadRates.measured(next(iter(sorted(glob.glob(part.path))), part.path))
    pairs = [("source", described(part).removeprefix(f"{part}: "))]
    is_same = reads["in order"] == reads["shuffled"]
    shown = {"read": reads["in order"]} if is_same else reads
    for name, notes in shown.items():
        pairs += [("" if i else name, note) for i, note in enumerate(notes)]
    if rates is not None:
        cold = "not measured, because the file stays in memory"
        if rates.cold is not None:
            cold = f"{human_rate(rates.cold)} for the first {human(rates.nbytes)} in sequence"
        warm = human_rate(rates.warm)
        if rates.cached is not None:
            warm += f"; it had {rates.cached:.0%} of these bytes"
        pairs += [("disk", cold), ("page cache", warm)]
    values = {**part.values, "reads": reads, "rates": rates and asdict(rates)}
    return values, facts(str(part), pairs)


def _machine_text(host: dict[str, Any], gpu: dict[str, Any]) -> str:
    cores = str(host["cores"])
    if host["core_quota"] is not None:
        cores += f", limited to the CPU time of {host['core_quota']:g} (control group)"
    locked = "no limit"
    if host["lock_limit"] is not None:
        locked = f"limit {human(host['lock_limit'])} (ulimit -l; the CUDA driver may exceed it)"
    built = f"for CUDA {gpu['torch_cuda']}" if gpu["torch_cuda"] else "without CUDA"
    driver = f"driver for CUDA {gpu['driver_cuda']}" if gpu["driver_cuda"] else "no NVIDIA driver"
    device = "none that torch can use"
    if gpu["name"]:
        several = f" (one of {gpu['count']})" * (gpu["count"] > 1)
        device = f"{gpu['name']}{several}, {human(gpu['total'])}, {human(gpu['free'])} free"
    packages = host["packages"]
    found = [f"{package_of(extra)} {version}" for extra, version in packages.items() if version]
    missing = [package_of(extra) for extra, version in packages.items() if not version]
    why = host["compiled_problem"]
    limits = [
        ("", f"{one['name']}: {human(one['total'])}, {human(max(0, one['free']))} free")
        for one in host["limits"]
    ]
    pairs = [
        ("compiled part", f"not used, because {why}" if why else "used"),
        ("cores", cores),
        ("memory", f"{human(host['memory'])}; a feeder may use {human(host['free'])}"),
        *limits,
        ("pinned memory", locked),
        ("torch", f"{gpu['torch']}, {built}; {driver}"),
        ("GPU", device),
        ("", gpu["problem"]),
        ("packages", ", ".join(found) or "none of the optional ones"),
        ("missing", install_line(*missing) if missing else ""),
    ]
    return facts("This machine", pairs)


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


@dataclass(frozen=True)
class ReadRates:
    """Rates of reading a file in sequence, in bytes per second.

    Attributes:
        nbytes: Bytes at the beginning of the file that were read.
        cold: Rate of reads from the disk; None if the kernel keeps the file in memory, or does not
            report whether it does.
        warm: Rate of reads from the page cache.
        cached: Share of these bytes that was in the page cache before; None if unknown.
    """

    nbytes: int
    cold: float | None
    warm: float
    cached: float | None

    @classmethod
    def measured(cls, path: str) -> ReadRates | None:
        """Measure a file in about a second; None for a folder, and for a small file.

        The beginning of the file is dropped from the page cache first, and in the end again if it
        was not there before.
        """
        if not os.path.isfile(path) or os.path.getsize(path) < _PIECE_BYTES:
            return None
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            span = min(os.path.getsize(path), _SPAN_BYTES)
            before = _cached(fd, span)
            # The kernel does not drop pages that are not on the disk yet.
            os.fsync(fd)
            _drop(fd, span)
            is_cold = _cached(fd, span) == 0
            span, cold = _read(fd, span)
            _, warm = _read(fd, span)
            if before == 0:
                _drop(fd, _SPAN_BYTES)
        return cls(span, cold if is_cold else None, warm, before)


def _cached(fd: int, nbytes: int) -> float | None:
    """Return the share of the first bytes of a file that is in the page cache; None if unknown."""
    return float(cached_pages(fd, 0, nbytes).mean()) if can_tell(fd) else None


def _drop(fd: int, nbytes: int) -> None:
    os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)


def _read(fd: int, nbytes: int) -> tuple[int, float]:
    """Read the first bytes of a file; return how many were read in time, and the rate."""
    pieces = itertools.count()
    begin = time.perf_counter()

    def read() -> int:
        n_read = 0
        with mmap.mmap(-1, _PIECE_BYTES) as buffer:
            while (offset := next(pieces) * _PIECE_BYTES) < nbytes:
                n_read += os.preadv(fd, [buffer], offset)
                if time.perf_counter() - begin > _SECONDS:
                    break
        return n_read

    with ThreadPoolExecutor(_N_THREADS) as executor:
        n_read = sum(future.result() for future in [executor.submit(read) for _ in range(4)])
    return n_read, n_read / (time.perf_counter() - begin)
