"""share_rows(): whether two stores have rows in common, in memory or in a file."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from pinfeed.native.library import address_of
from pinfeed.stores.array import ArrayStore, ConcatStore
from pinfeed.stores.arrow import ArrowStore
from pinfeed.stores.file_store import FileStore
from pinfeed.stores.paths import FileKey, file_key, mapping_at
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import Array, Store

# numpy solves an equation to find whether strided arrays overlap. If this takes too long, the
# arrays count as overlapping.
_MAX_WORK = 1 << 16
# Substitute for the address of a file's first byte. Strides may be negative.
_FILE_BASE = 1 << 48


class _Place(NamedTuple):
    """The memory of an array, or the part of a file to which it is mapped."""

    file: FileKey | None
    """The file; None for the memory."""
    begin: int
    """First byte, as an address or in the file."""
    end: int
    """Byte after the last one."""
    array: Array
    """An array of this place that does not own it. Its values are never read."""

    def overlaps(self, other: _Place) -> bool:
        """Return whether both have a byte in common."""
        if self.file != other.file or self.begin >= other.end or other.begin >= self.end:
            return False
        try:
            return bool(np.shares_memory(self.array, other.array, max_work=_MAX_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


# A loop compares every two tables, and the kernel takes a millisecond to list mapped files. The key
# is the id of a store that lives, because stores of the user may be equal or have no hash. A place
# keeps no array, because the memory of an array may refer to the store.
_known: dict[int, list[_Place]] = {}


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
    places, others = _places(one), _places(other)
    if places and others:
        return any(place.overlaps(another) for place in places for another in others)
    files = _files(one)
    return bool(files) and not files.isdisjoint(_files(other))


def _files(store: Store) -> set[FileKey | None]:
    """Return the files that contain the rows of a store, including memory-mapped files."""
    if isinstance(store, FileStore):
        return set(map(file_key, store.paths)) - {None}
    return {place.file for place in _places(store)} - {None}


def _places(store: Store) -> list[_Place]:
    """Return the memory of the rows of a store, and the parts of files that are mapped there."""
    if not isinstance(store, (ArrayStore, ArrowStore)):
        return []
    if id(store) not in _known:
        arrays = [store.array] if isinstance(store, ArrayStore) else store.arrays
        may_be_mapped = not isinstance(store, PinnedStore)
        _known[id(store)] = [place for one in arrays for place in _places_of(one, may_be_mapped)]
        weakref.finalize(store, _known.pop, id(store)).atexit = False
    return _known[id(store)]


def _places_of(array: Array, may_be_mapped: bool) -> Iterator[_Place]:
    """Yield the memory of an array, and the part of a file to which it may be mapped."""
    address = address_of(array)
    yield _placed(None, address, array)
    mapping = mapping_at(address) if may_be_mapped and not _is_allocated(array) else None
    if mapping is not None:
        # Offsets instead of addresses make positions in files comparable.
        yield _placed(mapping.file, _FILE_BASE + mapping.offset, array)


def _placed(file: FileKey | None, address: int, array: Array) -> _Place:
    """Return a place of the shape of an array at an address, which keeps no memory in use."""
    interface = {
        "shape": array.shape,
        "typestr": f"|V{array.itemsize}",
        "strides": array.strides,
        "data": (address, True),
        "version": 3,
    }
    placed = np.asarray(SimpleNamespace(__array_interface__=interface))
    return _Place(file, *byte_bounds(placed), placed)


def _is_allocated(array: Array) -> bool:
    """Return whether numpy has allocated the memory of an array, so that no file is mapped there.

    This is known without ``/proc``.
    """
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(owner, np.ndarray) and owner.flags.owndata
