"""Files on disk: their paths as users give them, their keys, and where they are mapped to memory.

numpy, torch, mmap or shared memory may have mapped a file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pinfeed.errors import ArgumentError, FileMissing, StoreError
from pinfeed.validation.suggestions import of_folder

Path = str | os.PathLike[str]

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]+)*://")


def has_protocol(path: object) -> bool:
    """Return whether this is a URL, or a chain of URLs of fsspec (``simplecache::s3://...``).

    The path of a Windows drive (``C:/x.npy``) is not a URL.
    """
    return isinstance(path, str) and _PROTOCOL.match(path) is not None


def local_path(path: Path) -> str:
    """Return a path as a string.

    Raises:
        ArgumentError: If it is a URL.
    """
    if has_protocol(path):
        raise ArgumentError(
            f"{path!r} is a URL; expected the path of a local file; give "
            f"pinfeed.RemoteStore({path!r}) for a .npy file or raw numbers, or copy the file first"
        )
    return os.fspath(path)


def local_paths(path: Path | Sequence[Path]) -> list[str]:
    """Return the files of a path, a pattern or a sequence of paths, at least one.

    Raises:
        FileMissing: If no file matches the pattern.
        ArgumentError: If ``path`` is none of these, is a URL, or is an empty sequence.
    """
    if isinstance(path, (str, os.PathLike)):
        name = local_path(path)
        if not glob.has_magic(name) or os.path.exists(name):
            return [name]
        found = sorted(glob.glob(name))
        if not found:
            raise FileMissing(
                f"{name}: no file matches this pattern (looked in {os.getcwd()})"
                + pattern_hint(name) * ("{" in name)
            )
        return found
    try:
        names = [local_path(p) for p in path]
    except TypeError:
        raise ArgumentError(
            f"path={path!r}: expected a path, a pattern or a sequence of paths; give an array "
            "straight to the Feeder"
        ) from None
    if not names:
        raise ArgumentError("an empty list of files; expected at least one")
    return names


def pattern_hint(path: str) -> str:
    """Return what to do if the name of a missing file looks like a pattern; empty if not."""
    if "{" in path:
        return "; braces are not expanded; give a pattern with *, or a list of files"
    if glob.has_magic(path):
        return "; patterns in a list are not expanded; give one pattern alone, or all files by name"
    return ""


def require_regular(path: str, file: int | None = None) -> os.stat_result:
    """Check that a path is not a pipe, socket or device, because reading one may wait forever.

    Args:
        path: The path.
        file: Descriptor of the file, if it is open.

    Returns:
        The status of the file.

    Raises:
        StoreError: If it is one of these.
    """
    status = os.stat(path if file is None else file)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path} is a pipe, a socket or a device; expected a file")
    return status


def file_size(path: str, suffix: str = "") -> int:
    """Return the size of a file, in bytes.

    Args:
        path: The file.
        suffix: Suffix of the names of such files, for errors; empty if they may have any.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the path is a directory, a pipe, a socket or a device.
    """
    kind = f"{suffix} file" if suffix else "file"
    try:
        status = require_regular(path)
    except FileNotFoundError:
        expected = f"; expected a {kind}" if suffix else ""
        raise FileMissing(
            f"{path}: no such file (looked in {os.getcwd()}){expected}{pattern_hint(path)}"
        ) from None
    if stat.S_ISDIR(status.st_mode):
        found = of_folder(path)
        looks = f" (it looks like {found})" if found else ""
        pattern = os.path.join(path, f"*{suffix}")
        raise StoreError(
            f"{path} is a directory{looks}; expected a {kind}, or a pattern such as {pattern}"
        )
    return status.st_size


def file_version(path: str) -> tuple[int, ...]:
    """Return the device, inode, size and time of change of a file that was opened before.

    Raises:
        FileMissing: If it was removed since.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileMissing(f"{path} no longer exists; it was removed since it was opened") from None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


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
