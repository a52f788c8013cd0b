"""Choice of the mover for rows of page-locked stores, tested in host memory without a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.copy_driver import STREAM, CopyDriver

from pinfeed import PinnedStore
from pinfeed.devices import cuda_direct_access
from pinfeed.devices.batch_copy_trial import is_safe, trial_key
from pinfeed.devices.cuda_direct_access import DirectAccess
from pinfeed.devices.kernels import Grid
from pinfeed.devices.route import Route, cached_trial
from pinfeed.stores.host_rows import StoreRows
from pinfeed.tensors.numpy_torch import to_torch

LONG = 32 << 10
BATCHES = Route(Grid(4), True, "", "copy engine")


class HostCopies(DirectAccess):
    """Device whose memory is the host's, and which counts its copies."""

    def __init__(self, route: Route) -> None:
        super().__init__(0)
        self.route = route
        self.n_copies = 0

    def copy(self, src: Any, dst: Any, stream: Any) -> None:
        target, source = (x if isinstance(x, torch.Tensor) else to_torch(x) for x in (dst, src))
        target.copy_(source)
        self.n_copies += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> CopyDriver:
    driver = CopyDriver()
    monkeypatch.setattr(cuda_direct_access, "batch_copy", lambda: driver.copier)
    return driver


def table(n_rows: int, row_nbytes: int) -> PinnedStore:
    store = PinnedStore.empty((n_rows, row_nbytes), np.uint8, pin=False)
    store.array[...] = np.random.default_rng(n_rows).integers(256, size=store.array.shape)
    return store


def stream() -> Any:
    raw = SimpleNamespace(cuda_stream=STREAM, device=torch.device("cpu"), query=lambda: True)
    return SimpleNamespace(raw=raw)


@pytest.mark.parametrize("rows", [[3, 4, 5, 6], [7], [8, 9]], ids=str)
def test_consecutive_rows_are_one_copy(rows: list[int], driver: CopyDriver) -> None:
    """No kernel is compiled, and no row index is needed."""
    wanted = np.array(rows)
    stores = [table(10, 24), table(11, LONG)]
    device = HostCopies(BATCHES)
    assert device.index_dtype(stores, wanted) is None
    parts = [StoreRows(store, wanted) for store in stores]
    tensors = [torch.zeros(part.shape, dtype=torch.uint8) for part in parts]
    assert len(list(device.read(list(zip(parts, tensors, strict=True)), stream()))) == 2
    for store, tensor in zip(stores, tensors, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), store.array[wanted])
    old = [store.array.copy() for store in stores]
    values = [(store, 255 - tensor) for store, tensor in zip(stores, tensors, strict=True)]
    device.write(values, wanted, stream())
    for store, before in zip(stores, old, strict=True):
        before[wanted] = 255 - before[wanted]
        np.testing.assert_array_equal(store.array, before)
    assert (device.n_copies, driver.counts) == (4, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the streams do not belong to a GPU")
def test_long_rows_are_copied_in_batches(driver: CopyDriver) -> None:
    store, rows = table(10, LONG), np.array([7, 1, 2, 7])
    device = HostCopies(BATCHES)
    tensor = torch.zeros((4, LONG), dtype=torch.uint8)
    assert len(list(device.read([(StoreRows(store, rows), tensor)], stream()))) == 1
    np.testing.assert_array_equal(tensor.numpy(), store.array[rows])
    back = np.array([0, 9, 5, 4])
    wanted = store.array.copy()
    wanted[back] = wanted[rows]
    device.write([(store, tensor)], back, stream())
    np.testing.assert_array_equal(store.array, wanted)
    assert (device.n_copies, driver.counts) == (0, [4, 4])


@pytest.mark.parametrize(
    ("n_rows", "row_nbytes", "route", "wanted"),
    [
        (10, LONG - 1, BATCHES, np.int32),
        (10, LONG, BATCHES, None),
        (10, LONG, Route(Grid(4), True, ""), np.int32),
        ((1 << 31) - 1, 1, BATCHES, np.int32),
        (1 << 31, 1, BATCHES, np.int64),
    ],
)
def test_row_indices_that_kernels_need(
    n_rows: int, row_nbytes: int, route: Route, wanted: Any, driver: CopyDriver
) -> None:
    # Only the numbers matter, and this memory is not allocated.
    store: Any = SimpleNamespace(n_rows=n_rows, row_shape=(row_nbytes,), dtype=np.dtype(np.uint8))
    device, rows = HostCopies(route), np.array([5, 1, 2])
    assert device.index_dtype([store], rows) == wanted
    assert device.index_dtype([store], rows[:0]) is None
    short: Any = SimpleNamespace(n_rows=10, row_shape=(), dtype=np.dtype(np.float32))
    assert device.index_dtype([store, short], rows) == (wanted or np.int32)


def test_a_driver_without_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have written the route to the file."""
    monkeypatch.setattr(cuda_direct_access, "batch_copy", lambda: None)
    device = HostCopies(BATCHES)
    assert not device.has_batch_copy([table(10, LONG)])
    assert device.index_dtype([table(10, LONG)], np.array([5, 1])) == np.int32


@pytest.mark.parametrize("failure", ["", "it did not end in time"])
def test_long_rows_are_timed_in_batches_if_the_driver_passed(
    failure: str, driver: CopyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_safe.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {failure}")
    cached_trial(trial_key(f"GPU {failure}"), lambda: failure)
    device = HostCopies(BATCHES)
    assert device.has_batch_copy([table(2, 4), table(2, LONG)]) == (not failure)
    assert not device.has_batch_copy([table(2, 4), table(2, LONG - 1)])
