"""Diagnosis: the findings of ``pinfeed doctor``, in words and for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pinfeed.cli.doctor.advice import Advice, Ceilings, Data, spelled
from pinfeed.cli.doctor.cache import CacheAdvice
from pinfeed.cli.doctor.disk import Disk
from pinfeed.cli.doctor.machine import Gpu, Host, Package, limit_values
from pinfeed.cli.terminal.output import facts, sections, table
from pinfeed.memory.units import human, human_rate
from pinfeed.native.library import why_not
from pinfeed.validation.requirements import install_line
from pinfeed.validation.wrapping import wrapped

_WAYS = {
    "to_device_pinned": "to the GPU, page-locked",
    "to_device_pageable": "to the GPU, ordinary memory",
    "to_host_pinned": "from the GPU, page-locked",
    "to_host_pageable": "from the GPU, ordinary memory",
}


@dataclass(frozen=True)
class Subject:
    """The data that the user asks about.

    Attributes:
        data: The size of the data.
        words: The data in words.
        path: A local file of the data; None if there is none.
        start: Offset of the first row in that file, in bytes.
    """

    data: Data
    words: str
    path: str | None = None
    start: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a machine."""

    host: Host
    gpu: Gpu
    disk: Disk | None
    disk_problem: str
    """The reason why the disk was not measured; empty if it was."""
    link: Mapping[str, float]
    """GB/s of copies to and from the GPU, by direction and kind of host memory."""
    ceilings: Ceilings
    packages: Sequence[Package]
    route: str
    subject: Subject | None
    advice: Advice | None
    cache: CacheAdvice | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The findings for scripts."""
        return {
            "host": {
                **asdict(self.host),
                "limits": [limit_values(limit) for limit in self.host.limits],
                "compiled_problem": why_not(),
            },
            "gpu": asdict(self.gpu),
            "gb_per_s": {
                "memory_copy": self.ceilings.memory,
                "disk": self.disk and {**asdict(self.disk), "cold": self.disk.cold},
                "disk_problem": self.disk_problem,
                "link": dict(self.link) or None,
            },
            "packages": [
                {**asdict(package), "install": install_line(package.extra)}
                for package in self.packages
            ],
            "data": self.subject and self._data_values(self.subject.data),
            "route": self.route,
            "advice": self.advice and asdict(self.advice),
            "cache": self.subject and self.cache and self.cache.values(self.subject.data),
        }

    @property
    def text(self) -> str:
        """The findings for people."""
        answer = f"  {self.advice.helps.capitalize()}" if self.advice else ""
        parts = {
            "This machine": self._machine(),
            "Highest rates": self._rates(),
            "Optional packages": self._packages(),
            "Route": wrapped(self.route, "  ", "  "),
            f"Would pinfeed help?{answer}": self._advice(),
        }
        if self.cache and self.subject:
            title = f"Would a GPU cache help?  {self.cache.helps.capitalize()}"
            parts[title] = self.cache.text(self.subject.data)
        return sections(parts)

    def _data_values(self, data: Data) -> dict[str, Any]:
        return {
            **asdict(data),
            "nbytes": data.nbytes,
            "batch_ms": self.ceilings.batch_ms(data.batch_nbytes),
        }

    def _machine(self) -> str:
        host = self.host
        gpu = self.gpu
        limits = [
            (limit.name, f"{human(limit.total)}, {human(max(0, limit.free))} free")
            for limit in host.limits
        ]
        locked = "unlimited"
        if host.lock_limit is not None:
            locked = f"{human(host.lock_limit)} (ulimit -l; the CUDA driver may exceed it)"
        built = f"for CUDA {gpu.torch_cuda}" if gpu.torch_cuda else "without CUDA"
        driver = f"driver for CUDA {gpu.driver_cuda}" if gpu.driver_cuda else "no NVIDIA driver"
        pairs = [
            ("memory", f"{human(host.memory)}, a feeder may use {human(host.free)}"),
            *(limits or [("limits", "only the memory of the machine")]),
            ("memlock", locked),
            ("cores", _cores(host)),
            ("copies", f"by numpy, because {why}" if (why := why_not()) else "by compiled code"),
            ("GPU", _gpu(gpu)),
            ("", f"torch {gpu.torch}, {built}; {driver}"),
        ]
        return facts(pairs)

    def _rates(self) -> str:
        rows = [("copy in memory", human_rate(1e9 * self.ceilings.memory))]
        if self.disk is not None:
            rows.append(("disk, in sequence", human_rate(1e9 * self.disk.sequential)))
            if self.disk.random is not None:
                name = f"disk, rows of {human(self.disk.row_nbytes)} at random"
                rows.append((name, human_rate(1e9 * self.disk.random)))
        rows += [(_WAYS[way], human_rate(1e9 * rate)) for way, rate in self.link.items()]
        disk = str(self.disk) if self.disk else self.disk_problem
        return f"{table(rows, ('', 'rate'), 'lr')}\n{wrapped(disk)}"

    def _packages(self) -> str:
        missing = [package for package in self.packages if not package.here]
        rows = [
            (package.name, "installed" if package.here else "missing", package.purpose)
            for package in self.packages
        ]
        problems = [
            wrapped(f"{package.name}: {package.problem}") for package in missing if package.problem
        ]
        install = (
            [f"\n  {install_line(*(package.extra for package in missing))}"] if missing else []
        )
        return "\n".join([table(rows, ("package", "", "for")), *problems, *install])

    def _advice(self) -> str:
        if self.subject is None or self.advice is None:
            return wrapped("Give a FILE, or --rows and --row-bytes of your data.", " ", " ")
        data = self.subject.data
        times = ", ".join(
            f"{way} {spelled(ms)}" for way, ms in self.ceilings.batch_ms(data.batch_nbytes).items()
        )
        batches = f"batches of {data.batch_size:,} rows, {human(data.batch_nbytes)}"
        head = f"{self.subject.words}; {batches}. Least time per batch: {times}."
        return "\n".join(wrapped(text, "  ", "  ") for text in (head, *self.advice.why))


def _cores(host: Host) -> str:
    text = str(host.cores)
    if host.usable_cores < host.cores:
        text = f"{host.usable_cores} of {host.cores} usable"
    if host.core_quota is not None:
        text += f", limited to the CPU time of {host.core_quota:g} cores (control group)"
    return text


def _gpu(gpu: Gpu) -> str:
    if not gpu.name:
        return "none that torch can use"
    which = f"{gpu.name} (one of {gpu.count})" if gpu.count > 1 else gpu.name
    return f"{which}, {human(gpu.total)}, {human(gpu.free)} free"
