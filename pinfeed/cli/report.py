"""Report: the result of a command, as text for 80 columns and as plain values for scripts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from tabulate import tabulate

from pinfeed.validation.wrapping import wrapped


@dataclass(frozen=True)
class Report:
    """The result of a command.

    Attributes:
        values: The result for scripts, in types that JSON has.
        text: The result for people.
        findings: A sentence for each thing that is wrong; the exit status is 1 if there is one.
    """

    values: Mapping[str, Any]
    text: str
    findings: tuple[str, ...] = ()


def json_of(values: Mapping[str, Any]) -> str:
    """Return values as one JSON object; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_plain(values), indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(rows: Iterable[Sequence[str]], headers: Sequence[str], align: str = "") -> str:
    """Format rows as a table.

    Args:
        rows: The cells of each row.
        headers: The title of each column.
        align: ``l`` or ``r`` for each column; columns without a letter are left-aligned.
    """
    shown = list(rows)
    sides = [{"l": "left", "r": "right"}[side] for side in align.ljust(len(headers), "l")]
    return tabulate(
        shown, headers=headers, colalign=sides if shown else None, disable_numparse=True
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Format names and values, one pair a line; pairs without a value are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 4
    return "\n".join(
        wrapped(value, first=f"  {name}".ljust(width), rest=" " * width) for name, value in shown
    )


def sections(parts: Mapping[str, str]) -> str:
    """Join titles with the text below each; a title without text is left out."""
    return "\n\n".join(f"{title}\n{text}" for title, text in parts.items() if text)


@contextlib.contextmanager
def saying(what: str) -> Iterator[None]:
    """Show on a terminal what the command is doing, until the context ends."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"{what} …", err=True, nl=False)
    try:
        yield
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)
