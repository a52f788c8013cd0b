"""Copies of rows of page-locked stores, tested in host memory without a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.launches import Launching, moves_of

from pinfeed import PinnedStore
from pinfeed.devices.cuda_direct_access import DirectAccess
from pinfeed.devices.kernels import Grid
from pinfeed.devices.route import Route
from pinfeed.stores.host_rows import StoreRows

LONG = 32 << 10
DIRECT = Route(Grid(4), True, "")


class HostMemory(DirectAccess):
    """Device whose memory is the host's, and whose kernels do not run."""

    name = "host"
    kernels = SimpleNamespace(moves=lambda kind, stores, *rest: moves_of(stores, kind, *rest))

    def __init__(self, route: Route) -> None:
        super().__init__(0)
        self.route = route
        self.engine_driver: Any = Launching(lambda *_: 0)


def table(n_rows: int, row_nbytes: int) -> PinnedStore:
    store = PinnedStore.empty((n_rows, row_nbytes), np.uint8, pin=False)
    store.array[...] = np.random.default_rng(n_rows).integers(256, size=store.array.shape)
    return store


def stream() -> Any:
    return SimpleNamespace(handle=0)


@pytest.mark.parametrize("rows", [[3, 4, 5, 6], [7], [8, 9]], ids=str)
def test_consecutive_rows_are_one_copy(rows: list[int]) -> None:
    """No kernel is launched, and no row index is needed."""
    wanted = np.array(rows)
    stores = [table(10, 24), table(11, LONG)]
    device = HostMemory(DIRECT)
    assert device.index_dtype(stores, wanted) is None
    parts = [StoreRows(store, wanted) for store in stores]
    tensors = [torch.zeros(part.shape, dtype=torch.uint8) for part in parts]
    device.read(list(zip(parts, tensors, strict=True)), stream())
    assert device.engine_driver.n_copies == 2
    for store, tensor in zip(stores, tensors, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), store.array[wanted])
    old = [store.array.copy() for store in stores]
    values = [(store, 255 - tensor) for store, tensor in zip(stores, tensors, strict=True)]
    device.write(values, wanted, stream())
    for store, before in zip(stores, old, strict=True):
        before[wanted] = 255 - before[wanted]
        np.testing.assert_array_equal(store.array, before)
    assert device.engine_driver.n_copies == 4
    assert not device.engine_driver.launched


@pytest.mark.parametrize(
    ("n_rows", "row_nbytes", "wanted"),
    [
        (10, LONG, np.int32),
        ((1 << 31) - 1, 1, np.int32),
        (1 << 31, 1, np.int64),
    ],
)
def test_row_indices_that_kernels_need(n_rows: int, row_nbytes: int, wanted: Any) -> None:
    # Only the numbers matter, and this memory is not allocated.
    store: Any = SimpleNamespace(n_rows=n_rows, row_shape=(row_nbytes,), dtype=np.dtype(np.uint8))
    device, rows = HostMemory(DIRECT), np.array([5, 1, 2])
    assert device.index_dtype([store], rows) == wanted
    assert device.index_dtype([store], rows[:0]) is None
    short: Any = SimpleNamespace(n_rows=10, row_shape=(), dtype=np.dtype(np.float32))
    assert device.index_dtype([store, short], rows) == wanted
