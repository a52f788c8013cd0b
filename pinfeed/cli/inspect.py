"""``pinfeed inspect``; sources in files, and reports, for all commands. Nothing is unpickled."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from pinfeed.errors import PinfeedError, StoreError
from pinfeed.memory.units import human
from pinfeed.stores.formats import FORMATS, Part, format_of, missing_part
from pinfeed.stores.paths import has_protocol
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


# Sources and problems that are listed for people.
_SHOWN = 40
_SHOWN_PROBLEMS = 8


def inspect(files: Sequence[str]) -> Report:
    """Report on the sources in each file or folder."""
    parts: list[Part] = []
    errors = []
    for name in (name for given in files for name in _expanded(given)):
        try:
            found, problems = _found(name)
        except (PinfeedError, OSError) as error:
            found, problems = [], [in_words(error)]
        parts += found
        errors += problems
    values = {"sources": [part.values for part in parts]}
    return Report(values, _text(parts), errors)


def _expanded(name: str) -> list[str]:
    """Return the files that match a pattern; any other name stays."""
    return [name] if os.path.exists(name) else sorted(glob.glob(name)) or [name]


def _found(name: str) -> tuple[list[Part], list[str]]:
    """Return the parts of a file or a folder, and an error for each file that cannot be read."""
    if has_protocol(name):
        return [source_of([name])], []
    path, inner = split_name(name)
    if inner is not None or format_of(path) is not None:
        return parts_of(path, inner), []
    names = sorted(os.listdir(path))
    if any(len(name) == 8 and name.isdigit() for name in names):
        raise StoreError(
            f"{path} is a checkpoint; call pinfeed.checkpoint.check({path!r}) to compare it with "
            "its checksums"
        )
    parts: list[Part] = []
    errors = []
    for file in (os.path.join(path, name) for name in names):
        try:
            kind = format_of(file)
        except StoreError as error:
            parts.append(Part(file, "other", problem=str(error)))
            continue
        try:
            parts += parts_of(file) if kind is not None else []
        except (PinfeedError, OSError) as error:
            errors.append(in_words(error))
    if not parts and not errors:
        errors = [f"{path} is a folder without files; expected files with arrays"]
    return parts, errors


def _text(parts: Sequence[Part]) -> str:
    sources = [part for part in parts if not part.problem]
    problems = [part.problem for part in parts if part.problem]
    if len(parts) > 1:
        # The rest of a problem says what to do.
        problems = [problem.partition("; ")[0] for problem in problems]
    shown = sources[:_SHOWN]
    texts = [
        table(
            {
                "source": [str(part) for part in shown],
                "shape": [str(part.shape) for part in shown],
                "dtype": [part.dtype for part in shown],
                "size": [human(part.nbytes) for part in shown],
                "stored": [part.stored for part in shown],
            }
        )
        + _more(len(sources), _SHOWN)
    ]
    kinds = dict.fromkeys(part.kind for part in sources)
    texts.append("\n".join(f"{FORMATS[kind].usage}." for kind in kinds))
    if problems:
        lines = [wrapped(f"- {one}", rest="  ") for one in problems[:_SHOWN_PROBLEMS]]
        title = "Not sources" + " (pinfeed inspect FILE:NAME says what to do)" * (len(parts) > 1)
        texts.append("\n".join([title, *lines]) + _more(len(problems), _SHOWN_PROBLEMS))
    return "\n\n".join(filter(None, texts))


def _more(n: int, n_shown: int) -> str:
    return f"\n… and {n - n_shown:,} more (--json lists all)" if n > n_shown else ""


def split_name(text: str) -> tuple[str, str | None]:
    """Return the path and the name in FILE:NAME; the name is None for FILE alone.

    A path may contain colons, so the path is the shortest one that exists.
    """
    # A shell completes the name of a folder with a slash.
    parts = text.rstrip("/").split(":")
    for n in range(1, len(parts)):
        path = ":".join(parts[:n])
        if path and (os.path.exists(path) or glob.glob(path)):
            return path, ":".join(parts[n:])
    return text.rstrip("/") or text, None


def source_of(files: Sequence[str]) -> Part:
    """Return the one source that files of the command line name.

    Raises:
        PinfeedError: If a file cannot be read, or has no source or several.
    """
    if has_protocol(files[0]) or len(files) > 1:
        kind = "remote" if has_protocol(files[0]) else "npy"
        return FORMATS[kind].described(list(files))
    path, name = split_name(files[0])
    if format_of(path) is None:
        raise StoreError(
            f"{path} is a folder; expected one of its files, or a quoted pattern of shards such "
            f"as {os.path.join(path, '*.npy')}; pinfeed inspect {path} lists the sources in it"
        )
    found = parts_of(path, name)
    sources = [part for part in found if not part.problem]
    if len(sources) == 1:
        return sources[0]
    if not sources:
        raise StoreError(found[0].problem)
    raise StoreError(
        f"{files[0]} has {len(sources)} sources; expected the name of one, such as {sources[0]}; "
        f"pinfeed inspect {files[0]} lists them"
    )


def parts_of(path: str, name: str | None = None) -> list[Part]:
    """List the parts of a file, or those at one name of it.

    Args:
        path: A file, a folder that is one source or several ones, or a pattern.
        name: Name of an array, group, tensor or column, or columns with commas; None for all.

    Raises:
        PinfeedError: If the file or the name does not exist, or the file is damaged.
    """
    kind = format_of(path)
    if kind is None:
        raise missing_part(path, str(name))
    found = kind.parts(path, name)
    if not found:
        where = path if name is None else f"{path}:{name}"
        raise StoreError(f"{where} has nothing that could be a source; expected at least one array")
    return found
