"""Every store keeps the contract; each has its own conditions."""

import copy
import itertools
import mmap
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinfeed import ArrayStore, Feeder, MmapStore, PinnedStore, errors
from pinfeed.memory.host import resident_bytes
from pinfeed.memory.mapping import anonymous
from pinfeed.memory.page_locked import unlock_freed
from pinfeed.stores.array import shares_itself
from pinfeed.stores.disk import file_reader, linux_aio
from pinfeed.testing.suites import StoreTests, sample


class TestArrayStore(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> ArrayStore:
        return ArrayStore(array)


class TestArrayStoreOfARowStride(StoreTests):
    """Rows that are contiguous, in an array that is not."""

    def make(self, array: np.ndarray, tmp_path: Path) -> ArrayStore:
        return ArrayStore(np.repeat(array, 2, axis=0)[::2])


class TestPinnedStoreInOrdinaryMemory(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> PinnedStore:
        return PinnedStore(array, pin=False)


class TestMmapStore(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        np.save(tmp_path / "x.npy", array)
        return MmapStore(tmp_path / "x.npy", mode="r+", dtype=array.dtype)


class TestMmapStoreWithoutTheSystemCall(TestMmapStore):
    """Where native AIO is not allowed, rows are read and written one by one."""

    @pytest.fixture(autouse=True)
    def forbid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linux_aio.Requests, "make", lambda: None)


class TestMmapStoreOfShards(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        # Uneven, one of them empty.
        cuts = [0, 1, 1, 5, 6, len(array)]
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            np.save(tmp_path / f"x-{i}.npy", array[start:stop])
        return MmapStore(tmp_path / "x-*.npy", mode="r+", dtype=array.dtype)


class TestMmapStoreOfTheOtherByteOrder(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> MmapStore:
        if array.dtype.kind == "V":
            pytest.skip("numpy writes no byte order for bfloat16")
        np.save(tmp_path / "x.npy", array.astype(array.dtype.newbyteorder(">")))
        return MmapStore(tmp_path / "x.npy", mode="r+")


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def gathered(store: Any, rows: Any) -> np.ndarray:
    out = np.empty((len(rows), *store.row_shape), store.dtype)
    store.gather(np.asarray(rows, np.int64), out)
    return out


# ---- ArrayStore ----------------------------------------------------------------------------------


def test_array_store_shares_memory_with_a_tensor() -> None:
    tensor = torch.zeros(4, 2, dtype=torch.bfloat16)
    store = ArrayStore(tensor)
    store.scatter(np.array([2]), np.ones((1, 2), store.dtype))
    assert tensor[2].tolist() == [1, 1]
    assert tensor[[0, 1, 3]].sum() == 0


def test_array_store_of_a_read_only_array_is_not_writable() -> None:
    array = np.zeros((3, 2))
    array.flags.writeable = False
    assert not ArrayStore(array).writable


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((0, 3)), "no rows"),
        (np.float32(3), "expected a path"),
        (np.array(3.0), "no rows"),
        (np.asfortranarray(np.zeros((4, 3))), "Fortran"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.array([object()]), "never unpickled"),
        (np.zeros(3, [("a", "f4")]), "structured"),
        (np.zeros(3, "M8[s]"), "dates"),
        (np.zeros(3, np.longdouble), "no torch counterpart"),
        (torch.zeros(3).to_sparse(), "dense"),
        (torch.zeros(3, device="meta"), "a meta tensor, which has a shape and no data"),
        ([1, 2, 3], "expected a path"),
    ],
)
def test_array_store_refuses(source: Any, message: str) -> None:
    with pytest.raises(errors.StoreError, match=message):
        ArrayStore(source)


# ---- MmapStore -----------------------------------------------------------------------------------


def test_mmap_store_is_read_only_unless_asked(tmp_path: Path) -> None:
    with MmapStore(saved(tmp_path / "x.npy", np.zeros((3, 2)))) as store:
        assert not store.writable
        with pytest.raises(errors.WriteBackError, match="read-only"):
            store.scatter(np.array([0]), np.ones((1, 2)))


def test_mmap_store_writes_through(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.zeros((5, 2)))
    with MmapStore(path, mode="r+") as store:
        store.scatter(np.array([4, 1]), np.array([[1.0, 2], [3, 4]]))
        store.flush()
        np.testing.assert_array_equal(np.load(path), [[0, 0], [3, 4], [0, 0], [0, 0], [1, 2]])


def test_mmap_store_does_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", sample(1 << 14, (1 << 12,), np.dtype(np.uint8)))  # 64 MiB
    with MmapStore(path) as store:
        before = resident_bytes()["file"]
        rows = np.random.default_rng(0).permutation(store.n_rows)
        for i in range(0, store.n_rows, 512):
            out = gathered(store, rows[i : i + 512])
            assert (out[:, 1] == (out[:, 0].astype(int) + 1) % 251).all()
        assert resident_bytes()["file"] - before < 4 << 20


@pytest.mark.parametrize("to", ["mid-page", "mid-file", "nothing"])
@pytest.mark.parametrize("rows", [[70, 20, 99, 5], [96, 97, 98, 99]], ids=["scattered", "run"])
@pytest.mark.parametrize("call", [True, False], ids=["one call", "row by row"])
def test_a_file_that_shrinks_is_an_error(
    tmp_path: Path, to: str, rows: list[int], call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not call:
        monkeypatch.setattr(linux_aio.Requests, "make", lambda: None)
    path = saved(tmp_path / "x.npy", np.ones((100, 1000)))
    with MmapStore(path) as store:
        gathered(store, rows)
        os.truncate(
            path, {"mid-page": path.stat().st_size - 10, "mid-file": 100_000, "nothing": 0}[to]
        )
        with pytest.raises(errors.ReadError, match="shrunk"):
            gathered(store, rows)


def test_a_file_that_goes_away_while_it_is_open_can_still_be_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))
    with MmapStore(path) as store:
        gathered(store, [1])
        path.unlink()
        assert gathered(store, [3, 9, 4]).tolist() == [3, 9, 4]


def test_a_file_that_goes_away_before_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))
    with MmapStore(path) as store:
        path.unlink()
        with pytest.raises(FileNotFoundError, match="not any more"):
            gathered(store, [3])


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))

    def fails(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_reader.os, "preadv", fails)
    with MmapStore(path) as store, pytest.raises(errors.ReadError, match=r"x\.npy") as caught:
        gathered(store, [3])
    assert caught.value.errno == 5


@pytest.mark.parametrize("call", [True, False], ids=["one call", "row by row"])
def test_a_write_that_fails_is_the_error_it_is(
    tmp_path: Path, call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to write beyond a limit, as it does on a full disk; rows before it are written."""
    if not call:
        monkeypatch.setattr(linux_aio.Requests, "make", lambda: None)
    path = saved(tmp_path / "x.npy", np.zeros(10_000))
    with MmapStore(path, mode="r+") as store:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                store.scatter(np.array([3, 9000]), np.array([1.0, 2.0]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.filename == str(path)
        assert gathered(store, [3, 9000]).tolist() == [1, 0]


def test_a_file_that_shrank_is_not_made_longer_by_a_write(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.zeros(1000))
    with MmapStore(path, mode="r+") as store:
        os.truncate(path, 500)
        with pytest.raises(errors.ReadError, match="shrunk"):
            store.scatter(np.array([900]), np.array([1.0]))
        assert path.stat().st_size == 500


def test_every_shard_is_flushed_even_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that failed is tried again the next time."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.zeros(10))
    store = MmapStore(tmp_path / "*.npy", mode="r+")
    store.scatter(np.array([5, 15, 25]), np.ones(3))
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(synced) == 2:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_reader.os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert len(set(synced)) == 3
    store.close()
    assert synced[3:] == synced[1:2]


def test_an_interrupted_call_does_not_answer_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "x.npy", np.arange(100.0))

    def interrupted(self: Any, n: int) -> Any:
        raise KeyboardInterrupt

    with MmapStore(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(linux_aio.Requests, "_reap", interrupted)
            with pytest.raises(KeyboardInterrupt):
                gathered(store, [3, 1])
        assert gathered(store, [30, 10, 50]).tolist() == [30, 10, 50]
        os.truncate(path, 300)
        with pytest.raises(errors.ReadError, match="shrunk"):
            gathered(store, [30, 10, 50])


def test_native_aio_works_here() -> None:
    """It is the fast path of every test machine: were it to fail in silence, nothing else would notice."""
    requests = linux_aio.Requests.make()
    assert requests is not None
    requests.close()
    requests.close()


def test_a_forked_process_makes_a_context_of_its_own(tmp_path: Path) -> None:
    with MmapStore(saved(tmp_path / "x.npy", np.arange(10.0))) as store:
        gathered(store, [3, 1])
        pid = os.fork()
        if pid == 0:
            os._exit(0 if gathered(store, [9, 2]).tolist() == [9, 2] else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_thousand_shards_do_not_exhaust_descriptors(tmp_path: Path) -> None:
    for i in range(1000):
        np.save(tmp_path / f"{i:04}.npy", np.array([i, i + 0.5]))
    before = len(os.listdir("/proc/self/fd"))
    with MmapStore(tmp_path / "*.npy", mode="r+") as store:
        rows = np.random.default_rng(0).permutation(2000)
        np.testing.assert_array_equal(gathered(store, rows), rows / 2)
        store.scatter(rows, -rows / 2)
        np.testing.assert_array_equal(gathered(store, np.arange(2000)), -np.arange(2000) / 2)
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 64


def test_shards_that_do_not_match(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.npy", np.zeros((2, 3))), saved(tmp_path / "b.npy", np.zeros((2, 4)))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        MmapStore([a, b])
    with pytest.raises(errors.ArgumentError, match="at least one"):
        MmapStore([])
    with pytest.raises(errors.FileMissing, match="no file matches"):
        MmapStore(tmp_path / "c*.npy")


def test_use_after_close(tmp_path: Path) -> None:
    store = MmapStore(saved(tmp_path / "x.npy", np.arange(10.0)))
    store.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        gathered(store, [3])


def test_a_mode_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="'w'"):
        MmapStore(saved(tmp_path / "x.npy", np.arange(10.0)), mode="w")


def test_rows_of_no_bytes(tmp_path: Path) -> None:
    with MmapStore(saved(tmp_path / "x.npy", np.zeros((5, 0)))) as store:
        assert gathered(store, [3, 1]).shape == (2, 0)


# ---- PinnedStore ---------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_pinned_store_without_cuda() -> None:
    with pytest.raises(errors.MissingDependency, match='pin="auto"'):
        PinnedStore.zeros((10, 2))
    store = PinnedStore.zeros((10, 2), pin="auto")
    assert not store.page_locked


class Refusing:
    """CuPy's runtime, where the driver locks nothing."""

    class CUDARuntimeError(RuntimeError):
        pass

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        raise self.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    def hostUnregister(self, address: int) -> None:
        raise AssertionError


class Unlockable(mmap.mmap):
    """Memory that the system does not let the driver lock."""

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
    """CuPy's runtime, where the driver locks what it is asked for."""

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
    u = PinnedStore.uniform((1000, 50), dtype, low=-1, high=3, pin=False).array.astype(float)
    assert u.min() >= -1
    assert u.max() <= 3
    assert abs(u.mean() - 1) < 0.1


def test_pinned_store_refuses() -> None:
    with pytest.raises(errors.StoreError, match="no rows"):
        PinnedStore.zeros((0, 3), pin=False)
    with pytest.raises(errors.StoreError, match="floating point"):
        PinnedStore.normal((3, 3), "int32", pin=False)
    with pytest.raises(errors.StoreError, match="no torch counterpart"):
        PinnedStore.zeros((3,), "S3", pin=False)


WRONG_SHAPES = {
    (): "expected .*, whole numbers",
    (0, 3): "has no rows",
    (-1, 3): "has no rows",
    (3, -1): "has no rows",
    (1.5, 2): r"shape=\(1.5, 2\); expected .*, whole numbers",
    (True, 2): "expected .*, whole numbers",
    ("3", 2): "expected .*, whole numbers",
    "32": "shape='32'; expected .*, whole numbers",
    5: "shape=5; expected .*, whole numbers",
    (
        2**62,
        4,
    ): r"shape \(4611686018427387904, 4\) of float32 takes 73,786,976,294,838,206,464 bytes; expected at most 9,223,372,036,854",
    (2**61,): "takes 9,223,372,036,854,775,808 bytes",
    (2**61 - 1,): "takes 9,223,372,036,854,775,804 bytes",
    (2**70, 0): "expected at most",
}


@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=str)
def test_shapes_of_which_no_store_can_be_made(shape: Any, tmp_path: Path) -> None:
    """Nothing is made, and a file that is there stays."""
    np.save(tmp_path / "old.npy", np.ones((3, 2), np.float32))
    makers: dict[str, Callable[[], object]] = {
        "PinnedStore": lambda: PinnedStore.empty(shape, pin=False),
        "new.npy": lambda: MmapStore.create(tmp_path / "new.npy", shape),
        "old.npy": lambda: MmapStore.create(tmp_path / "old.npy", shape, overwrite=True),
    }
    for name, make in makers.items():
        with pytest.raises(errors.StoreError, match=f"{name}: .*{WRONG_SHAPES[shape]}"):
            make()
    assert os.listdir(tmp_path) == ["old.npy"]
    assert (np.load(tmp_path / "old.npy") == 1).all()


BASE = np.arange(60, dtype=np.float32)
APART = {
    "whole": BASE.reshape(6, 10),
    "every other row": BASE.reshape(6, 10)[::2],
    "every other number": BASE.reshape(6, 10)[:, 1::2],
    "backwards": BASE.reshape(6, 10)[::-1, ::-1],
    "axes exchanged": BASE.reshape(3, 4, 5).transpose(1, 0, 2),
    "one row": np.lib.stride_tricks.as_strided(BASE, (1, 5), (0, 4)),
    "no columns": BASE.reshape(6, 10)[:, :0],
    "a field": np.zeros((4, 2), [("a", "f4"), ("b", "f8")])["b"],
}
SHARING = {
    "windows": np.lib.stride_tricks.as_strided(BASE, (20, 4), (8, 4)),
    "a row again and again": np.lib.stride_tricks.as_strided(BASE, (6, 10), (0, 4)),
    "a number again and again": np.lib.stride_tricks.as_strided(BASE, (6, 10), (4, 0)),
    "half an element": np.lib.stride_tricks.as_strided(BASE, (6,), (2,)),
    "backwards": np.lib.stride_tricks.as_strided(BASE[40:], (6, 4), (-8, -4)),
    "expand": torch.ones(1, 4).expand(6, 4),
    "expand a number": torch.ones(6, 1).expand(6, 4),
    "as_strided": torch.arange(60.0).as_strided((20, 4), (2, 1)),
}


@pytest.mark.parametrize("name", APART)
def test_arrays_with_memory_for_each_element_can_be_written(name: str) -> None:
    array = APART[name].copy(order="K")
    store = ArrayStore(APART[name])
    assert store.writable
    store.scatter(np.arange(len(array)), array)
    np.testing.assert_array_equal(store.array, array)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", SHARING)
def test_arrays_that_share_memory_with_themselves_are_read_and_not_written(
    name: str, depth: int
) -> None:
    source = SHARING[name]
    before = np.array(source.tolist(), np.float32)
    store = ArrayStore(source)
    assert not store.writable
    with pytest.raises(errors.WriteBackError, match="several elements are the same memory"):
        store.scatter(np.arange(2), np.zeros((2, *store.row_shape), np.float32))
    with Feeder(source, batch_size=4, depth=depth) as feeder:
        np.testing.assert_array_equal(torch.cat(list(feeder)).numpy(force=True), before)
        with pytest.raises(
            errors.WriteBackError,
            match=r"write_back to source: .* several elements are the same memory, .* give a copy",
        ):
            for batch in feeder.batches():
                batch.write_back(batch.data)
    np.testing.assert_array_equal(source, before)
    np.testing.assert_array_equal(PinnedStore(source, pin=False).array, before)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(-9, 9), min_size=3, max_size=3),
)
@settings(deadline=None, max_examples=300)
def test_no_array_that_shares_memory_with_itself_is_written(
    shape: list[int], strides: list[int]
) -> None:
    numbers = np.arange(200, dtype=np.uint8)
    array = np.lib.stride_tricks.as_strided(numbers[100:], shape, strides[: len(shape)])
    if len(np.unique(array)) < array.size:
        assert shares_itself(array)
    elif array.flags.c_contiguous or array.flags.f_contiguous:
        assert not shares_itself(array)


def test_rows_of_no_bytes_are_made_in_memory_only(tmp_path: Path) -> None:
    assert PinnedStore.empty((3, 0), pin=False).row_shape == (0,)
    with pytest.raises(errors.StoreError, match=r"shape \(3, 0\) has rows of no bytes"):
        MmapStore.create(tmp_path / "x.npy", (3, 0))
    assert not os.listdir(tmp_path)


def test_more_memory_than_an_address_can_tell() -> None:
    with pytest.raises(MemoryError, match=f"the system has no {2**63} bytes for rows"):
        anonymous(2**63)


def test_a_file_that_is_overwritten_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    """An open file goes on as it was; a link stays one, and so do permissions.

    What a killed process has left is in nobody's way.
    """
    np.save(tmp_path / "old.npy", np.ones((3, 2), np.float32))
    (tmp_path / "old.npy").chmod(0o640)
    (tmp_path / f"old.npy.{os.getpid()}.writing").write_bytes(b"left")
    (tmp_path / "link.npy").symlink_to(tmp_path / "old.npy")
    with MmapStore(tmp_path / "old.npy") as before:
        before.gather(np.arange(1), np.empty((1, 2), np.float32))  # opens it
        MmapStore.create(tmp_path / "link.npy", (4, 2), overwrite=True).close()
        assert gathered(before, [2]).tolist() == [[1, 1]]
    assert np.load(tmp_path / "old.npy").tolist() == [[0, 0]] * 4
    assert (tmp_path / "link.npy").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.npy", "old.npy"]
    assert (tmp_path / "old.npy").stat().st_mode & 0o777 == 0o640


def test_a_store_of_ones_own(tmp_path: Path) -> None:
    """Whatever keeps the contract can be fed."""

    class Squares:
        n_rows = 1000
        row_shape = (2,)
        dtype = np.dtype(np.int64)
        writable = False
        resident_bytes = 0

        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            out[:, 0], out[:, 1] = rows, rows**2

        def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
            raise AssertionError

        def flush(self) -> None: ...

        def close(self) -> None:
            raise AssertionError("a store that was given is its giver's to close")

    with Feeder(Squares(), batch_size=64, shuffle=True, device="cpu") as feeder:
        out = torch.cat(list(feeder))
    assert torch.equal(out[:, 0] ** 2, out[:, 1])
    assert sorted(out[:, 0].tolist()) == list(range(1000))
