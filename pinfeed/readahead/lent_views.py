"""LentViews: batches that are views of rows in memory or in a memory map, without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.readahead.read_plan import ReadPlan
from pinfeed.readahead.strategy import ReadStrategy
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.store import Array, Store

_COPY = "leave out copy=False"


class LentViews(ReadStrategy):
    """Strategy that lends views of consecutive rows, and reads nothing.

    Args:
        array: All rows of a store, shape (n_rows, *row_shape).
    """

    hint = "The loop receives views of the rows, so there is nothing to read faster."

    def __init__(self, array: Array) -> None:
        from pinfeed.tensors.numpy_torch import to_torch

        with warnings.catch_warnings():
            # A loop with copy=False promises not to write to its batches.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._rows = to_torch(array)

    def views(self) -> Any:
        return self._rows


def lend_views(stores: Sequence[Store]) -> ReadPlan:
    """Return a plan that lends the rows of all stores as views.

    Raises:
        ArgumentError: If the rows of a store are not in memory that numpy can show.
    """
    strategies = [LentViews(_array_of(store)) for store in stores]
    return ReadPlan(strategies, ("batches are views of the rows (copy=False)",))


def _array_of(store: Store) -> Array:
    """Return an array on the memory of the rows of a store.

    A file is mapped for this process alone: writes to the array change neither the file nor other
    maps of it.
    """
    if isinstance(store, ArrayStore):
        return store.array
    name = type(store).__name__
    if not isinstance(store, LocalFileStore):
        raise ArgumentError(
            f"copy=False was given with rows of a {name}, which are not in memory; expected "
            f"arrays, tensors, or single .npy or raw files; {_COPY}"
        )
    layouts = store._layouts
    if len(layouts) > 1 or not store.rows_in_one_file or not layouts[0].dtype.isnative:
        raise ArgumentError(
            f"copy=False was given with {name} of {len(layouts)} files of "
            f"{layouts[0].dtype.newbyteorder('=')}; expected one file in the byte order of this "
            f"machine, because a view has one address; {_COPY}, or join the files"
        )
    layout = layouts[0]
    if layout.offset % layout.dtype.itemsize or layout.stride % layout.dtype.itemsize:
        raise ArgumentError(
            f"copy=False was given with {layout.path!r}, whose rows begin at byte {layout.offset} "
            f"and every {layout.stride} bytes; expected multiples of {layout.dtype.itemsize}, the "
            f"bytes of an item; {_COPY}"
        )
    mapped = np.memmap(layout.path, np.uint8, "c", shape=(layout.end,))
    inner = np.empty((1, *layout.row_shape), layout.dtype).strides[1:]
    strides = (layout.stride, *inner)
    shape = (layout.n_rows, *layout.row_shape)
    return np.ndarray(shape, layout.dtype, np.asarray(mapped), layout.offset, strides)
