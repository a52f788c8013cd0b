"""Store of the file behind a numpy memory map."""

from __future__ import annotations

import logging
import mmap
import os
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.stores.file import MmapStore
from pinfeed.stores.formats.npy import read_header

logger = logging.getLogger("pinfeed")


def store_of_memmap(array: np.memmap[Any, Any]) -> MmapStore | None:
    """Return a store of the file that ``numpy.load(path, mmap_mode=...)`` has mapped.

    A store is better than the map: a feeder reads its rows ahead and counts them in its plan, and
    a file that has shrunk is an error, where the map ends the process.

    Returns:
        A store, or None for any other array.
    """
    if (
        not isinstance(array.base, mmap.mmap)
        or array.filename is None
        or array.mode not in ("r", "r+")
    ):
        # A part of a map, or a map with private changes.
        return None
    try:
        header = read_header(os.fspath(array.filename))
    except StoreError:
        return None
    if (header.offset, header.dtype, header.n_rows, *header.row_shape) != (
        array.offset,
        array.dtype,
        *array.shape,
    ):
        return None
    try:
        inode = _mapped_inode(array.ctypes.data)
    except OSError as error:
        logger.warning(
            "%s: which file the memory map is of cannot be read (%s); the map is served as the "
            "array that it is, and what is touched of it stays resident; give the path in place "
            "of the map",
            header.path,
            error,
        )
        return None
    if os.stat(header.path).st_ino != inode:
        # The file was replaced by another one since it was mapped.
        return None
    return MmapStore(header.path, mode=array.mode)


def _mapped_inode(address: int) -> int:
    """Return the inode of the file that is mapped at an address, according to proc(5).

    Raises:
        OSError: If there is no ``/proc`` to read.
    """
    with open("/proc/self/maps") as file:
        for line in file:
            span, _, _, _, inode, *_ = line.split()
            start, stop = (int(bound, 16) for bound in span.split("-"))
            if start <= address < stop:
                return int(inode)
    return 0
