"""The manifest of a save: sizes and checksums of its files, and descriptions of its objects.

It is written last and checked first.
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
# A manifest has one checksum for every 16 MiB of rows.
_MAX_BYTES = 64 << 20


def write_file(path: pathlib.Path, fill: Callable[[IO[bytes]], Any]) -> dict[str, Any]:
    """Write a file, sync it to the disk, and return its size and checksums."""
    with open(path, "xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "crc32": checksums(str(path))}


def write(directory: pathlib.Path, files: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Write the manifest of a directory, and sync it to the disk.

    Args:
        directory: Directory of the files.
        files: Results of ``write_file``, by file name.
        objects: Descriptions of the saved objects as plain values, by name.
    """
    text = json.dumps({"format": _FORMAT, "files": files, "objects": objects}, sort_keys=True)
    outer = json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    write_file(directory / NAME, lambda file: file.write(outer.encode()))


def read(directory: pathlib.Path) -> dict[str, Any]:
    """Read the manifest of a directory.

    Returns:
        ``files`` with their ``bytes`` and ``crc32``, and ``objects`` with their ``kind``.

    Raises:
        CheckpointError: If the manifest is missing or damaged.
    """
    path = directory / NAME
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_BYTES:
                raise ValueError(f"it has {size} bytes, expected at most {_MAX_BYTES}")
            outer = json.loads(file.read())
        text = outer["body"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        _check_body(body)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {described(error):.200}; "
            f"remove {directory} to return to the previous save, if one exists"
        ) from error
    return body


def _check_body(body: Mapping[str, Any]) -> None:
    """Check the structure of a manifest.

    Raises:
        ValueError: If a value is invalid.
    """
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']}, expected {_FORMAT}")
    if any(os.path.basename(name) != name or name.startswith(".") for name in body["files"]):
        raise ValueError("it names files outside its directory")
    for file in body["files"].values():
        if type(file["bytes"]) is not int or type(file["crc32"]) is not list:
            raise ValueError(f"{file} is not a size with checksums")
    for entry in body["objects"].values():
        if entry["kind"] == "value" and "value" not in entry:
            raise ValueError("a value is missing")


def check_file(
    path: pathlib.Path, expected: Mapping[str, Any], *, is_read_next: bool = False
) -> None:
    """Check that a file has the size and the checksums of its manifest.

    Args:
        path: The file.
        expected: Size and checksums.
        is_read_next: Whether the file is read again soon, so that it stays in the page cache.

    Raises:
        CheckpointError: If the size or a checksum differs, or the file cannot be read.
    """
    try:
        size = os.stat(path).st_size
        found = checksums(str(path), is_read_next=is_read_next) if size == expected["bytes"] else []
    except (OSError, ValueError) as error:
        # A ValueError means that no file can have this name.
        raise CheckpointError(f"{path} cannot be read: {described(error)}") from error
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, expected {expected['bytes']}"
        )
    if found != expected["crc32"]:
        pairs = itertools.zip_longest(found, expected["crc32"])
        # Without a difference, the manifest has further checksums, which are null.
        chunk = next((i for i, (one, other) in enumerate(pairs) if one != other), len(found))
        raise CheckpointError(
            f"{path} is damaged: "
            f"its checksum is wrong in chunk {chunk} of {len(found)} (16 MiB each)"
        )
