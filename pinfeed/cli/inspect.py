"""``pinfeed inspect``: the sources in files and folders. Nothing is unpickled."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from pinfeed.cli.parts import parts_of, source_of, split_name
from pinfeed.cli.report import Report, in_words, table
from pinfeed.errors import PinfeedError, StoreError
from pinfeed.memory.units import human
from pinfeed.stores.formats import FORMATS, Part, format_of
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.safe_repr import wrapped

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
