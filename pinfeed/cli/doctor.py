"""``pinfeed doctor``: the machine, its best rates, and whether pinfeed would help."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import click

from pinfeed.cli.advice import Advice, Ceilings, Data, advise, spelled
from pinfeed.cli.bandwidth import link_rates, memory_rate
from pinfeed.cli.cache_advice import advise_on_cache
from pinfeed.cli.machine import Disk, Gpu, Host, Package, measure_disk, packages
from pinfeed.cli.report import Report, facts, saying, sections, table
from pinfeed.cli.sources import (
    described,
    format_of,
    open_rows,
    sparse_described,
    sparse_rows,
    usual_batch,
)
from pinfeed.cli.thread_advice import ThreadAdvice, advise_on_threads
from pinfeed.errors import PinfeedError
from pinfeed.memory.units import human, human_rate
from pinfeed.native.library import why_not
from pinfeed.stores.npy_header import read_header
from pinfeed.validation.requirements import install_line
from pinfeed.validation.wrapping import wrapped

_PAGE_BYTES = 4096
_LINK_BYTES = 256 << 20
# Size of the table on which the route is measured.
_TABLE_BYTES = 256 << 20
_DIRECTIONS = {
    "to_device_pinned": "to the GPU, page-locked",
    "to_device_pageable": "to the GPU, ordinary memory",
    "to_host_pinned": "from the GPU, page-locked",
    "to_host_pageable": "from the GPU, ordinary memory",
}


def doctor(
    files: Sequence[str],
    *,
    rows: int | None,
    row_bytes: int | None,
    batch_size: int | None,
    directory: str | None,
    ids: str | None,
    host_transform: str | None = None,
) -> Report:
    """Report on the machine and, if the data is known, on whether pinfeed helps.

    The arguments are the options of the command.
    """
    data = _data(files, rows, row_bytes, batch_size)
    if ids is not None and data is None:
        raise click.UsageError(
            "--ids: row indices of which rows? Give FILE, or --rows and --row-bytes of the table"
        )
    cache = advise_on_cache(ids, data) if ids is not None and data is not None else None
    threads = _thread_advice(host_transform, files, batch_size)
    host = Host.now()
    gpu = Gpu.now()
    rates = _Rates.measured(gpu, data, directory)
    optional = packages(gpu)
    route = _route(gpu, optional, data)
    advice = None
    if data is not None:
        advice = advise(data, rates.ceilings, free_host=host.free, gpu=gpu.name, free_gpu=gpu.free)
    values = {
        "host": _host_values(host),
        "gpu": asdict(gpu),
        "gb_per_s": rates.values,
        "packages": [
            {**asdict(package), "install": install_line(package.extra)} for package in optional
        ],
        "data": data and _data_values(data, rates.ceilings),
        "route": route,
        "advice": advice and advice._asdict(),
        "cache": data and cache and cache.values(data),
        "transform_threads": threads and {**asdict(threads), "helps": threads.helps},
    }
    helps = f"  {advice.helps.capitalize()}" if advice else ""
    parts = {
        "This machine": _machine_text(host, gpu),
        "Highest rates": rates.text,
        "Optional packages": _packages_text(optional),
        "Route": wrapped(route, "  ", "  "),
        f"Would pinfeed help?{helps}": _advice_text(data, rates.ceilings, advice),
    }
    if cache and data:
        parts[f"Would a GPU cache help?  {cache.helps.capitalize()}"] = cache.text(data)
    if threads:
        parts[f"Would transform_threads help?  {threads.helps.capitalize()}"] = threads.text
    return Report(values, sections(parts), (gpu.problem,) if gpu.problem else ())


def _thread_advice(
    host_transform: str | None, files: Sequence[str], batch_size: int | None
) -> ThreadAdvice | None:
    """Return advice on the threads of a ``host_transform``; None if the user names none."""
    if host_transform is None:
        return None
    if not files:
        raise click.UsageError("--host-transform: on which rows? Give FILE")
    return advise_on_threads(host_transform, files, batch_size)


class _Rates(NamedTuple):
    """The best rates of the machine, in GB/s."""

    memory: float
    disk: Disk | None
    disk_problem: str
    """The reason why the disk was not measured; empty if it was."""
    link: Mapping[str, float]
    """Copies to and from the GPU, by direction and kind of host memory."""

    @classmethod
    def measured(cls, gpu: Gpu, data: Data | None, directory: str | None) -> _Rates:
        """Measure the machine, and the disk on the file of the data if there is one."""
        with saying("copying in memory"):
            memory = memory_rate()
        read = data or Data(0, _PAGE_BYTES, 0)
        disk, problem = measure_disk(read.path, read.start, read.row_nbytes, directory)
        link = {}
        if gpu.name:
            with saying("copying to the GPU"):
                link = link_rates("cuda", min(_LINK_BYTES, gpu.free // 4))
        return cls(memory, disk, problem, link)

    @property
    def ceilings(self) -> Ceilings:
        """The rates that limit a loop."""
        return Ceilings(
            memory=self.memory,
            sequential=self.disk.sequential if self.disk else None,
            random=self.disk.random if self.disk else None,
            link=self.link.get("to_device_pinned"),
        )

    @property
    def values(self) -> dict[str, Any]:
        """The rates for scripts."""
        return {
            "memory_copy": self.memory,
            "disk": self.disk and {**asdict(self.disk), "cold": self.disk.cold},
            "disk_problem": self.disk_problem,
            "link": self.link or None,
        }

    @property
    def text(self) -> str:
        """The rates for people."""
        rates = {"copy in memory": self.memory}
        if self.disk is not None:
            rates["disk, in sequence"] = self.disk.sequential
            if self.disk.random is not None:
                rates[f"disk, rows of {human(self.disk.row_nbytes)} at random"] = self.disk.random
        rates |= {_DIRECTIONS[direction]: rate for direction, rate in self.link.items()}
        rows = [(name, human_rate(1e9 * rate)) for name, rate in rates.items()]
        return f"{table(rows, ('', 'rate'), 'lr')}\n{wrapped(str(self.disk or self.disk_problem))}"


def _data(
    files: Sequence[str], rows: int | None, row_bytes: int | None, batch_size: int | None
) -> Data | None:
    """Return the data that the user asks about; None if it is unknown."""
    if files and (rows or row_bytes):
        raise click.UsageError(
            "FILE and --rows or --row-bytes: a file has its own; give one of them"
        )
    if (rows is None) != (row_bytes is None):
        raise click.UsageError(
            "--rows and --row-bytes go together: "
            "1,000,000 rows of 512 bytes are --rows 1000000 --row-bytes 512"
        )
    if files:
        return _data_of(files, batch_size)
    if rows is None or row_bytes is None:
        return None
    words = f"{rows:,} rows of {human(row_bytes)}, {human(rows * row_bytes)}"
    return Data(rows, row_bytes, batch_size or usual_batch(row_bytes), words)


def _data_of(files: Sequence[str], batch_size: int | None) -> Data:
    """Return the rows of files as data."""
    named = format_of(files[0])
    if (matrix := sparse_rows(files)) is not None:
        with contextlib.closing(matrix):
            nbytes = max(1, round(matrix.mean_row_nbytes))
            batch = batch_size or usual_batch(nbytes)
            words = sparse_described(matrix, files[0])
            return Data(matrix.n_rows, nbytes, batch, words, named and named[0], is_decoded=True)
    with contextlib.closing(open_rows(files)) as store:
        batch = batch_size or usual_batch(store.row_nbytes)
        data = Data(store.n_rows, store.row_nbytes, batch, described(store))
        path = store.paths[0]
        if named is not None:
            return data._replace(path=path, is_decoded=True, order="chunk_shuffled(store)")
        # A remote file has no local path.
        if os.path.exists(path):
            data = data._replace(path=path, start=read_header(path).offset)
        return data


def _route(gpu: Gpu, optional: Sequence[Package], data: Data | None) -> str:
    """Say which route rows would take to the device."""
    if not gpu.name:
        return (
            "Without a GPU, pinfeed copies rows straight into each batch. With a GPU, it would "
            "copy rows of files through page-locked (pinned) buffers (the staged route)."
        )
    files = (
        "Rows of files take the staged route: pinfeed gathers them into page-locked (pinned) "
        "buffers and copies these to the GPU."
    )
    if any(package.name == "CuPy" and not package.here for package in optional):
        return (
            f"{files} With CuPy (see above), GPU kernels could also read rows straight from a "
            "PinnedStore (the direct route)."
        )
    if data is None or not data.row_nbytes:
        return (
            f"{files} For rows of a PinnedStore, pinfeed measures whether the direct route is "
            "faster, where GPU kernels read the rows themselves. Give FILE, or --rows and "
            "--row-bytes, to measure it."
        )
    from pinfeed.feeders.feeder import Feeder
    from pinfeed.stores import PinnedStore

    n_rows = max(1, min(data.n_rows, _TABLE_BYTES // data.row_nbytes))
    with saying("measuring the routes of rows to the GPU"):
        try:
            store = PinnedStore.empty((n_rows, data.row_nbytes), "uint8")
            with Feeder(store, batch_size=data.batch_size, shuffle=True, device="cuda") as feeder:
                found = feeder.plan
        except PinfeedError as error:
            return f"{files} For a PinnedStore, the faster route could not be measured: {error}"
    notes = "; ".join(found.notes)
    return f"{files} Rows of this size in a PinnedStore take the {found.route} route: {notes}."


def _host_values(host: Host) -> dict[str, Any]:
    limits = [
        {"name": limit.name, "bytes": limit.total, "free_bytes": max(0, limit.free)}
        for limit in host.limits
    ]
    return {**asdict(host), "limits": limits, "compiled_problem": why_not()}


def _data_values(data: Data, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "n_rows": data.n_rows,
        "row_nbytes": data.row_nbytes,
        "batch_size": data.batch_size,
        "nbytes": data.nbytes,
        "batch_ms": ceilings.batch_ms(data.batch_nbytes),
    }


def _machine_text(host: Host, gpu: Gpu) -> str:
    limits = [
        (limit.name, f"{human(limit.total)}, {human(max(0, limit.free))} free")
        for limit in host.limits
    ]
    locked = "unlimited"
    if host.lock_limit is not None:
        locked = f"{human(host.lock_limit)} (ulimit -l; the CUDA driver may exceed it)"
    cores = str(host.cores)
    if host.usable_cores < host.cores:
        cores = f"{host.usable_cores} of {host.cores} usable"
    if host.core_quota is not None:
        cores += f", limited to the CPU time of {host.core_quota:g} cores (control group)"
    built = f"for CUDA {gpu.torch_cuda}" if gpu.torch_cuda else "without CUDA"
    driver = f"driver for CUDA {gpu.driver_cuda}" if gpu.driver_cuda else "no NVIDIA driver"
    device = "none that torch can use"
    if gpu.name:
        which = f"{gpu.name} (one of {gpu.count})" if gpu.count > 1 else gpu.name
        device = f"{which}, {human(gpu.total)}, {human(gpu.free)} free"
    pairs = [
        ("memory", f"{human(host.memory)}, a feeder may use {human(host.free)}"),
        *(limits or [("limits", "only the memory of the machine")]),
        ("memlock", locked),
        ("cores", cores),
        ("copies", f"by numpy, because {why}" if (why := why_not()) else "by compiled code"),
        ("GPU", device),
        ("", f"torch {gpu.torch}, {built}; {driver}"),
    ]
    return facts(pairs)


def _packages_text(optional: Sequence[Package]) -> str:
    missing = [package for package in optional if not package.here]
    rows = [
        (package.name, "installed" if package.here else "missing", package.purpose)
        for package in optional
    ]
    lines = [table(rows, ("package", "", "for"))]
    lines += [
        wrapped(f"{package.name}: {package.problem}") for package in missing if package.problem
    ]
    if missing:
        lines.append(f"\n  {install_line(*(package.extra for package in missing))}")
    return "\n".join(lines)


def _advice_text(data: Data | None, ceilings: Ceilings, advice: Advice | None) -> str:
    if data is None or advice is None:
        return wrapped("Give a FILE, or --rows and --row-bytes of your data.", " ", " ")
    times = ", ".join(
        f"{way} {spelled(ms)}" for way, ms in ceilings.batch_ms(data.batch_nbytes).items()
    )
    batches = f"batches of {data.batch_size:,} rows, {human(data.batch_nbytes)}"
    head = f"{data.words}; {batches}. Least time per batch: {times}."
    if data.is_decoded:
        head += (
            " These times are for rows that are stored as they are. Chunks take additional time "
            "to decode, and compressed chunks take less time to read."
        )
    return "\n".join(wrapped(text, "  ", "  ") for text in (head, *advice.why))
