"""File systems whose files may be mapped safely."""

from __future__ import annotations

import ctypes
import os

# f_type of statfs(2), of linux/magic.h: ext2 to ext4, XFS, Btrfs, F2FS, overlay.
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x794C7630})
_TMPFS = 0x01021994
_statfs = ctypes.CDLL(None).statfs
# Larger than struct statfs (120 bytes on 64-bit Linux), which begins with f_type.
_STATFS_BYTES = 256


def is_safe_to_map(path: str) -> bool:
    """Return whether reads from a map fail only if the file shrinks or its disk fails.

    A network file system may learn too late that a file has shrunk. Unknown file systems count as
    network file systems. In tmpfs, reading a hole of a file needs memory, which may not be
    available.
    """
    status = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _statfs(os.fsencode(path), ctypes.byref(status)):
        return False
    if status[0] == _TMPFS:
        found = os.stat(path)
        return found.st_blocks * 512 >= found.st_size
    return status[0] in _LOCAL
