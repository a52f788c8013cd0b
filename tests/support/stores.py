"""Helpers of the tests of stores."""

from pathlib import Path
from typing import Any

import numpy as np

from pinfeed.rows.runs import Runs
from pinfeed.stores.window_store import WindowStore


def gathered(store: Any, wanted: Any) -> np.ndarray:
    """Return rows of a store as a new array."""
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(np.asarray(wanted, np.int64), out)
    return out


def gather_at(store: Any, wanted: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
    """Copy rows of a store to places in ``out``, in any order."""
    order = places.argsort()
    store.gather_runs(Runs.of_rows(wanted[order], places[order]), out)


def saved(path: Path, array: np.ndarray) -> Path:
    """Save an array as a .npy file, and return its path."""
    np.save(path, array)
    return path


def mapped_windows(store: WindowStore) -> WindowStore:
    """Return the windows of local files in memory maps of the files."""
    items: Any = store.items
    return WindowStore(items.map_rows(), store.shapes, store.axes, owned=True)
