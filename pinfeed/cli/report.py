"""Report: the result of a command, as text for 80 columns and as plain values for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from pinfeed.errors import PinfeedError
from pinfeed.validation.messages import wrapped


@dataclass(frozen=True)
class Report:
    """The result of a command.

    Attributes:
        values: The result for scripts, in types that JSON has.
        text: The result for people.
        errors: A sentence for each file that cannot be read; the exit status is 2 if there is one.
    """

    values: Mapping[str, Any]
    text: str
    errors: Sequence[str] = ()


def in_words(error: Exception) -> str:
    """Return the message of an error, which names the file."""
    if isinstance(error, OSError) and not isinstance(error, PinfeedError):
        return f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"
    return str(error)


def table(columns: Mapping[str, Sequence[str]]) -> str:
    """Format columns as a table, without the empty ones; sizes are aligned to the right."""
    used = {title: cells for title, cells in columns.items() if any(cells)}
    sides = ["right" if title == "size" else "left" for title in used]
    # Cells are text, which tabulate would otherwise parse as numbers.
    return tabulate(used, headers="keys", colalign=sides, disable_numparse=True) if used else ""


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Format names and values below a title, one pair a line; pairs without a value are left out.

    Args:
        title: The title.
        pairs: Names and values; pairs without a name continue the pair above.
    """
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 4
    lines = [
        wrapped(value, first=f"  {name}".ljust(width), rest=" " * width) for name, value in shown
    ]
    return "\n".join([title, *lines])
