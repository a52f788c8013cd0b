"""Copies of rows of page-locked stores, tested in host memory without a GPU."""

import contextlib
import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.launches import Launching, moves_of
from support.sim_engine import MOVES

from pinfeed import PinnedStore
from pinfeed.devices import cuda_direct_access
from pinfeed.devices.cuda_direct_access import DirectAccess
from pinfeed.errors import DeviceError
from pinfeed.stores.host_rows import StoreRows

LONG = 32 << 10


class HostMemory(DirectAccess):
    """Device whose memory is the host's, and whose kernels do not run."""

    name = "host"
    kernels = SimpleNamespace(
        moves=lambda kind, stores, *rest, **options: moves_of(stores, kind, *rest, **options)
    )

    def __init__(self) -> None:
        super().__init__(0)
        self.is_direct = True
        self.engine_driver: Any = Launching(lambda *_: 0)


def table(n_rows: int, row_nbytes: int) -> PinnedStore:
    store = PinnedStore.empty((n_rows, row_nbytes), np.uint8, pin=False)
    store.array[...] = np.random.default_rng(n_rows).integers(256, size=store.array.shape)
    return store


def stream() -> Any:
    return SimpleNamespace(handle=0, raw=None)


@pytest.mark.parametrize("rows", [[3, 4, 5, 6], [7], [8, 9]], ids=str)
def test_consecutive_rows_are_one_copy(rows: list[int]) -> None:
    """No kernel is launched, and no row index is needed."""
    wanted = np.array(rows)
    stores = [table(10, 24), table(11, LONG)]
    device = HostMemory()
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
    device, rows = HostMemory(), np.array([5, 1, 2])
    assert device.index_dtype([store], rows) == wanted
    assert device.index_dtype([store], rows[:0]) is None
    short: Any = SimpleNamespace(n_rows=10, row_shape=(), dtype=np.dtype(np.float32))
    assert device.index_dtype([store, short], rows) == wanted


@pytest.mark.parametrize("wanted", [None, "direct", "staged"])
@pytest.mark.parametrize("default", ["direct", "staged"])
def test_the_route_is_the_users_choice_or_the_default(wanted: str | None, default: str) -> None:
    device, store = HostMemory(), table(10, 24)
    store.page_locked = True
    assert device.choose_route([store], wanted, default) == ""
    assert device.reaches(store) == ((wanted or default) == "direct")


def test_stores_that_are_not_page_locked_are_staged() -> None:
    device = HostMemory()
    stores = [table(10, 24), table(10, 24)]
    assert device.choose_route(stores[:1], None, "direct") == ""
    assert not device.reaches(stores[0])
    stores[1].page_locked = True
    assert device.choose_route(stores, None, "direct") == ""
    assert [device.reaches(store) for store in stores] == [False, True]
    with pytest.raises(DeviceError, match="rows of a PinnedStore are not in page-locked memory"):
        device.choose_route(stores, "direct", "staged")


@pytest.mark.parametrize("missing", ["driver", "kernels"])
def test_without_a_driver_or_kernels_rows_are_staged(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: HostMemory) -> None:
        raise ImportError("no CuPy")

    device, store = HostMemory(), table(10, 24)
    store.page_locked = True
    if missing == "driver":
        device.engine_driver = None
        match = "host needs pinfeed's compiled part and the CUDA driver"
    else:
        monkeypatch.setattr(HostMemory, "kernels", property(fails))
        match = r"the kernels do not run on host \(.*no CuPy"
    assert device.choose_route([store], None, "staged") == ""
    why = device.choose_route([store], None, "direct")
    assert re.match(f"page-locked rows are staged: {match}", why)
    assert not device.reaches(store)
    device.is_direct = True
    with pytest.raises(DeviceError, match=f"^route='direct': {match}.*; leave route out"):
        device.choose_route([store], "direct", "staged")
    assert device.is_direct, "a refused choice changed the route of other feeders"


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_kernels_read_aligned_values(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the user may have any layout, and begin anywhere in their memory."""
    monkeypatch.setattr(cuda_direct_access, "queued_in", lambda raw: contextlib.nullcontext())
    read: list[bytes] = []

    def run(name: str, n_blocks: int, n_threads: int, moves: np.ndarray) -> int:
        address = int(moves.view(MOVES)[0]["tables"]["packed"][0])
        assert not address % 16
        read.append(ctypes.string_at(address, 48))
        return 0

    device, rows = HostMemory(), np.array([4, 2])
    device.engine_driver = Launching(run)
    whole = torch.arange(200, dtype=torch.uint8)
    for values in (whole[begin : begin + 48].view(2, 24), whole[begin : begin + 48].view(24, 2).T):
        device.write([(table(10, 24), values)], rows, stream(), torch.from_numpy(rows))
        assert read[-1] == values.numpy().tobytes()
