"""Report: what a command found, as text for a terminal of 80 columns and as plain values for scripts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from tabulate import tabulate

WIDTH = 80


@dataclass(frozen=True)
class Report:
    """What a command found.

    Attributes:
        values: For scripts: what JSON can hold.
        text: For people.
        findings: What is wrong, a sentence each; the command's exit status is 1 if there is one.
    """

    values: Mapping[str, Any]
    text: str
    findings: tuple[str, ...] = ()


def json_of(values: Mapping[str, Any]) -> str:
    """One JSON object; what is no number in JSON becomes null."""
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
    """Columns; ``align`` has an ``l`` or ``r`` for each, as far as they are not left-aligned."""
    shown = list(rows)
    sides = [{"l": "left", "r": "right"}[side] for side in align.ljust(len(headers), "l")]
    return tabulate(
        shown, headers=headers, colalign=sides if shown else None, disable_numparse=True
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, below each other; what is long goes on in the next line."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 4
    return "\n".join(
        wrapped(value, first=f"  {name}".ljust(width), rest=" " * width) for name, value in shown
    )


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph of at most ``WIDTH`` columns; a path or a command is never broken."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def sections(parts: Mapping[str, str]) -> str:
    """Titles with their text below."""
    return "\n\n".join(f"{title}\n{text}" for title, text in parts.items() if text)


@contextlib.contextmanager
def saying(what: str) -> Iterator[None]:
    """Show on a terminal what is being waited for; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"{what} …", err=True, nl=False)
    try:
        yield
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)
