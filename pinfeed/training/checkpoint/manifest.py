"""The manifest of a save: its files with their sizes and checksums, and of which objects they are.

It comes last, and is checked first.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any

from pinfeed.errors import CheckpointError, described
from pinfeed.training.row_file import checksums, open_plain

NAME = "manifest.json"

_FORMAT = 1
# A number for every 16 MiB of rows.
_MOST_BYTES = 64 << 20


def write_file(path: pathlib.Path, fill: Callable[[IO[bytes]], Any]) -> dict[str, Any]:
    """Write a file, on the disk when this returns: its size and checksums."""
    with open(path, "xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "crc32": checksums(str(path))}


def write(directory: pathlib.Path, files: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Write the manifest of a directory, on the disk when this returns.

    Args:
        directory: Where the files are.
        files: By name, what ``write_file`` returned.
        objects: By name, how each was saved, as plain values.
    """
    text = json.dumps({"format": _FORMAT, "files": files, "objects": objects}, sort_keys=True)
    outer = json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    write_file(directory / NAME, lambda file: file.write(outer.encode()))


def read(directory: pathlib.Path) -> dict[str, Any]:
    """What a directory has, by its manifest: ``files`` with their ``bytes`` and ``crc32``, and ``objects`` with their ``kind``.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = directory / NAME
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MOST_BYTES:
                raise ValueError(f"it has {size} bytes, expected at most {_MOST_BYTES}")
            outer = json.loads(file.read())
        text = outer["body"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']}, expected {_FORMAT}")
        if any(os.path.basename(name) != name or name.startswith(".") for name in body["files"]):
            raise ValueError("it names files outside its directory")
        for file in body["files"].values():
            if type(file["bytes"]) is not int or type(file["crc32"]) is not list:
                raise ValueError(f"{file} is no size with checksums")
        for entry in body["objects"].values():
            if entry["kind"] == "value" and "value" not in entry:
                raise ValueError("a value is not in it")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {described(error):.200}; remove {directory} to go back to the save before, if there is one"
        ) from error
    return body


def check_file(path: pathlib.Path, expected: Mapping[str, Any]) -> None:
    """Check that a file is what its manifest says.

    Raises:
        CheckpointError: It is not.
    """
    try:
        size = os.stat(path).st_size
        found = checksums(str(path)) if size == expected["bytes"] else []
    except (OSError, ValueError) as error:
        # ValueError: a name that cannot be one.
        raise CheckpointError(f"{path} cannot be read: {described(error)}") from error
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, expected {expected['bytes']}"
        )
    if found != expected["crc32"]:
        pairs = itertools.zip_longest(found, expected["crc32"])
        # There are more, and they are null.
        piece = next((i for i, (one, other) in enumerate(pairs) if one != other), len(found))
        raise CheckpointError(
            f"{path} is damaged: its checksum is wrong in piece {piece} of {len(found)} (16 MiB each)"
        )
