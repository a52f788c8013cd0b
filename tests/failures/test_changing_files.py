"""Files that other programs change while several processes or threads loop over them."""

import os
import select
import shutil
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from pinfeed import Feeder, NpyStore, Ranks, errors
from pinfeed.native import library as native

# Rows of 2 KiB, so that pages of the file are lost in each batch.
N, WIDTH, SIZE = 1200, 256, 20
LIMIT_S = 20
N_PROCESSES = 3

needs_native = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
ignores_forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(N * WIDTH, dtype=np.float64).reshape(N, WIDTH)


@pytest.fixture
def path(x: np.ndarray, tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy"


def feeder_of(source: Any, **options: Any) -> Feeder:
    return Feeder(source, batch_size=SIZE, shuffle=True, device="cpu", **options)


def epoch(feeder: Feeder, x: np.ndarray) -> int:
    """Loop over an epoch, compare its rows with those of ``x``, and return their number."""
    n = 0
    for batch in feeder:
        # The first value of a row tells which row it is.
        assert (batch.numpy() == x[batch[:, 0].numpy().astype(int) // WIDTH]).all()
        n += len(batch)
    return n


def loop_until_the_file_shrinks(feeder: Feeder, tell_ready: Callable[[], object]) -> None:
    next(iter(feeder))
    tell_ready()
    with pytest.raises(errors.ReadError, match=r"x\.npy has shrunk to 5000 bytes"):
        while True:
            for _ in feeder:
                pass


# ---- files that shrink ---------------------------------------------------------------------------


class Children:
    """Forked processes, which take each step of a test together with this process."""

    def __init__(self, run: Callable[[int, "Children"], object], n: int) -> None:
        self.n = n
        self._reports = os.pipe()
        self._orders = os.pipe()
        self._pids = [self._fork(run, rank) for rank in range(n)]

    def _fork(self, run: Callable[[int, "Children"], object], rank: int) -> int:
        if pid := os.fork():
            return pid
        signal.alarm(LIMIT_S)
        # The child has no threads of OpenMP, and would wait for them.
        torch.set_num_threads(1)
        try:
            run(rank, self)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def report(self) -> None:
        """Tell the parent that this child is ready for its next step."""
        os.write(self._reports[1], b"!")

    def wait(self) -> None:
        """Wait in a child until the parent goes on."""
        os.read(self._orders[0], 1)

    def wait_for_all(self) -> None:
        """Wait until each child has reported."""
        for _ in range(self.n):
            assert select.select([self._reports[0]], [], [], LIMIT_S)[0], "a child has hung or died"
            os.read(self._reports[0], 1)

    def go_on(self) -> None:
        os.write(self._orders[1], b"!" * self.n)

    def join(self) -> list[int]:
        """Wait for the processes, and return their exit codes."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        for fd in (*self._reports, *self._orders):
            os.close(fd)
        return codes


@needs_native
@ignores_forks
@pytest.mark.parametrize("depth", [0, 2, None])
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_file_that_shrinks_in_processes_of_a_job(
    path: Path, x: np.ndarray, depth: int | None, is_inherited: bool
) -> None:
    """Each process gets the error, and continues with the restored file and the same feeder."""
    n_rounds = 3

    def run(rank: int, children: Children) -> None:
        source = store if is_inherited else path
        ranks = Ranks("pad", rank=rank, world_size=N_PROCESSES)
        with feeder_of(source, depth=depth, ranks=ranks) as feeder:
            for _ in range(n_rounds):
                loop_until_the_file_shrinks(feeder, children.report)
                children.report()
                children.wait()
                assert epoch(feeder, x) == N // N_PROCESSES

    with NpyStore(path) as store, feeder_of(store) as feeder:
        # Children that use this store inherit its memory map and the signal handler.
        assert epoch(feeder, x) == N
        children = Children(run, N_PROCESSES)
        for _ in range(n_rounds):
            children.wait_for_all()
            os.truncate(path, 5000)
            children.wait_for_all()
            np.save(path, x)
            children.go_on()
        assert children.join() == [0] * N_PROCESSES
        assert epoch(feeder, x) == N


class ValuesUntilAnError(IterableDataset[Any]):
    """A value of each batch of a feeder that each worker process makes, then the error."""

    def __init__(self, path: Path, depth: int | None) -> None:
        self._path = path
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        with feeder_of(self._path, depth=self._depth, ranks="all") as feeder:
            try:
                while True:
                    for batch in feeder:
                        yield batch[0, 0].item()
            except errors.ReadError as error:
                yield str(error)


@needs_native
@ignores_forks
@pytest.mark.parametrize("depth", [0, 2])
def test_a_file_that_shrinks_in_workers_of_a_loader(path: Path, depth: int) -> None:
    loader = DataLoader(
        ValuesUntilAnError(path, depth),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=LIMIT_S,
    )
    messages = []
    for number, item in enumerate(loader):
        if number == 4:
            os.truncate(path, 5000)
        if isinstance(item, str):
            messages.append(item)
    assert len(messages) == loader.num_workers
    assert all("x.npy has shrunk to 5000 bytes" in message for message in messages)


@needs_native
def test_a_file_that_shrinks_in_threads_with_a_feeder_each(path: Path, x: np.ndarray) -> None:
    depths = [0, 1, 3, None]
    in_step = threading.Barrier(len(depths) + 1, timeout=LIMIT_S)
    n_rounds = 3

    def run(depth: int | None) -> None:
        with feeder_of(path, depth=depth) as feeder:
            for _ in range(n_rounds):
                loop_until_the_file_shrinks(feeder, in_step.wait)
                in_step.wait()
                in_step.wait()
                assert epoch(feeder, x) == N

    with ThreadPoolExecutor(len(depths)) as threads:
        loops = [threads.submit(run, depth) for depth in depths]
        for _ in range(n_rounds):
            in_step.wait()
            os.truncate(path, 5000)
            in_step.wait()
            np.save(path, x)
            in_step.wait()
        for loop in loops:
            loop.result()


# ---- files with holes, and files that are replaced -----------------------------------------------


@pytest.mark.parametrize("depth", [0, 2, None])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_rows_become_zeros_in_a_hole_of_the_file(
    path: Path, x: np.ndarray, depth: int | None, is_mapped: bool
) -> None:
    """The hole begins and ends within a row; all other rows stay."""
    begin, end = N * WIDTH * 2, N * WIDTH * 4 + 100
    with NpyStore(path, memory_map=is_mapped) as store, feeder_of(store, depth=depth) as feeder:
        assert epoch(feeder, x) == N
        loop = iter(feeder)
        next(loop)
        punch_hole(path, begin, end)
        assert sum(len(batch) for batch in loop) == N - SIZE
        expected = np.load(path)
        assert (expected.reshape(-1)[(begin - 128) // 8 + 1 : (end - 128) // 8 - 1] == 0).all()
        rows = torch.cat(list(feeder)).numpy()
        np.testing.assert_array_equal(np.sort(rows.sum(1)), np.sort(expected.sum(1)))


def punch_hole(path: Path, begin: int, end: int) -> None:
    command = ["fallocate", "-p", "-o", str(begin), "-l", str(end - begin), path]
    if shutil.which("fallocate") is None:
        pytest.skip("fallocate is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if "not supported" in done.stderr:
        pytest.skip("the file system has no holes")
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("how", ["map", "write", "restored time"])
@pytest.mark.parametrize("depth", [0, 2, None])
def test_a_copy_in_memory_has_each_change_between_epochs(
    path: Path, x: np.ndarray, depth: int | None, how: str
) -> None:
    writer = np.load(path, mmap_mode="r+")
    # A page that is dirty already changes without a new time of the file.
    writer[:] = x
    if how != "map":
        writer.flush()
        del writer
    with NpyStore(path, memory_map=False) as store, feeder_of(store, depth=depth) as feeder:
        assert "loaded into RAM" in feeder.plan.notes[0]
        for added in range(3):
            assert sum(batch.sum().item() for batch in feeder) == x.sum() + added * x.size
            status = os.stat(path)
            if how == "map":
                writer += 1
                continue
            with open(path, "r+b") as file:
                np.save(file, x + added + 1)
            if how == "restored time":
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("depth", [0, 2, None])
def test_a_file_that_a_shorter_one_replaces_is_read_to_its_end(
    path: Path, x: np.ndarray, depth: int | None
) -> None:
    np.save(path.with_name("other.npy"), x[:7] + 1)
    with feeder_of(path, depth=depth) as feeder:
        loop = iter(feeder)
        next(loop)
        os.replace(path.with_name("other.npy"), path)
        assert sum(len(batch) for batch in loop) == N - SIZE
        assert epoch(feeder, x) == N
