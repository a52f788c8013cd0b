"""Options of the ``pinfeed`` command that several subcommands share, and how they are parsed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import parse_size


def size(text: str) -> int:
    """Parse a number of bytes: ``2GiB``, ``512MiB``, ``1.5e9``."""
    try:
        return parse_size(text, "size")
    except ArgumentError:
        raise click.BadParameter(
            f"{text!r} is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9"
        ) from None


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers that are separated by commas: ``0,2``."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise click.BadParameter(f"{text!r} is not a list of numbers; expected such as 0 or 0,2,8")
    return tuple(map(int, text.split(",")))


def numbers(text: str) -> int | tuple[int, ...]:
    """Parse a number, or numbers that are separated by commas, one for each axis."""
    found = counts(text)
    return found if len(found) > 1 else found[0]


def weights(text: str) -> tuple[float, ...]:
    """Parse weights that are separated by commas: ``0.7,0.3``."""
    try:
        found = tuple(float(weight) for weight in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(weight > 0 and math.isfinite(weight) for weight in found):
        raise click.BadParameter(
            f"{text!r} is not a list of weights; expected numbers above 0, such as 0.7,0.3"
        )
    return found


def with_orders(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for orders that only ``plan`` knows."""
    for decorate in (
        click.option(
            "--world-size",
            type=click.IntRange(1),
            metavar="RANKS",
            help="Plan for the first of this many ranks, which share the rows.",
        ),
        click.option(
            "--packed",
            type=click.IntRange(1),
            metavar="ELEMENTS",
            help="Pack ragged rows into sequences of this many elements; --batch-size is the "
            "number of sequences of a batch, 1 by default.",
        ),
        click.option(
            "--max-elements",
            type=click.IntRange(1),
            metavar="ELEMENTS",
            help="Batches of ragged rows of similar lengths, with at most this many elements, "
            "padding included.",
        ),
        click.option(
            "--bucketed",
            is_flag=True,
            help="Batches of --batch-size ragged rows of similar lengths.",
        ),
        click.option(
            "--offsets",
            metavar="FILE",
            help="FILE has the items of ragged rows, and this .npy file the position of each row, "
            "and the end of the last one.",
        ),
        click.option(
            "--weights",
            type=weights,
            metavar="W,W",
            help="Mix the rows of several FILEs by weight, such as 0.7,0.3. A quoted pattern of "
            "shards is one FILE.",
        ),
        click.option(
            "--window-blocks",
            type=click.IntRange(1),
            metavar="BLOCKS",
            help="Number of blocks that are mixed, with --block-rows.  [default: 16]",
        ),
    ):
        command = decorate(command)
    return command


def with_windows(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for windows along axes, with the names that ``windows`` of a store uses."""
    for decorate in (
        click.option(
            "--step",
            type=numbers,
            metavar="N",
            help="Indices from the beginning of one window to that of the next.  [default: 1]",
        ),
        click.option(
            "--stride",
            type=numbers,
            metavar="N",
            help="Indices from one index of a window to the next.  [default: 1]",
        ),
        click.option(
            "--length",
            type=numbers,
            metavar="N",
            help="The rows are windows of this many indices along --axis. Several axes have "
            "commas: --axis 1,2 --length 64,64.",
        ),
        click.option(
            "--axis",
            type=numbers,
            metavar="N",
            help="Axis of the windows of --length, counted from 0.  [default: 0]",
        ),
    ):
        command = decorate(command)
    return command


def with_sources(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments for sources and row order, with the names that ``Feeder`` uses."""
    for decorate in (
        click.option(
            "--seed", type=int, default=None, show_default="0", help="Seed of the random order."
        ),
        click.option(
            "--block-rows",
            type=click.IntRange(1),
            metavar="ROWS",
            help="Random order of contiguous blocks, with this many rows per block.",
        ),
        click.option("--shuffle", is_flag=True, help="Fully random order of rows."),
        click.option(
            "--batch-size", type=click.IntRange(1), metavar="ROWS", help="Rows per batch."
        ),
        click.option(
            "--with",
            "others",
            multiple=True,
            metavar="FILE",
            help="Another source with one row for each row of FILE, such as labels for images: a "
            "file or a quoted pattern. May be repeated.",
        ),
        click.argument("files", nargs=-1, required=True, metavar="FILE..."),
    ):
        command = decorate(command)
    return command
