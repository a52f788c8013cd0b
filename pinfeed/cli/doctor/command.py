"""``pinfeed doctor``: the machine, its best rates, and whether pinfeed would help."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

import click

from pinfeed.cli.doctor.advice import Ceilings, Data, advise
from pinfeed.cli.doctor.cache import advise_on_cache
from pinfeed.cli.doctor.disk import look_at_disk
from pinfeed.cli.doctor.machine import Gpu, Host, Package, packages
from pinfeed.cli.doctor.report import Diagnosis, Subject
from pinfeed.cli.measure.bandwidth import link_rates, memory_rate
from pinfeed.cli.terminal.output import Report, saying
from pinfeed.cli.terminal.sources import described, open_rows, usual_batch
from pinfeed.errors import PinfeedError
from pinfeed.memory.units import human
from pinfeed.stores.npy import read_header

_PAGE_BYTES = 4096
_LINK_BYTES = 256 << 20
# Size of the table on which the route is measured.
_TABLE_BYTES = 256 << 20


def doctor(
    files: Sequence[str],
    *,
    rows: int | None,
    row_bytes: int | None,
    batch_size: int | None,
    directory: str | None,
    ids: str | None,
) -> Report:
    """Report on the machine and, if the data is known, on whether pinfeed helps.

    The arguments are the options of the command.
    """
    if files and (rows or row_bytes):
        raise click.UsageError(
            "FILE and --rows or --row-bytes: a file has its own; give one of them"
        )
    if (rows is None) != (row_bytes is None):
        raise click.UsageError(
            "--rows and --row-bytes go together: "
            "1,000,000 rows of 512 bytes are --rows 1000000 --row-bytes 512"
        )
    if ids is not None and not files and rows is None:
        raise click.UsageError(
            "--ids: row indices of which rows? Give FILE, or --rows and --row-bytes of the table"
        )
    subject = _subject_of(files, batch_size) if files else None
    if rows is not None and row_bytes is not None:
        data = Data(rows, row_bytes, batch_size or usual_batch(row_bytes))
        subject = Subject(data, f"{rows:,} rows of {human(row_bytes)}, {human(data.nbytes)}")
    cache = advise_on_cache(ids, subject.data) if ids is not None and subject else None
    diagnosis = replace(_diagnosis(subject, directory), cache=cache)
    findings = (diagnosis.gpu.problem,) if diagnosis.gpu.problem else ()
    return Report(diagnosis.values, diagnosis.text, findings)


def _subject_of(files: Sequence[str], batch_size: int | None) -> Subject:
    with contextlib.closing(open_rows(files)) as store:
        data = Data(store.n_rows, store.row_nbytes, batch_size or usual_batch(store.row_nbytes))
        path = store.paths[0]
        if not os.path.exists(path):
            # The file is remote.
            return Subject(data, described(store))
        return Subject(data, described(store), path, read_header(path).offset)


def _diagnosis(subject: Subject | None, directory: str | None) -> Diagnosis:
    host = Host.now()
    gpu = Gpu.now()
    data = subject.data if subject else None
    with saying("copying in memory"):
        memory = memory_rate()
    if subject is None:
        disk, disk_problem = look_at_disk(None, 0, _PAGE_BYTES, directory)
    else:
        row_nbytes = subject.data.row_nbytes
        disk, disk_problem = look_at_disk(subject.path, subject.start, row_nbytes, directory)
    link = {}
    if gpu.name:
        with saying("copying to the GPU"):
            link = link_rates("cuda", min(_LINK_BYTES, gpu.free // 4))
    optional = packages(gpu)
    ceilings = Ceilings(
        memory=memory,
        sequential=disk.sequential if disk else None,
        random=disk.random if disk else None,
        link=link.get("to_device_pinned"),
    )
    advice = None
    if data:
        advice = advise(data, ceilings, free_host=host.free, gpu=gpu.name, free_gpu=gpu.free)
    return Diagnosis(
        host=host,
        gpu=gpu,
        disk=disk,
        disk_problem=disk_problem,
        link=link,
        ceilings=ceilings,
        packages=optional,
        route=_route(gpu, optional, data),
        subject=subject,
        advice=advice,
    )


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
            table = PinnedStore.empty((n_rows, data.row_nbytes), "uint8")
            with Feeder(table, batch_size=data.batch_size, shuffle=True, device="cuda") as feeder:
                found = feeder.plan
        except PinfeedError as error:
            return f"{files} For a PinnedStore, the faster route could not be measured: {error}"
    notes = "; ".join(found.notes)
    return f"{files} Rows of this size in a PinnedStore take the {found.route} route: {notes}."
