"""Rows in page-locked memory."""

import copy
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stores import saved

from pinfeed import ArrayStore, PinnedStore, errors
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.memory.pages import anonymous
from pinfeed.testing.suites import StoreTests, sample


class TestPinnedStoreInOrdinaryMemory(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> PinnedStore:
        return PinnedStore(array, pin=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_pinned_store_without_cuda() -> None:
    with pytest.raises(errors.MissingDependency, match='pin="auto"'):
        PinnedStore.zeros((10, 2))
    store = PinnedStore.zeros((10, 2), pin="auto")
    assert not store.page_locked


def test_a_forked_process_does_not_touch_page_locked_memory() -> None:
    store = PinnedStore.zeros((10, 2), pin=False)
    store.page_locked = True
    store._pid = -1
    assert store.memory_rows is None
    for gather in (store.gather, store.gather_unchecked):
        with pytest.raises(errors.ClosedError, match="forked process"):
            gather(np.array([0]), np.empty((1, 2), store.dtype))


class Refusing:
    """CuPy's runtime with a driver that locks nothing."""

    class CUDARuntimeError(RuntimeError):
        pass

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    def hostUnregister(self, address: int) -> None:
        raise AssertionError


class Unlockable(mmap.mmap):
    """The system does not let the driver lock memory."""

    def madvise(self, *args: int) -> None:
        if args[0] == mmap.MADV_DONTFORK:
            raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("by", "reason"),
    [("driver", "cudaErrorMemoryAllocation: out of memory"), ("system", "Cannot allocate memory")],
)
def test_memory_that_cannot_be_locked(
    by: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "pinfeed.stores.pinned._cuda_runtime", lambda pin: Refusing() if pin else None
    )
    if by == "system":
        monkeypatch.setattr("pinfeed.memory.page_locked.mmap.mmap", Unlockable)
    store = PinnedStore.zeros((1000, 3), pin="auto")
    assert not store.page_locked
    assert store.array.shape == (1000, 3)
    assert not store.array.any()
    assert re.search(
        rf"12000 bytes cannot be page-locked \(.*{reason}; `ulimit -l` is", caplog.text
    )
    assert "the rows are in ordinary memory" in caplog.text
    with pytest.raises(
        errors.DeviceError, match=rf"{reason}.* or give pin='auto' for ordinary memory"
    ):
        PinnedStore.zeros((1000, 3), pin=True)


class Locking:
    """CuPy's runtime with a driver that locks all requested memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self.locked[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_copies_of_a_pinned_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy shares the rows and locks nothing; a deep copy has rows of its own, locked once."""
    runtime = Locking()
    monkeypatch.setattr("pinfeed.stores.pinned._cuda_runtime", lambda pin: runtime if pin else None)
    store = PinnedStore(np.arange(3000.0).reshape(1000, 3))
    assert len(runtime.locked) == 1
    shared = copy.copy(store)
    assert np.shares_memory(shared.array, store.array)
    assert shared.page_locked
    assert len(runtime.locked) == 1
    shared.scatter(np.array([5]), np.full((1, 3), -1.0))
    assert (store.array[5] == -1).all()
    own = copy.deepcopy([store, store])
    assert own[0] is own[1]
    assert own[0].page_locked
    assert len(runtime.locked) == 2
    np.testing.assert_array_equal(own[0].array, store.array)
    assert not np.shares_memory(own[0].array, store.array)
    del store
    unlock_freed()
    assert len(runtime.locked) == 2, "the copy still uses the rows"
    del shared, own
    PinnedStore.unlock_freed()
    assert not runtime.locked


def test_pinned_store_takes_exactly_what_it_needs() -> None:
    store = PinnedStore.empty((1_000_001, 5), "float32", pin="auto")
    memory = store.array.base
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    assert 0 <= memory.nbytes - store.array.nbytes < 4096


def test_pinned_store_copies_what_it_is_given(tmp_path: Path) -> None:
    array = sample(5000, (1000,), np.dtype(np.float32))
    path = saved(tmp_path / "x.npy", array)
    for source in (array, torch.from_numpy(array), path, str(path), ArrayStore(array)):
        store = PinnedStore(source, pin="auto")
        np.testing.assert_array_equal(store.array, array)
        assert not np.shares_memory(store.array, array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_random_rows_are_reproducible(dtype: str) -> None:
    a, b, c = (
        PinnedStore.normal((1000, 50), dtype, mean=2, std=3, seed=seed, pin=False).array.astype(
            float
        )
        for seed in (1, 1, 2)
    )
    assert (a == b).all()
    assert (a != c).any()
    assert abs(a.mean() - 2) < 0.1
    assert abs(a.std() - 3) < 0.1


def test_pinned_store_refuses() -> None:
    with pytest.raises(errors.StoreError, match="no rows"):
        PinnedStore.zeros((0, 3), pin=False)
    with pytest.raises(errors.StoreError, match="floating point"):
        PinnedStore.normal((3, 3), "int32", pin=False)
    with pytest.raises(errors.StoreError, match="no torch counterpart"):
        PinnedStore.zeros((3,), "S3", pin=False)


def test_more_memory_than_an_address_can_tell() -> None:
    with pytest.raises(MemoryError, match=f"the system cannot allocate {2**63} bytes for rows"):
        anonymous(2**63)
