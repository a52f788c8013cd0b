"""The ``pinfeed`` command: its subcommands with their options, and its exit statuses.

The modules that do the work are imported when a subcommand runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from pinfeed import __version__
from pinfeed.cli.options import counts, size, with_orders, with_sources, with_windows
from pinfeed.cli.report import Report, json_of
from pinfeed.errors import PinfeedError
from pinfeed.memory.depth import MAX_DEPTH
from pinfeed.validation.wrapping import wrapped

FINDING = 1
FAILED = 3
INTERRUPTED = 130
"""Exit statuses other than 0, and other than 2, with which click reports wrong usage."""


class _Commands(click.Group):
    """The subcommands; an stdout that cannot be written ends them with a message."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # If the reader of a pipe has exited, click exits without a message.
            return super().main(*args, **kwargs)
        except OSError as error:
            # The subcommands report the errors of files themselves.
            click.echo(f"pinfeed: stdout: {error.strerror}", err=True)
            # The text is still in the buffer of stdout. Python writes it at exit, and would fail
            # again, with a message and an exit status of its own.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            sys.exit(FAILED)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.version_option(__version__, prog_name="pinfeed")
def main() -> None:
    """Inspect a machine and files, and show what pinfeed would do with them.

    FILE is a .npy file, a quoted pattern of shards ("features-*.npy"), or several
    files, which are shards of one source. inspect, plan and doctor also read x.h5:/images,
    x.h5ad:layers/counts, x.zarr and x.parquet:column. Inputs and their labels are two sources:
    plan images.npy --with labels.npy. Sizes are written 2GiB, 512MiB, 1.5e9.

    Exit status: 0 success; 1 a problem was found (a file that inspect reports, a plan that
    does not fit, batches that differ, a GPU that cannot be used); 2 wrong usage; 3 failure
    (such as a file that plan, doctor or bench cannot read); 130 interrupted.
    """


def reporting(function: Callable[..., Report]) -> Callable[..., None]:
    """Turn a function into a command that prints its report and sets the exit status.

    With ``--json`` the report is one object, and nothing else is on stdout.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.pass_context
    @functools.wraps(function)
    def command(ctx: click.Context, /, *, as_json: bool, **options: Any) -> None:
        head = {"pinfeed": __version__, "command": ctx.info_name}
        try:
            report = function(**options)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (PinfeedError, OSError) as error:
            message = " ".join(str(error).split())
            if as_json:
                click.echo(json_of({**head, "error": message, "kind": type(error).__name__}))
            click.echo(f"pinfeed: {message}", err=True)
            ctx.exit(FAILED)
        click.echo(_shown(report, head if as_json else None))
        ctx.exit(FINDING if report.findings else 0)

    return command


def _shown(report: Report, head: dict[str, Any] | None) -> str:
    """Return a report as text for people, or as JSON that begins with ``head``."""
    if head is not None:
        return json_of({**head, **report.values, "findings": report.findings})
    findings = [wrapped(finding, first="! ", rest="  ") for finding in report.findings]
    return "\n\n".join(filter(None, [report.text, "\n".join(findings)]))


_device = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."
)


@main.command(short_help="Report what this machine can do, and whether pinfeed helps.")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--rows", type=click.IntRange(1), help="Number of rows of the data, without a FILE.")
@click.option("--row-bytes", type=size, metavar="SIZE", help="Bytes per row, without a FILE.")
@click.option("--batch-size", type=click.IntRange(1), metavar="ROWS", help="Rows per batch.")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help="Measure the disk of this folder, with a scratch file that is removed afterwards.",
)
@click.option(
    "--ids",
    metavar="FILE",
    help="Row indices in training order (.npy): report which GPU cache helps.",
)
@click.option(
    "--host-transform",
    metavar="MODULE:FUNCTION",
    help="Time this host_transform on a batch of FILE: report whether transform_threads help.",
)
@reporting
def doctor(**options: Any) -> Report:
    """Report what this machine can do, and whether pinfeed helps.

    The report lists memory limits, the GPU, the highest measured rates and missing packages. With
    FILE, or with --rows and --row-bytes, it says whether pinfeed would help with such data. FILE
    may also be a sparse matrix, such as cells.h5ad. With --ids, it also says how large a GPU cache
    should be. With --host-transform, it says whether several threads would call that function
    faster.
    """
    from pinfeed.cli import doctor

    return doctor.doctor(**options)


@main.command(short_help="Print the plan that a Feeder over files would have.")
@with_sources
@with_orders
@with_windows
@click.option(
    "--gpu-limit",
    type=size,
    metavar="SIZE",
    help="GPU memory that batches may use (Config's gpu_memory_limit).",
)
@click.option(
    "--cpu-limit",
    type=size,
    metavar="SIZE",
    help="Host memory that the feeder may use (Config's cpu_memory_limit).",
)
@click.option(
    "--depth",
    type=click.IntRange(0, MAX_DEPTH),
    help="Number of prefetched batches; 0 is the synchronous loop. By default, pinfeed chooses.",
)
@_device
@reporting
def plan(**options: Any) -> Report:
    """Print the plan that a Feeder over these files would have.

    The plan shows the batch size, the use of memory, and how the rows are read. For ragged rows,
    it also shows the share of padding.

    With limits and no --batch-size, the batch is the largest that fits, up to 65,536 rows or 64
    MiB. --device cuda also plans for a GPU on a machine without one.
    """
    from pinfeed.cli import plan
    from pinfeed.cli.orders import OrderOptions

    names = [field.name for field in dataclasses.fields(OrderOptions)]
    of_order = OrderOptions(**{name: options.pop(name) for name in names})
    return plan.plan(options=of_order, **options)


@main.command(short_help="Compare a Feeder over your files with a plain DataLoader.")
@with_sources
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Time for the later epochs of each loader; a first epoch may take 4 times as long. "
    "At least 8 batches are timed.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    metavar="MS",
    help="Approximate time of the training step with which waits are measured; 0 for none.",
)
@click.option(
    "--workers",
    type=counts,
    default="0,2",
    show_default=True,
    metavar="N,N",
    help="num_workers of the DataLoaders to compare.",
)
@click.option(
    "--warm/--cold",
    default=None,
    help="Begin with the files in the page cache, or dropped from it. [default: warm if they fit]",
)
@_device
@reporting
def bench(**options: Any) -> Report:
    """Compare a Feeder over these files with a plain DataLoader.

    Both deliver the same rows in the same order, which is checked first. The DataLoader reads
    numpy.load(mmap_mode="r"). The first epoch and later epochs are timed separately. Then each
    loader runs with the same training step, and the time that the loop waits is measured.
    """
    from pinfeed.cli import bench

    return bench.bench(**options)


@main.command(short_help="Show the contents of files, and report damage.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@reporting
def inspect(**options: Any) -> Report:
    """Show the contents of files, and report damage.

    The report shows shape, dtype, memory order, shards and damage of .npy files, the tensors of
    safetensors files, and pinfeed checkpoints with verified checksums. Of HDF5 (.h5, .hdf5, .h5ad),
    Zarr and Parquet files, it lists what can be a source: datasets, arrays, columns, and sparse
    matrices of AnnData. Give FILE:NAME for one of them. Apart from checkpoints, only headers and
    metadata are read. Nothing is unpickled.
    """
    from pinfeed.cli import inspect

    return inspect.inspect(**options)
