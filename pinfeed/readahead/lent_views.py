"""LentViews: batches that are views of rows in memory or in a memory map, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.readahead.read_plan import ReadPlan
from pinfeed.readahead.strategy import ReadStrategy
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.row_layout import RowLayout
from pinfeed.stores.store import Array, Store

if TYPE_CHECKING:
    from pinfeed.tensors.row_views import RowViews

_COPY = "leave out copy=False"


class LentViews(ReadStrategy):
    """Strategy that lends views of consecutive rows, and reads nothing.

    Args:
        views: Views of the rows of a store.
    """

    def __init__(self, views: RowViews) -> None:
        self._views = views

    def views(self) -> RowViews:
        return self._views


def lend_views(stores: Sequence[Store]) -> ReadPlan:
    """Return a plan that lends the rows of all stores as views.

    Raises:
        ArgumentError: If the rows of a store are not in memory or in files that can be mapped.
    """
    from pinfeed.tensors.row_views import RowViews

    strategies = [LentViews(RowViews(_arrays_of(store))) for store in stores]
    return ReadPlan(strategies, ("batches are views of the rows (copy=False)",))


def _arrays_of(store: Store) -> list[Array]:
    """Return arrays on the memory of the rows of a store, one after the other."""
    if isinstance(store, ArrayStore):
        return [store.array]
    if not isinstance(store, LocalFileStore) or not store.rows_in_one_file:
        raise ArgumentError(
            f"copy=False was given with a {type(store).__name__}, whose rows have no address in "
            f"memory; expected arrays, tensors, .npy files or raw files; {_COPY}"
        )
    return [_mapped(layout) for layout in store._layouts if layout.n_rows]


def _mapped(layout: RowLayout) -> Array:
    """Return the rows of a file in a memory map.

    The map is private: writes to the array change neither the file nor other maps of it.
    """
    dtype = layout.dtype
    if not dtype.isnative or layout.offset % dtype.itemsize or layout.stride % dtype.itemsize:
        raise ArgumentError(
            f"copy=False was given with {layout.path!r}, whose items are {dtype.str!r}, from byte "
            f"{layout.offset} on, with {layout.stride} bytes from row to row; expected the byte "
            f"order of this machine and multiples of {dtype.itemsize} bytes; {_COPY}"
        )
    mapped = np.memmap(layout.path, np.uint8, "c", shape=(layout.end,))
    inner = np.empty((1, *layout.row_shape), dtype).strides[1:]
    shape = (layout.n_rows, *layout.row_shape)
    strides = (layout.stride, *inner)
    return np.ndarray(shape, dtype, np.asarray(mapped), layout.offset, strides)
