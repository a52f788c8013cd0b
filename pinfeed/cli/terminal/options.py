"""Options that several commands share: sizes, lists of numbers, the order of rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import parse_size


def size(text: str) -> int:
    """Parse a number of bytes: ``2GiB``, ``512MiB``, ``1.5e9``.

    Raises:
        click.BadParameter: If the text is no size, or the size is below 1.
    """
    try:
        return parse_size(text, "size")
    except ArgumentError:
        raise click.BadParameter(
            f"{text!r} is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9"
        ) from None


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers that are separated by commas: ``0,2``.

    Raises:
        click.BadParameter: If the text is no such list.
    """
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise click.BadParameter(f"{text!r} is not a list of numbers; expected such as 0 or 0,2,8")
    return tuple(map(int, text.split(",")))


def order_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for row order and batch size, with the names that ``Feeder`` uses."""
    for option in (
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
    ):
        command = option(command)
    return command


def order_of(shuffle: bool, block_rows: int | None, seed: int | None) -> tuple[Any, str]:
    """Return the order that the options select, and its name for people.

    Raises:
        click.UsageError: If two orders were given, or a seed without a random order.
    """
    from pinfeed.rows.orders import block_shuffled, sequential, shuffled

    if shuffle and block_rows is not None:
        raise click.UsageError("--shuffle and --block-rows conflict; give one of them")
    if seed is not None and not shuffle and block_rows is None:
        raise click.UsageError(
            f"--seed {seed} has no effect without a random order; give --shuffle or --block-rows"
        )
    seed = seed or 0
    if block_rows is not None:
        return block_shuffled(seed, block_rows=block_rows), f"shuffled in blocks of {block_rows:,}"
    return (shuffled(seed), "shuffled") if shuffle else (sequential(), "in sequence")


def with_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option for further sources, which become a tuple with FILE for ``Feeder``."""
    words = (
        "Another source with one row for each row of FILE, such as labels for images: a file or a "
        "quoted pattern. May be repeated."
    )
    return click.option("--with", "others", multiple=True, metavar="FILE", help=words)(command)
