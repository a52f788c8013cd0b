"""mapping_at(): the file that is mapped at an address; written_maps(): files mapped for writing.

numpy, torch, mmap or shared memory has mapped them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

FileKey = tuple[int, int]
"""Device and inode of a file."""


class FileMapping(NamedTuple):
    """A file that is mapped at an address, so that writes to the memory change the file."""

    file: FileKey
    offset: int
    """Offset of the address in the file, in bytes."""


def file_key(path: str) -> FileKey | None:
    """Return the device and inode of a file; None if it does not exist."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def mapping_at(address: int) -> FileMapping | None:
    """Return the file that is mapped at an address, according to proc(5).

    The result is None for other memory, for private mappings (whose writes do not reach the file),
    and if ``/proc`` cannot be read.
    """
    for addresses, file, offset, _ in _shared_maps():
        if address in addresses:
            return FileMapping(file, offset + address - addresses.start)
    return None


def written_maps() -> set[FileKey]:
    """Return the files that this process has mapped for writing, according to proc(5).

    The result is empty if ``/proc`` cannot be read. Writes to such a map may leave the time of
    change of the file as it is.
    """
    return {file for _, file, _, is_writable in _shared_maps() if is_writable}


def _shared_maps() -> Iterator[tuple[range, FileKey, int, bool]]:
    """Yield addresses, file and offset of each shared mapping, and whether it may be written."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            span, permissions, offset, device, inode, *name = line.split(maxsplit=5)
            if "s" in permissions and inode != "0":
                start, stop = (int(bound, 16) for bound in span.split("-"))
                file = _key(device, int(inode), name[0].rstrip("\n") if name else "")
                yield range(start, stop), file, int(offset, 16), "w" in permissions


def _key(device: str, inode: int, path: str) -> FileKey:
    """Return the key of a mapped file as ``file_key`` does, if the file still has its name."""
    found = file_key(path)
    if found is not None and found[1] == inode:
        # Some file systems show another device in /proc than to stat(2).
        return found
    major, minor = (int(number, 16) for number in device.split(":"))
    return os.makedev(major, minor), inode
