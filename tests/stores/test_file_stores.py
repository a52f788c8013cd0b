"""Rows of .npy files on disk."""

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import gather_at, gathered, saved

from pinfeed import NpyStore, errors
from pinfeed.memory.host import resident_bytes
from pinfeed.stores import file_reader
from pinfeed.testing.suites import StoreTests, sample

# One class has every shape.
_FEW_SHAPES = ((), (2, 1, 3, 2))


class TestNpyStore(StoreTests):
    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
        np.save(tmp_path / "x.npy", array)
        return NpyStore(tmp_path / "x.npy", mode="r+", dtype=array.dtype)


@pytest.mark.usefixtures("without_native")
class TestNpyStoreWithoutCompiledFunctions(TestNpyStore):
    """Rows are read and written one by one."""


class TestNpyStoreOfShards(StoreTests):
    row_shapes = _FEW_SHAPES

    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
        # Shards of different sizes, one of them empty.
        cuts = [0, 1, 1, 5, 6, len(array)]
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            np.save(tmp_path / f"x-{i}.npy", array[start:stop])
        return NpyStore(tmp_path / "x-*.npy", mode="r+", dtype=array.dtype)


class TestNpyStoreOfTheOtherByteOrder(StoreTests):
    row_shapes = _FEW_SHAPES

    def make(self, array: np.ndarray, tmp_path: Path) -> NpyStore:
        if array.dtype.kind == "V":
            pytest.skip("numpy writes no byte order for bfloat16")
        np.save(tmp_path / "x.npy", array.astype(array.dtype.newbyteorder(">")))
        return NpyStore(tmp_path / "x.npy", mode="r+")


def test_npy_store_is_read_only_unless_asked(tmp_path: Path) -> None:
    with NpyStore(saved(tmp_path / "x.npy", np.zeros((3, 2)))) as store:
        assert not store.writable
        with pytest.raises(errors.WriteBackError, match="read-only"):
            store.scatter(np.array([0]), np.ones((1, 2)))


def test_npy_store_writes_through(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.zeros((5, 2)))
    with NpyStore(path, mode="r+") as store:
        store.scatter(np.array([4, 1]), np.array([[1.0, 2], [3, 4]]))
        store.flush()
        np.testing.assert_array_equal(np.load(path), [[0, 0], [3, 4], [0, 0], [0, 0], [1, 2]])


def test_npy_store_does_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    # The file has 16 MiB.
    path = saved(tmp_path / "x.npy", sample(1 << 12, (1 << 12,), np.dtype(np.uint8)))
    with NpyStore(path) as store:
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
    tmp_path: Path, to: str, rows: list[int], call: bool, request: pytest.FixtureRequest
) -> None:
    if not call:
        request.getfixturevalue("without_native")
    path = saved(tmp_path / "x.npy", np.ones((100, 1000)))
    with NpyStore(path) as store:
        gathered(store, rows)
        os.truncate(
            path, {"mid-page": path.stat().st_size - 10, "mid-file": 100_000, "nothing": 0}[to]
        )
        with pytest.raises(errors.ReadError, match="shrunk"):
            gathered(store, rows)


def test_an_open_file_that_is_deleted_can_still_be_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))
    with NpyStore(path) as store:
        gathered(store, [1])
        path.unlink()
        assert gathered(store, [3, 9, 4]).tolist() == [3, 9, 4]


def test_a_file_that_is_deleted_before_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))
    with NpyStore(path) as store:
        path.unlink()
        with pytest.raises(FileNotFoundError, match="no longer exists"):
            gathered(store, [3])


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "x.npy", np.arange(10.0))

    def fails(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_reader.os, "preadv", fails)
    with NpyStore(path) as store, pytest.raises(errors.ReadError, match=r"x\.npy") as caught:
        gathered(store, [3])
    assert caught.value.errno == 5


def n_write_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw:"))


@pytest.mark.parametrize("call", [True, False], ids=["one call", "row by row"])
def test_consecutive_rows_are_written_together(
    tmp_path: Path, call: bool, request: pytest.FixtureRequest
) -> None:
    if not call:
        request.getfixturevalue("without_native")
    paths = [saved(tmp_path / f"{i}.npy", np.zeros((5000, 3))) for i in range(2)]
    # Two runs, one of which extends over both files, single rows, and a run that descends.
    rows = np.concatenate(
        [np.arange(4000, 6000), np.arange(100), [9000, 777], np.arange(900, 890, -1)]
    )
    values = np.random.default_rng(0).normal(size=(len(rows), 3))
    with NpyStore(paths, mode="r+") as store:
        before = n_write_calls()
        store.scatter(rows, values)
        assert n_write_calls() - before <= 20
        np.testing.assert_array_equal(gathered(store, rows), values)
    expected = np.zeros((10_000, 3))
    expected[rows] = values
    np.testing.assert_array_equal(np.concatenate([np.load(path) for path in paths]), expected)


@pytest.mark.parametrize("call", [True, False], ids=["one call", "row by row"])
def test_a_write_that_fails_raises_the_error_of_the_system(
    tmp_path: Path, call: bool, request: pytest.FixtureRequest
) -> None:
    """The system refuses to write beyond a limit, as on a full disk; rows before it are written."""
    if not call:
        request.getfixturevalue("without_native")
    path = saved(tmp_path / "x.npy", np.zeros(10_000))
    with NpyStore(path, mode="r+") as store:
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
    with NpyStore(path, mode="r+") as store:
        os.truncate(path, 500)
        with pytest.raises(errors.ReadError, match="shrunk"):
            store.scatter(np.array([900]), np.array([1.0]))
        assert path.stat().st_size == 500


def test_every_shard_is_flushed_even_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard whose flush failed is flushed again the next time."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.zeros(10))
    store = NpyStore(tmp_path / "*.npy", mode="r+")
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


def test_a_thousand_shards_do_not_exhaust_descriptors(tmp_path: Path) -> None:
    for i in range(1000):
        np.save(tmp_path / f"{i:04}.npy", np.array([i, i + 0.5]))
    before = len(os.listdir("/proc/self/fd"))
    with NpyStore(tmp_path / "*.npy", mode="r+") as store:
        rows = np.random.default_rng(0).permutation(2000)
        np.testing.assert_array_equal(gathered(store, rows), rows / 2)
        store.scatter(rows, -rows / 2)
        np.testing.assert_array_equal(gathered(store, np.arange(2000)), -np.arange(2000) / 2)
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 64


@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 12), (1, 3), (2, 9), (4, 5), (6, 12)])
def test_consecutive_rows_of_shards(dtype: str, begin: int, end: int, tmp_path: Path) -> None:
    """They may begin and end within a shard, and contain whole shards."""
    whole = np.arange(24, dtype=np.float32).reshape(12, 2)
    for i, part in enumerate(np.split(whole, [4, 5, 8])):
        np.save(tmp_path / f"{i}.npy", part.astype(dtype))
    rows = np.arange(begin, end)
    with NpyStore(tmp_path / "*.npy") as store:
        mapped = store.map_rows()
        for source in (store, mapped):
            np.testing.assert_array_equal(gathered(source, rows), whole[begin:end])
            out = np.full((15, 2), -1, np.float32)
            gather_at(source, rows, out, rows - begin + 2)
            np.testing.assert_array_equal(out[2 : 2 + len(rows)], whole[begin:end])
            assert (out[:2] == -1).all()
            assert (out[2 + len(rows) :] == -1).all()
        mapped.close()


def test_shards_that_do_not_match(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.npy", np.zeros((2, 3))), saved(tmp_path / "b.npy", np.zeros((2, 4)))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        NpyStore([a, b])
    with pytest.raises(errors.ArgumentError, match="at least one"):
        NpyStore([])
    with pytest.raises(errors.FileMissing, match="no file matches"):
        NpyStore(tmp_path / "c*.npy")


def test_use_after_close(tmp_path: Path) -> None:
    store = NpyStore(saved(tmp_path / "x.npy", np.arange(10.0)))
    store.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        gathered(store, [3])


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="'w'"):
        NpyStore(saved(tmp_path / "x.npy", np.arange(10.0)), mode="w")


def test_rows_of_no_bytes(tmp_path: Path) -> None:
    with NpyStore(saved(tmp_path / "x.npy", np.zeros((5, 0)))) as store:
        assert gathered(store, [3, 1]).shape == (2, 0)


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    """An open file stays unchanged; a link and permissions are kept.

    A temporary file that a killed process has left behind does not matter.
    """
    np.save(tmp_path / "old.npy", np.ones((3, 2), np.float32))
    (tmp_path / "old.npy").chmod(0o640)
    (tmp_path / f"old.npy.{os.getpid()}.writing").write_bytes(b"left")
    (tmp_path / "link.npy").symlink_to(tmp_path / "old.npy")
    with NpyStore(tmp_path / "old.npy") as before:
        # The file is opened by the first gather.
        before.gather(np.arange(1), np.empty((1, 2), np.float32))
        NpyStore.create(tmp_path / "link.npy", (4, 2), overwrite=True).close()
        assert gathered(before, [2]).tolist() == [[1, 1]]
    assert np.load(tmp_path / "old.npy").tolist() == [[0, 0]] * 4
    assert (tmp_path / "link.npy").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.npy", "old.npy"]
    assert (tmp_path / "old.npy").stat().st_mode & 0o777 == 0o640
