"""Faults of files and of memory: the error, no lost rows, and a feeder that works again."""

import contextlib
import errno
import os
import pickle
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_disk import file_limit, fill

from pinfeed import Feeder, HostEmbedding, NpyStore, PinnedStore, checkpoint, errors, rows
from pinfeed.devices.cpu import HostDevice
from pinfeed.stores import file_reader
from pinfeed.testing import SimDevice

N, SIZE = 600, 20
ORDERS = {
    "sequence": rows.sequential(),
    "shuffled": rows.shuffled(3),
    "blocks": rows.block_shuffled(3, block_rows=32),
}


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(N * 4, dtype=np.float32).reshape(N, 4)


@pytest.fixture
def path(x: np.ndarray, tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy"


# ---- the disk ------------------------------------------------------------------------------------


class Disk:
    """System calls that read files, with faults in one batch, for scattered rows and for runs."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: str, n_good: int) -> None:
        self.fault = fault
        self.n_good = n_good
        self._preadv = os.preadv
        self._request_each = file_reader.request_each
        patch.setattr(file_reader.os, "preadv", self.preadv)
        patch.setattr(file_reader, "request_each", self.request_each)

    def is_bad(self) -> bool:
        self.n_good -= 1
        return self.n_good < 0

    def preadv(self, fd: int, buffers: list[Any], offset: int) -> int:
        if self.fault == "short":
            return self._preadv(fd, [buffers[0][:7]], offset)
        if self.fault == "EIO" and self.is_bad():
            raise OSError(errno.EIO, "Input/output error")
        return self._preadv(fd, buffers, offset)

    def request_each(self, *request: Any) -> Any:
        results = self._request_each(*request)
        if results is None:
            return None
        if self.fault == "short":
            results //= 2
        if self.fault == "EINTR":
            results[:] = -errno.EINTR
        if self.fault == "EIO" and len(results) and self.is_bad():
            results[0] = -errno.EIO
            self.n_good = 0
        return results


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("depth", "n_good"), [(0, 3), (1, 0), (3, 3)])
def test_an_error_of_the_disk(
    path: Path, x: np.ndarray, order: str, depth: int, n_good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is open for writing, because rows of a read-only file may be served from memory."""
    with (
        NpyStore(path, mode="r+", memory_map=False) as store,
        Feeder(store, batch_size=SIZE, rows=ORDERS[order], depth=depth) as feeder,
    ):
        want = [x[batch.rows] for batch in feeder.batches()]
        feeder.set_epoch(0)
        with monkeypatch.context() as patch:
            Disk(patch, "EIO", n_good)
            got = []
            with pytest.raises(errors.ReadError, match=r"x\.npy") as caught:
                for batch in feeder:
                    got.append(batch.numpy(force=True))  # noqa: PERF401
        assert caught.value.errno == errno.EIO
        assert "file_reader.py" in "".join(traceback.format_tb(caught.value.__traceback__))
        # The traceback of the error keeps the file open.
        del caught
        assert len(got) == n_good
        assert all(map(np.array_equal, got, want))
        feeder.set_epoch(0)
        assert all(map(np.array_equal, [batch.numpy(force=True) for batch in feeder], want)), (
            "the disk works again"
        )


@pytest.mark.parametrize("fault", ["short", "EINTR"])
@pytest.mark.parametrize("order", ORDERS)
def test_reads_that_are_cut_short_or_interrupted(
    path: Path, x: np.ndarray, order: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, fault, 0)
    with (
        NpyStore(path, memory_map=False) as store,
        Feeder(store, batch_size=SIZE, rows=ORDERS[order]) as feeder,
    ):
        for batch in feeder.batches():
            np.testing.assert_array_equal(batch.data.numpy(force=True), x[batch.rows])


def refused_save(
    directory: Path, room: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    table = HostEmbedding(500, 64, init="ones", name="table")  # 128 KB
    first = checkpoint.save(directory / "run", table=table, step=1)
    table.reset_parameters("zeros")
    with room(), pytest.raises(OSError, match=r"No space left|File too large"):
        checkpoint.save(directory / "run", table=table, step=2)
    assert os.listdir(directory / "run") == [first.name], "nothing remains of the failed save"
    assert checkpoint.resume(directory / "run", table=table) == {"step": 1}
    assert (table.read([7]) == 1).all()
    old = table.export(directory / "table.npy") or (directory / "table.npy").read_bytes()
    with room(), pytest.raises(OSError, match=r"No space left|File too large"):
        table.export(directory / "table.npy")
    assert (directory / "table.npy").read_bytes() == old
    assert sorted(os.listdir(directory))[-2:] == ["run", "table.npy"]


def test_a_disk_that_is_full(small_disk: Path) -> None:
    @contextlib.contextmanager
    def room() -> Iterator[None]:
        fill(small_disk, 50_000)
        yield
        (small_disk / "ballast").unlink()

    refused_save(small_disk, room)
    shutil.rmtree(small_disk / "run")
    (small_disk / "table.npy").unlink()
    with (
        NpyStore.create(small_disk / "rows.npy", (4096, 128), "float32") as store,
        Feeder(store, batch_size=64, depth=2) as feeder,
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            # The file has 2 MiB, most of which is a hole without blocks on the disk.
            for batch in feeder.batches():
                batch.write_back(batch.data + batch.rows[0] + 1)
        assert caught.value.filename == str(small_disk / "rows.npy")
        feeder.close()
        found = np.load(small_disk / "rows.npy")[:, 0]
        n = int(np.argmin(found != 0))
        assert n > 1000
        np.testing.assert_array_equal(found[: n // 64 * 64], np.arange(n // 64 * 64) // 64 * 64 + 1)
        assert not found[n:].any(), "no later write has overtaken it"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_is_larger_than_the_file_system_allows(
    tmp_path: Path, path: Path, x: np.ndarray, overwrite: bool
) -> None:
    with (
        file_limit(50_000),
        pytest.raises(
            errors.StoreError,
            match=r"\.npy: shape \(5000, 4\) of float32 needs 80,000 bytes, but the file",
        ),
    ):
        NpyStore.create(path if overwrite else tmp_path / "new.npy", (5000, 4), overwrite=overwrite)
    assert os.listdir(tmp_path) == ["x.npy"]
    np.testing.assert_array_equal(np.load(path), x)


def test_no_room_for_a_file(tmp_path: Path, x: np.ndarray) -> None:
    refused_save(tmp_path, lambda: file_limit(50_000))
    (tmp_path / "full.json").symlink_to("/dev/full")
    with Feeder(x, batch_size=SIZE, timeline=True) as feeder:
        list(feeder)
        with pytest.raises(OSError, match="No space left"):
            feeder.timeline.save(tmp_path / "full.json")
        feeder.timeline.save(tmp_path / "t.json")


def test_a_file_that_is_replaced_while_it_is_streamed(path: Path, x: np.ndarray) -> None:
    """An open file stays unchanged; a path that now names another file is an error."""
    np.save(path.with_name("other.npy"), x + 1)
    with Feeder(path, batch_size=SIZE) as feeder:
        loop = iter(feeder)
        np.testing.assert_array_equal(next(loop).numpy(force=True), x[:SIZE])
        path.with_name("other.npy").replace(path)
        np.testing.assert_array_equal(torch.cat(list(loop)).numpy(force=True), x[SIZE:])
    with (
        NpyStore(path, memory_map=False) as store,
        Feeder(store, batch_size=SIZE) as feeder,
    ):
        np.save(path.with_name("other.npy"), x[:, :3])
        path.with_name("other.npy").replace(path)
        with pytest.raises(
            errors.ReadError,
            match=r"x\.npy was replaced by another file since its header was read; open it again",
        ):
            next(iter(feeder))


def test_a_file_that_is_deleted_while_it_is_streamed(path: Path, x: np.ndarray) -> None:
    with Feeder(path, batch_size=SIZE) as feeder:
        loop = iter(feeder)
        got = [next(loop)]
        path.unlink()
        np.testing.assert_array_equal(torch.cat([*got, *loop]).numpy(force=True), x)
        assert len(list(feeder)) == N // SIZE


def test_a_file_that_becomes_read_only(path: Path, x: np.ndarray) -> None:
    """A store that is open for writing stays writable; opening the file later is an error.

    (root may write whatever the mode says.)
    """
    with NpyStore(path, mode="r+") as store, Feeder(store, batch_size=SIZE) as feeder:
        for i, batch in enumerate(feeder.batches()):
            batch.write_back(batch.data + 1)
            if i == 0:
                path.chmod(0o444)
    np.testing.assert_array_equal(np.load(path), x + 1)
    path.parent.chmod(0o755)
    euid = os.geteuid()
    with (
        NpyStore(path, mode="r+", memory_map=False) as store,
        Feeder(store, batch_size=SIZE) as feeder,
    ):
        os.seteuid(65534) if euid == 0 else None
        try:
            with pytest.raises(PermissionError) as caught:
                next(iter(feeder))
        finally:
            os.seteuid(euid)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize(
    "open_it",
    [
        NpyStore,
        lambda path: NpyStore.raw(path, shape=(3,), dtype="u1"),
        lambda path: NpyStore.safetensors(path, "w"),
    ],
)
def test_a_pipe_is_refused_at_once(open_it: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(errors.StoreError, match="is a pipe, a socket or a device; expected a file"):
        open_it(tmp_path / "x.npy")


@pytest.mark.parametrize("shape", [(2**62, 0, 2**62), (2**40, 2**40, 0)])
def test_rows_of_no_bytes_beyond_number(shape: tuple[int, ...], tmp_path: Path) -> None:
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array_header_2_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
    with pytest.raises(
        errors.StoreError, match="has rows of 0 bytes, and more rows than numpy can count"
    ):
        NpyStore(tmp_path / "x.npy")


def test_shards_of_more_rows_than_can_be_counted(tmp_path: Path) -> None:
    for name in "ab":
        with open(tmp_path / f"{name}.npy", "wb") as file:
            np.lib.format.write_array_header_2_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": (2**62, 0)}
            )
    with pytest.raises(errors.StoreError, match="more rows than can be counted"):
        NpyStore(tmp_path / "*.npy")


# ---- memory --------------------------------------------------------------------------------------


class Scarce(HostDevice):
    """CPU device whose memory ends after a number of batches."""

    def __init__(self, n: float) -> None:
        super().__init__()
        self.n = n

    def empty(self, nbytes: int, stream: Any) -> Any:
        self.n -= 1
        if self.n < 0:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        return super().empty(nbytes, stream)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_memory_on_the_device(x: np.ndarray, depth: int, n: int) -> None:
    device = Scarce(n)
    with Feeder(x, batch_size=SIZE, depth=depth, device=device) as feeder:
        got = []
        with pytest.raises(torch.OutOfMemoryError):
            for batch in feeder:
                got.append(batch)  # noqa: PERF402  # as above
        assert len(got) <= n
        device.n = np.inf
        np.testing.assert_array_equal(torch.cat(list(feeder)).numpy(), x)
        np.testing.assert_array_equal(
            torch.cat(got).numpy() if got else x[:0], x[: SIZE * len(got)]
        )


def test_no_memory_for_a_write_back(x: np.ndarray) -> None:
    """Nothing is written, and the same batch can be written when memory is free again."""
    device = Scarce(np.inf)
    with Feeder(x, batch_size=SIZE, device=device) as feeder:
        batch = next(loop := feeder.batches())
        device.n = 0
        with pytest.raises(torch.OutOfMemoryError):
            batch.write_back(batch.data + 1)
        device.n = np.inf
        batch.write_back(batch.data + 1)
        loop.close()  # type: ignore[attr-defined]
    assert x[0, 0] == 1
    assert x[SIZE, 0] == SIZE * 4


def test_a_simulated_device_without_memory(x: np.ndarray) -> None:
    class Full(SimDevice):
        is_full = False

        def empty(self, nbytes: int, stream: Any) -> Any:
            if self.is_full:
                raise MemoryError("full")
            return super().empty(nbytes, stream)

    device = Full()
    with Feeder(x, batch_size=SIZE, depth=2, device=device) as feeder:
        loop = iter(feeder)
        next(loop)
        device.is_full = True
        with pytest.raises(MemoryError, match="full"):
            list(loop)
        device.is_full = False
        assert len(list(feeder)) == N // SIZE


@pytest.mark.gpu
def test_no_memory_on_a_gpu(x: np.ndarray) -> None:
    table = np.zeros((1 << 15, 1 << 12), np.float32)  # 512 MiB
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    with Feeder(table, batch_size=1 << 13, device="cuda") as feeder:
        # A batch is 128 MiB.
        torch.cuda.set_per_process_memory_fraction((reserved + (64 << 20)) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                list(feeder)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert sum(len(batch) for batch in feeder) == len(table)


def test_no_memory_on_the_host() -> None:
    """The system refuses memory for a large batch; the feeder still yields smaller ones."""
    # A broadcast array of 4 GiB, which takes no memory.
    table = np.broadcast_to(np.float32(3), (1 << 20, 1 << 10))

    class Chunks:
        def __iter__(self) -> Iterator[np.ndarray]:
            yield from (np.arange(100), np.arange(1 << 20), np.arange(7))

    with Feeder(table, rows=Chunks(), depth=1, device="cpu") as feeder:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
        try:
            loop = iter(feeder)
            assert next(loop).shape == (100, 1 << 10)
            with pytest.raises(
                MemoryError,
                match=r"the system cannot allocate 4294967296 bytes for rows .* "
                "use smaller batches, or free memory",
            ):
                next(loop)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert len(next(iter(feeder))) == 100


# ---- what can be handed to another process -------------------------------------------------------


def test_a_store_of_files_is_opened_again_where_it_is_unpickled(path: Path, x: np.ndarray) -> None:
    with NpyStore(path, keep_cache=False) as store:
        next(iter(Feeder(store, batch_size=SIZE)))
        with pickle.loads(pickle.dumps(store)) as other:
            assert (other.n_rows, other.keep_cache) == (N, False)
            out = np.empty((2, 4), np.float32)
            other.gather(np.array([5, 3]), out)
            np.testing.assert_array_equal(out, x[[5, 3]])
        store.gather(np.array([5, 3]), out)
    with (
        NpyStore(path, mode="r+") as store,
        pytest.raises(TypeError, match="both stores would write to the same files; pass the path"),
    ):
        pickle.dumps(store)


def test_page_locked_rows_are_copied_with_their_memory(x: np.ndarray) -> None:
    store = pickle.loads(pickle.dumps(PinnedStore(x, pin=False)))
    assert type(store) is PinnedStore
    np.testing.assert_array_equal(store.array, x)
    locked = PinnedStore(x, pin=False)
    # Pretend that there is a GPU.
    locked.page_locked = True
    again = pickle.loads(pickle.dumps(locked))
    assert again.page_locked == torch.cuda.is_available(), (
        "ordinary memory is never called page-locked"
    )
    pid = os.fork()
    if pid == 0:
        # The child has no pinned memory of the driver.
        try:
            locked.gather(np.array([1]), np.empty((1, 4), np.float32))
        except errors.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_two_feeders_on_one_store(x: np.ndarray) -> None:
    """If one process writes, the other sees old or new rows, and the writer's loop is exact."""
    table = np.zeros((N, 4))
    with (
        Feeder(table, batch_size=SIZE, depth=3) as writer,
        Feeder(table, batch_size=SIZE, depth=3, shuffle=True) as reader,
    ):
        for epoch in range(5):
            for written, read in zip(writer.batches(), reader, strict=True):
                assert (written.data == epoch).all()
                assert set(read.unique().tolist()) <= {epoch, epoch + 1}
                written.write_back(written.data + 1)
    assert (table == 5).all()
