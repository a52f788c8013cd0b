"""share_rows(): whether two stores have rows in common, in memory or in a file."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np

from pinfeed.memory.proc_maps import FileKey, FileMapping, file_key, mapping_at
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.concat import ConcatStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Array, Store

# numpy solves an equation to find whether strided arrays overlap. If this takes too long, the
# arrays count as overlapping.
_MAX_WORK = 1 << 16
# Substitute for the address of a file's first byte. Strides may be negative.
_FILE_BASE = 1 << 48


def share_rows(one: Store, other: Store) -> bool:
    """Return whether a write to one store can change rows of the other.

    Arrays are compared byte by byte, even if they are memory maps of one file at two addresses. A
    file that a store reads by its path counts as a whole.
    """
    if one is other:
        return True
    for store, another in ((one, other), (other, one)):
        if isinstance(store, ConcatStore):
            return any(share_rows(part, another) for part in store.parts)
    arrays, other_arrays = _arrays(one), _arrays(other)
    if any(itertools.starmap(_share_memory, itertools.product(arrays, other_arrays))):
        return True
    files = _files(one)
    if not files or files.isdisjoint(_files(other)):
        return False
    if not arrays or not other_arrays:
        return True
    pairs = itertools.product(_in_files(one), _in_files(other))
    return any(a[0] == b[0] and _share_memory(a[1], b[1]) for a, b in pairs)


def _share_memory(one: Array, other: Array) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _arrays(store: Store) -> list[Array]:
    """Return the arrays in memory whose rows a store shares."""
    if isinstance(store, ArrayStore):
        return [store.array]
    return store.arrays if isinstance(store, ArrowStore) else []


def _files(store: Store) -> set[FileKey | None]:
    """Return the files that contain the rows of a store, including memory-mapped files."""
    if isinstance(store, FileStore):
        return set(map(file_key, store.paths)) - {None}
    return {mapping.file for mapping in _mappings_of(store) if mapping is not None}


def _mappings_of(store: Store) -> list[FileMapping | None]:
    """Return the file to which each array of a store is mapped, or None."""
    arrays = _arrays(store)
    if isinstance(store, PinnedStore):
        return [None] * len(arrays)
    return [None if _is_allocated(array) else mapping_at(array.ctypes.data) for array in arrays]


def _is_allocated(array: Array) -> bool:
    """Return whether numpy has allocated the memory of an array, so that no file is mapped there.

    This is known without ``/proc``, which takes a millisecond.
    """
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(owner, np.ndarray) and owner.flags.owndata


def _in_files(store: Store) -> list[tuple[FileKey, Array]]:
    """Return the arrays of a store that are mapped from files, each with its file.

    The address of such an array is its offset in the file, which makes positions in files
    comparable. Its values are never read.
    """
    found = []
    for array, mapping in zip(_arrays(store), _mappings_of(store), strict=True):
        if mapping is not None:
            interface = {
                "shape": array.shape,
                "typestr": f"|V{array.itemsize}",
                "strides": array.strides,
                "data": (_FILE_BASE + mapping.offset, True),
                "version": 3,
            }
            placed = np.asarray(SimpleNamespace(__array_interface__=interface))
            found.append((mapping.file, placed))
    return found
