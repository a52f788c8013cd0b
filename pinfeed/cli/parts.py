"""Sources in the files that the command line names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from pinfeed.errors import StoreError
from pinfeed.stores.formats import FORMATS, Part, format_of, missing_part
from pinfeed.stores.paths import has_protocol


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
