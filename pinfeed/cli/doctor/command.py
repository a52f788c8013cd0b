"""``pinfeed doctor``: look at the machine and measure what it does at best, in seconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import click

from pinfeed.cli.doctor.advice import Ceilings, Data, advise
from pinfeed.cli.doctor.disk import look_at_disk
from pinfeed.cli.doctor.machine import Gpu, Host, Package, packages
from pinfeed.cli.doctor.report import Diagnosis, Subject
from pinfeed.cli.measure.bandwidth import link_rates, memory_rate
from pinfeed.cli.terminal.output import Report, saying
from pinfeed.cli.terminal.sources import described, open_rows, usual_batch
from pinfeed.errors import PinfeedError
from pinfeed.memory.units import human
from pinfeed.stores.formats.npy import read_header

_PAGE_BYTES = 4096
_LINK_BYTES = 256 << 20
# Of the table on which the route is measured.
_TABLE_BYTES = 256 << 20


def doctor(
    files: Sequence[str],
    *,
    rows: int | None,
    row_bytes: int | None,
    batch_size: int | None,
    directory: str | None,
) -> Report:
    """Look at the machine and, where it is known what data there will be, say whether pinfeed helps."""
    if files and (rows or row_bytes):
        raise click.UsageError(
            "FILE and --rows or --row-bytes: a file has its own; give one of them"
        )
    if (rows is None) != (row_bytes is None):
        raise click.UsageError(
            "--rows and --row-bytes go together: 1,000,000 rows of 512 bytes are --rows 1000000 --row-bytes 512"
        )
    subject = _subject_of(files, batch_size) if files else None
    if rows is not None and row_bytes is not None:
        data = Data(rows, row_bytes, batch_size or usual_batch(row_bytes))
        subject = Subject(data, f"{rows:,} rows of {human(row_bytes)}, {human(data.nbytes)}")
    diagnosis = _diagnosis(subject, directory)
    return Report(
        diagnosis.values, diagnosis.text, (diagnosis.gpu.problem,) if diagnosis.gpu.problem else ()
    )


def _subject_of(files: Sequence[str], batch_size: int | None) -> Subject:
    with contextlib.closing(open_rows(files)) as store:
        data = Data(store.n_rows, store.row_nbytes, batch_size or usual_batch(store.row_nbytes))
        # Else it is elsewhere.
        path = store.paths[0] if os.path.exists(store.paths[0]) else None
        return Subject(data, described(store), path, read_header(path).offset if path else 0)


def _diagnosis(subject: Subject | None, directory: str | None) -> Diagnosis:
    host, gpu = Host.now(), Gpu.now()
    data, path, start = (subject.data, subject.path, subject.start) if subject else (None, None, 0)
    with saying("copying in memory"):
        memory = memory_rate()
    disk, disk_problem = look_at_disk(
        path, start, data.row_nbytes if data else _PAGE_BYTES, directory
    )
    link = {}
    if gpu.name:
        with saying("copying to the GPU"):
            link = link_rates("cuda", min(_LINK_BYTES, gpu.free // 4))
    optional = packages(gpu)
    in_sequence, at_random = (disk.sequential, disk.random) if disk else (None, None)
    ceilings = Ceilings(memory, in_sequence, at_random, link.get("to_device_pinned"))
    advice = (
        advise(data, ceilings, free_host=host.free, gpu=gpu.name, free_gpu=gpu.free)
        if data
        else None
    )
    return Diagnosis(
        host,
        gpu,
        disk,
        disk_problem,
        link,
        ceilings,
        optional,
        _route(gpu, optional, data),
        subject,
        advice,
    )


def _route(gpu: Gpu, optional: Sequence[Package], data: Data | None) -> str:
    """How rows would come to the device."""
    if not gpu.name:
        return "Without a GPU there is one way: batches are gathered where they are lent. Rows of files for a GPU would be staged."
    files = "Rows of files are staged: gathered into page-locked buffers, and copied."
    if any(package.name == "CuPy" and not package.here for package in optional):
        return f"{files} Rows of a PinnedStore could be read by the GPU itself; that needs CuPy (above)."
    if data is None or not data.row_nbytes:
        return f"{files} For rows of a PinnedStore it is measured which way is faster: give FILE, or --rows and --row-bytes, to hear it."
    from pinfeed.feeders.feeder import Feeder
    from pinfeed.stores import PinnedStore

    n_rows = max(1, min(data.n_rows, _TABLE_BYTES // data.row_nbytes))
    with saying("moving rows to the GPU in each way"):
        try:
            table = PinnedStore.empty((n_rows, data.row_nbytes), "uint8")
            with Feeder(table, batch_size=data.batch_size, shuffle=True, device="cuda") as feeder:
                found = feeder.plan
        except PinfeedError as error:
            return f"{files} For rows of a PinnedStore it could not be measured: {error}"
    return f"{files} Rows of this size in a PinnedStore go by the {found.route} route: {'; '.join(found.notes)}."
