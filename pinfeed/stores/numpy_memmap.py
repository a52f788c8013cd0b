"""Stores of the files behind numpy memory maps, and behind sliding windows over them."""

from __future__ import annotations

import logging
import math
import mmap
import os
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.memory.proc_maps import file_key, mapping_at
from pinfeed.stores.npy_header import read_header
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.row_layout import RowLayout
from pinfeed.stores.store import Array

logger = logging.getLogger("pinfeed")


def store_of_map(array: Any) -> NpyStore | None:
    """Return a store of the file of a numpy memory map, or of sliding windows over one.

    A store is better than the map, because a feeder reads its rows ahead and counts them in its
    plan. In addition, a file that has shrunk is an error, while the map would end the process.

    Returns:
        A store, or None for anything else.
    """
    store = _store_of_whole(array) if isinstance(array, np.memmap) else None
    if store is None and isinstance(array, np.ndarray):
        store = _store_of_windows(array)
    return store


def _store_of_whole(array: np.memmap[Any, Any]) -> NpyStore | None:
    """Return a store of the file that ``numpy.load(path, mmap_mode=...)`` has mapped."""
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
    return NpyStore(header.path, mode=array.mode) if _is_file_of(array) else None


def _store_of_windows(array: Array) -> NpyStore | None:
    """Return a read-only store of the file over which ``sliding_window_view`` has made windows.

    Addresses and strides of the windows say where each row is in the file. The result is
    None if the rows do not overlap, or if the items of a row are not consecutive.
    """
    if array.ndim < 2 or not array.size:
        return None
    row_nbytes = array.itemsize * math.prod(array.shape[1:])
    if not 0 < array.strides[0] < row_nbytes or not array[0].flags.c_contiguous:
        return None
    whole = _map_below(array)
    if whole is None or whole.filename is None or whole.mode not in ("r", "r+"):
        return None
    begin = array.ctypes.data - whole.ctypes.data
    gap = array.strides[0] - row_nbytes
    layout = RowLayout(
        os.fspath(whole.filename),
        array.dtype,
        len(array),
        array.shape[1:],
        whole.offset + begin,
        gap,
    )
    if begin < 0 or layout.end > whole.offset + whole.nbytes or not _is_file_of(whole):
        return None
    layout = layout.check(os.path.getsize(layout.path))
    return NpyStore._of_layouts([layout], "r", keep_cache=None, memory_map=True)


def _map_below(array: Array) -> np.memmap[Any, Any] | None:
    """Return the memory map that an array is a view of, or None."""
    owner: Any = array
    while owner is not None:
        below = getattr(owner, "base", None)
        if isinstance(owner, np.memmap) and isinstance(below, mmap.mmap):
            return owner
        owner = below
    return None


def _is_file_of(array: np.memmap[Any, Any]) -> bool:
    """Return whether the file with the name of a map is the mapped file."""
    path = os.fspath(array.filename or "")
    mapping = mapping_at(array.ctypes.data)
    if mapping is None:
        logger.warning(
            "%s: pinfeed cannot find out which file is mapped, because /proc cannot be read, so it "
            "reads the map as an array, whose pages stay resident; give the path instead of the "
            "map",
            path,
        )
        return False
    # The file may have been removed or replaced since it was mapped.
    return mapping.file == file_key(path)
