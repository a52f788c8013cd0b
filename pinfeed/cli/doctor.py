"""``pinfeed doctor``: what this machine can do and, given a file, how the file would be read."""

from __future__ import annotations

import contextlib
import glob
import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from pinfeed.cli.inspect import source_of
from pinfeed.cli.machine import gpu_values, host_values, package_of
from pinfeed.cli.plan import described, usual_batch
from pinfeed.cli.report import Report, facts, in_words
from pinfeed.errors import PinfeedError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.units import human, human_rate
from pinfeed.stores.page_cache import cached_pages, can_tell
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.suggestions import install_line

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
