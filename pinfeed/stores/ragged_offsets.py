"""Offsets of ragged rows: reads and checks them."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.host_rows import run_gather
from pinfeed.stores.opened import open_store

logger = logging.getLogger("pinfeed")


def read_offsets(offsets: Any) -> Rows:
    """Return a read-only copy of offsets, shape (n_rows + 1,), int64.

    Raises:
        StoreError: If they are not a 1-d array of at least two integers.
    """
    name = os.fspath(offsets) if isinstance(offsets, (str, os.PathLike)) else "offsets"
    store = open_store(np.asarray(offsets) if isinstance(offsets, list) else offsets, "offsets")
    try:
        if isinstance(store, ArrayStore):
            found = store.array
        else:
            found = np.empty((store.n_rows, *store.row_shape), store.dtype)
            run_gather(store)(Runs.one(0, store.n_rows), found)
    finally:
        store.close()
    if found.ndim != 1 or found.dtype.kind not in "iu" or len(found) < 2:
        raise StoreError(
            f"{name}: shape {found.shape} of {found.dtype}; expected integers of shape "
            "(n_rows + 1,) for at least one row: the position of each row, and the end of the last"
        )
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise StoreError(f"{name}: offset {found.max()} is too large; expected at most 2**63 - 1")
    own: Rows = found.astype(np.int64)
    own.flags.writeable = False
    return own


def check_offsets(offsets: Rows, n_items: int) -> None:
    """Raise StoreError unless offsets do not decrease and are in [0, n_items]."""
    decreases = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(decreases):
        i = int(decreases[0]) + 1
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but offsets[{i - 1}] is {offsets[i - 1]}; expected "
            "offsets that do not decrease; for lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))"
        )
    if offsets[0] < 0:
        raise StoreError(f"offsets[0] is {offsets[0]}; expected at least 0")
    if offsets[-1] > n_items:
        i = int(np.searchsorted(offsets, n_items, side="right"))
        raise StoreError(
            f"offsets[{i}] is {offsets[i]}, but values has {n_items} items; expected offsets of "
            "at most the number of items; check that values and offsets match"
        )
    if offsets[0] > 0 and offsets.sum() == n_items:
        logger.warning(
            "offsets begins at %d, so %d of %d items are in no row, and its sum is the number of "
            "items, as if it held lengths. For lengths, give np.concatenate(([0], "
            "np.cumsum(lengths)))",
            offsets[0],
            n_items - (offsets[-1] - offsets[0]),
            n_items,
        )
