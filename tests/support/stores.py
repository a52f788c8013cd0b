"""Helpers of the tests of stores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pinfeed import MmapStore
from pinfeed.stores.disk import linux_aio
from pinfeed.testing.suites import StoreTests


def gathered(store: Any, wanted: Any) -> np.ndarray:
    """Return rows of a store as a new array."""
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(np.asarray(wanted, np.int64), out)
    return out


class FileTests(StoreTests):
    """Tests without native AIO, because the system takes 30 ms to destroy each context.

    The tests of .npy files run with native AIO.
    """

    @pytest.fixture(autouse=True)
    def forbid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linux_aio.AioContext, "create", lambda: None)

    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        raise NotImplementedError


def saved(path: Path, array: np.ndarray) -> Path:
    """Save an array as a .npy file, and return its path."""
    np.save(path, array)
    return path
