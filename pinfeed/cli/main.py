"""The ``pinfeed`` command: its subcommands with their options, and its exit statuses.

The modules that do the work are imported when a subcommand runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pinfeed import __version__
from pinfeed.cli.inspect import Report, in_words
from pinfeed.errors import ArgumentError, PinfeedError
from pinfeed.memory.units import parse_size
from pinfeed.stores.formats import FORMATS

FAILED = 2
INTERRUPTED = 130
"""Exit statuses other than 0; argparse uses 2 for wrong usage, too."""

_KINDS = sorted(kind for kind, one in FORMATS.items() if one.suffixes)
_EPILOG = f"""\
FILE is a file of one of these formats, whatever its extension, or a quoted
pattern of shards: {", ".join(_KINDS)}.
FILE:NAME is one dataset, array, column or tensor of it: x.h5:/images.
Exit status: 0, or 2 with a reason on stderr.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command, and exit.

    Args:
        arguments: The arguments after the name of the program; None for those of the process.
    """
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        try:
            status = _run(_parser().parse_args(arguments))
        finally:
            # argparse prints the help and exits.
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        # The subcommands report the errors of files themselves.
        print(f"pinfeed: stdout: {error.strerror or error}", file=sys.stderr)
        # Python writes the rest of the text when it exits, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = FAILED
    sys.exit(status)


def _run(options: argparse.Namespace) -> int:
    """Run a subcommand, print its report, and return the exit status."""
    head = {"pinfeed": __version__, "command": options.command}
    try:
        report = _report(options)
    except (PinfeedError, OSError) as error:
        report = Report({}, "", [in_words(error)])
    errors = [" ".join(error.split()) for error in report.errors]
    if options.json:
        print(json.dumps({**head, **report.values, "errors": errors}, indent=1), flush=True)
    elif report.text:
        print(report.text, flush=True)
    for line in errors:
        print(f"pinfeed: {line}", file=sys.stderr)
    return FAILED if errors else 0


def _report(options: argparse.Namespace) -> Report:
    if options.command == "doctor":
        from pinfeed.cli.doctor import doctor

        return doctor(options.file)
    if options.command == "inspect":
        from pinfeed.cli.inspect import inspect

        return inspect(options.files)
    if options.command == "index":
        from pinfeed.cli.index import index

        return index(options.files)
    from pinfeed.cli.plan import plan

    return plan(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pinfeed",
        description="Show what this machine and files can do, and the plan of a feeder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pinfeed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.add_argument("--json", action="store_true", help="Print one JSON object.")
        return made

    doctor = command("doctor", "Report what this machine can do and, given a file, this file.")
    doctor.add_argument("file", nargs="?", metavar="FILE")
    inspect = command("inspect", "List the sources in files or folders, with shapes and dtypes.")
    inspect.add_argument("files", nargs="+", metavar="FILE")
    index = command("index", "Write the index of .tar archives that pinfeed.TarDataset reads.")
    index.add_argument("files", nargs="+", metavar="FILE")
    _add_plan_options(command("plan", "Print the plan that a Feeder over files would have."))
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``, with the names that a feeder uses."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="Shards of one source.")
    parser.add_argument("--batch-size", type=_count, metavar="ROWS", help="Rows per batch.")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--shuffle", action="store_true", help="Shuffle all rows.")
    order.add_argument(
        "--block-rows", type=_count, metavar="ROWS", help="Shuffle blocks of this many rows."
    )
    parser.add_argument(
        "--cpu-limit", type=_size, metavar="SIZE", help="Limit of host memory, such as 2GiB."
    )
    parser.add_argument(
        "--gpu-limit",
        type=_size,
        metavar="SIZE",
        help="Limit of GPU memory; the plan is then for a GPU, also on a machine without one.",
    )
    parser.add_argument(
        "--length",
        type=_counts,
        metavar="N",
        help="The rows are windows of this many indices along --axis.",
    )
    parser.add_argument(
        "--axis",
        type=_counts,
        metavar="N",
        help="Axis of the windows, 0 by default; several with commas: --axis 1,2 --length 64,64.",
    )


def _size(text: str) -> int:
    try:
        return parse_size(text, "size")
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9"
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, at least 1")
    return int(text)


def _counts(text: str) -> int | tuple[int, ...]:
    """Parse a number, or numbers that are separated by commas, one for each axis."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number such as 1, or 1,2")
    found = tuple(map(int, parts))
    return found if len(found) > 1 else found[0]
