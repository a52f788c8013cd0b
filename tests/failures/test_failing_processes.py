"""Faults of processes: Ctrl-C, kill -9, fork, spawn, and the end of the interpreter.

Children are forked from this process if programs of users fork as well, because they need not
import torch again.
"""

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import Programs
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    NpyStore,
    RowOptimizer,
    checkpoint,
    errors,
    train_rows,
)
from pinfeed.stores import file_store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

N = 2000
SIZE = 10
LIMIT_S = 30


def forked(run: Callable[[], object], limit_s: int = LIMIT_S) -> int:
    """Fork a child that runs a function and exits with 0 if it returns; return its pid.

    A child that hangs is ended too.
    """
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit_s)
        # The child has no threads of OpenMP, and would wait for them.
        torch.set_num_threads(1)
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rows_of(store: Any) -> np.ndarray:
    out = np.empty((store.n_rows, *store.row_shape), store.dtype)
    store.gather(np.arange(store.n_rows), out)
    return out


def threads_left() -> list[threading.Thread]:
    gc.collect()
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("pinfeed") and thread.ident is not None
    ]


# ---- Ctrl-C --------------------------------------------------------------------------------------


def go_on_after_interrupts(store: Any, ready: int) -> None:
    """Write back until interrupted; then show that no write is lost and that the feeder works."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    feeder = Feeder(store, batch_size=SIZE, depth=3)
    try:
        try:
            os.write(ready, b"!")
            while True:
                for batch in feeder.batches():
                    batch.write_back(batch.data + 1)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        # The second interrupt arrived in the handler of the first one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    feeder.flush_writes()
    before = rows_of(store)
    counts = before.reshape(-1, SIZE * before.shape[1])
    assert (counts == counts[:, :1]).all(), "a batch is written as a whole"
    assert (np.diff(counts[:, 0]) <= 0).all(), "in order"
    assert counts[0, 0] - counts[-1, 0] <= 1
    for batch in feeder.batches():
        batch.write_back(batch.data + 1)
    assert (rows_of(store) == before + 1).all()
    feeder.close()
    for thread in threads_left():
        # A thread whose start was interrupted is in no pool, has no work, and ends on its own.
        thread.join(5)
    assert not threads_left()


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("kind", "n"),
    [
        ("array", 3),
        ("file", 1),
        *(pytest.param(k, 40, marks=pytest.mark.stress) for k in ("array", "file")),
    ],
)
def test_ctrl_c_at_random_moments(kind: str, n: int, twice: bool, tmp_path: Path) -> None:
    """Interrupts are repeated, because Python may lose one in a finalizer ("Exception ignored")."""
    rng = random.Random(7)
    for i in range(n):
        store: Any = ArrayStore(np.zeros((N, 4)))
        if kind == "file":
            np.save(tmp_path / f"{i}.npy", np.zeros((N, 4)))
            store = NpyStore(tmp_path / f"{i}.npy", mode="r+")
        read, write = os.pipe()
        pid = forked(lambda store=store, write=write: go_on_after_interrupts(store, write))
        os.close(write)
        assert os.read(read, 1) == b"!"
        os.close(read)
        store.close()
        # The moment is random; whatever it hits, the end must be the same.
        time.sleep(rng.uniform(0, 0.02))
        for gap in [0.0, rng.choice([0, 0.0003, 0.002])] if twice else [0.0]:
            time.sleep(gap)
            os.kill(pid, signal.SIGINT)
        again = time.monotonic() + 1
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            time.sleep(0.002)
            if time.monotonic() > again:
                again += 1
                os.kill(pid, signal.SIGINT)
        assert os.waitstatus_to_exitcode(found[1]) == 0


def test_ctrl_c_while_the_first_one_waits_for_a_reader() -> None:
    """The second interrupt ends the wait with a KeyboardInterrupt.

    A later loop begins after that reader has finished.
    """

    def run() -> None:
        asked, go_on = threading.Event(), threading.Event()

        class Slow(ArrayStore):
            def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
                if SIZE in rows:
                    asked.set()
                    go_on.wait()
                super().gather(rows, out)

        def twice(*_: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # The second interrupt arrives while the first one waits.
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            raise KeyboardInterrupt

        def again(*_: Any) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, twice)
        signal.signal(signal.SIGALRM, again)
        feeder = Feeder(
            Slow(np.arange(N * 2.0).reshape(N, 2)), batch_size=SIZE, depth=3, device="cpu"
        )
        try:
            for i, _ in enumerate(feeder):
                if i == 0:
                    asked.wait()
                    os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("no interrupt")
        except KeyboardInterrupt:
            pass
        assert threads_left(), "the reader still reads"
        go_on.set()
        assert torch.cat(list(feeder))[:, 0].tolist() == list(range(0, 2 * N, 2))
        feeder.close()
        assert not threads_left()

    assert status(forked(run)) == 0


def train_after_interrupts(moments: list[tuple[float, float]]) -> None:
    """Interrupt a loop over table rows four times, so fast that some hit its end.

    The next loop has to train.
    """
    table = HostEmbedding(9, 2, init="zeros")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=1.0)
    loop = train_rows(
        [torch.tensor([i % 9]) for i in range(200)],
        {table: lambda ids: ids},
        optimizer=optimizer,
        device="cpu",
    )
    left = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal left
        while frame is not None and frame.f_code is not train.__code__:
            frame = frame.f_back
        if frame is None:
            return
        left -= 1
        if left < 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    def train() -> None:
        # torch leaves gradients off if an interrupt hits the end of its own step.
        torch.set_grad_enabled(True)
        optimizer.zero_grad()
        for ids in loop:
            table(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    # Python reports interrupts that hit a finalizer here.
    sys.unraisablehook = lambda _: None
    signal.signal(signal.SIGALRM, press)
    for first, gap in moments:
        left = 4
        signal.setitimer(signal.ITIMER_REAL, first, gap)
        while left > 0:
            with contextlib.suppress(KeyboardInterrupt):
                train()
        before = table.read(range(9))
        train()
        assert (table.read(range(9)) < before).all()


@pytest.mark.parametrize("n", [10, pytest.param(300, marks=pytest.mark.stress)])
def test_interrupts_faster_than_a_loop_over_rows_ends(n: int) -> None:
    rng = random.Random(3)
    moments = [(rng.uniform(0.001, 0.02), rng.choice([0.0001, 0.0005, 0.002])) for _ in range(n)]
    assert status(forked(lambda: train_after_interrupts(moments), limit_s=10 * LIMIT_S)) == 0


# ---- kill -9 -------------------------------------------------------------------------------------


def test_killed_while_rows_are_written_back(tmp_path: Path) -> None:
    """Each row, which lies in one page here, is old or new; a checkpoint restores one moment."""
    # Each row has 128 bytes, and the first row begins at byte 128.
    np.save(tmp_path / "rows.npy", np.zeros((N, 16)))
    rng = random.Random(3)
    with NpyStore(tmp_path / "rows.npy", mode="r+") as store:
        checkpoint.save(tmp_path / "run", rows=store, step=0)
    for _ in range(5):
        read, write = os.pipe()

        def run(ready: int = write) -> None:
            with (
                NpyStore(tmp_path / "rows.npy", mode="r+") as store,
                Feeder(store, batch_size=500, shuffle=True) as feeder,
            ):
                while True:
                    for batch in feeder.batches():
                        batch.write_back(batch.data + 1)
                        os.write(ready, b"!")

        pid = forked(run)
        os.close(write)
        for _ in range(rng.randrange(1, 12)):
            assert os.read(read, 1) == b"!"
        time.sleep(rng.uniform(0, 0.002))
        os.kill(pid, signal.SIGKILL)
        assert status(pid) == -signal.SIGKILL
        os.close(read)
        found = np.load(tmp_path / "rows.npy")
        assert found.shape == (N, 16), "neither header nor length have changed"
        assert (found == found[:, :1]).all(), "no row is half old, half new"
        assert found[:, 0].max() - found[:, 0].min() <= 2, "of the epochs in progress"
        with NpyStore(tmp_path / "rows.npy", mode="r+") as store:
            assert checkpoint.resume(tmp_path / "run", rows=store) == {"step": 0}
        assert not np.load(tmp_path / "rows.npy").any()


# ---- fork and spawn ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "file", "writable file"])
def test_fork_between_loops(kind: str, tmp_path: Path) -> None:
    """The child then has a feeder of its own, and the feeder of the parent continues."""
    x = np.arange(N * 2.0).reshape(N, 2)
    np.save(tmp_path / "x.npy", x)
    store: Any = {
        "array": lambda: x,
        "file": lambda: tmp_path / "x.npy",
        "writable file": lambda: NpyStore(tmp_path / "x.npy", mode="r+"),
    }[kind]()
    with Feeder(store, batch_size=SIZE, depth=3) as feeder:
        next(iter(feeder))

        def run() -> None:
            assert (torch.cat(list(feeder)).numpy() == x).all()
            feeder.close()

        assert status(forked(run)) == 0
        assert (torch.cat(list(feeder)).numpy(force=True) == x).all()
    if kind == "writable file":
        store.close()


def test_fork_in_a_loop(tmp_path: Path) -> None:
    """The child lacks the loop's threads: it gets an error, can end, and can make feeders."""
    x = np.arange(N * 2.0).reshape(N, 2)
    np.save(tmp_path / "x.npy", x)
    with (
        NpyStore(tmp_path / "x.npy", mode="r+") as store,
        Feeder(store, batch_size=SIZE, depth=3) as feeder,
    ):
        loop = feeder.batches()
        batch = next(loop)
        batch.write_back(batch.data)

        def run() -> None:
            for use in (lambda: next(loop), lambda: iter(feeder), feeder.flush_writes):
                with pytest.raises(
                    errors.ClosedError,
                    match="was forked while the loop ran, and does not have the loop's threads",
                ):
                    use()
            feeder.close()
            with Feeder(store, batch_size=SIZE) as own:
                assert (torch.cat(list(own)).numpy() == x).all()

        def leave() -> None:
            # A training step that calls sys.exit closes its loop in this way.
            loop.close()  # type: ignore[attr-defined]

        def write() -> None:
            with pytest.raises(errors.ClosedError, match="forked"):
                batch.write_back(batch.data)

        batch = next(loop)
        for what in (run, leave, write):
            assert status(forked(what)) == 0
        assert len(list(loop)) == N // SIZE - 2


def test_fork_while_a_thread_holds_a_stores_lock(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(9.0))
    with NpyStore(tmp_path / "x.npy") as store:
        with store._lock:
            pid = forked(lambda: rows_of(store))
        assert status(pid) == 0
    assert store in file_store._stores


class Slices:
    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> float:
        return float(rows_of(self._source)[i])


def test_workers_of_a_loader_are_forked_in_a_loop(tmp_path: Path) -> None:
    """The forked workers of a DataLoader may read the store that the loop reads."""
    np.save(tmp_path / "x.npy", np.arange(20.0))
    with NpyStore(tmp_path / "x.npy") as store, Feeder(store, batch_size=1, depth=2) as feeder:
        for x in feeder:
            if x.item() == 3:
                loader = DataLoader(
                    Slices(store), batch_size=None, num_workers=2, multiprocessing_context="fork"
                )
                assert list(loader) == list(range(20))
        assert x.item() == 19


def spawned(source: Any, results: Any) -> None:
    with Feeder(source, batch_size=7) as feeder:
        results.put(sum(float(batch.sum()) for batch in feeder))


@pytest.fixture(scope="module")
def _tracker() -> None:
    """Start the process that Python would start with the first spawned process, and keep."""
    resource_tracker.ensure_running()


@pytest.mark.usefixtures("_tracker")
def test_spawn(tmp_path: Path) -> None:
    """Paths, arrays and read-only stores can be passed; passing a feeder is an error."""
    np.save(tmp_path / "x.npy", np.arange(100.0))
    spawn = multiprocessing.get_context("spawn")
    with NpyStore(tmp_path / "x.npy") as store, Feeder(store, batch_size=7) as feeder:
        results = spawn.Queue()
        with pytest.raises(TypeError, match="a Feeder cannot be pickled or copied"):
            spawn.Process(target=spawned, args=(feeder, results)).start()
        process = spawn.Process(target=spawned, args=(store, results))
        process.start()
        assert results.get(timeout=60) == 4950
        process.join()
        process.close()
        results.close()
        results.join_thread()


# ---- the end of the interpreter ------------------------------------------------------------------

EXIT = """
import sys, threading
import numpy as np, torch
from torch.utils.data import DataLoader
from pinfeed import Feeder, NpyStore, wrap_loader, wrap_readers

began = [threading.Event() for _ in range(2)]
table = np.zeros((1000, 4))
feeder = Feeder(table, batch_size=2)
loop = feeder.batches()
batch = next(loop)
batch.write_back(batch.data + 1)

store = NpyStore(sys.argv[1], mode="r+")
in_file = Feeder(store, batch_size=2).batches()
batch = next(in_file)
batch.write_back(batch.data + 7)

loaded = iter(wrap_loader(DataLoader(list(range(1000)), num_workers=2)))
next(loaded)

def read(i):
    yield np.full(2, i)

readers = iter(wrap_readers(
    range(100), range(100), read_input=read, get_output=read, one_read_count=1, batch_size=4
))
next(readers)

def run(i):
    with Feeder(table, batch_size=2) as own:
        for _ in own:
            began[i].set()
            threading.Event().wait()

for i in range(2):
    threading.Thread(target=run, args=(i,), daemon=True).start()
    began[i].wait()
print("end", flush=True)
"""


def test_the_interpreter_ends_amid_loops(tmp_path: Path, programs: Programs) -> None:
    """The interpreter ends silently, and every write-back is complete.

    The loops are in globals, in daemon threads, and over a loader with processes.
    """
    np.save(tmp_path / "x.npy", np.zeros((100, 2)))
    done = programs.run(EXIT, tmp_path / "x.npy", warnings="error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy")[:, 0], [7, 7] + [0] * 98)


OUTLIVED = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor, thread
import numpy as np, torch
from torch.utils.data import DataLoader
from pinfeed import ArrayStore, Feeder, HostEmbedding, train_rows, wrap_loader, wrap_readers

N = 50
table = np.zeros((10 * N, 2))
changed = ArrayStore(table.copy())

def read(i):
    yield np.full(2, i)

def write_back():
    for batch in Feeder(changed, batch_size=10, device="cpu").batches():
        batch.write_back(batch.data + 1)
        yield batch

LOOPS = {
    "a feeder": lambda: Feeder(table, batch_size=10, device="cpu"),
    "a file": lambda: Feeder(sys.argv[1], batch_size=10, device="cpu"),
    "write-backs": write_back,
    "a loader": lambda: wrap_loader(DataLoader(range(N), batch_size=1), device="cpu"),
    "rows of a table": lambda: train_rows(
        [torch.arange(9) + i for i in range(N)], {HostEmbedding(99, 2): lambda ids: ids},
        device="cpu",
    ),
    "functions": lambda: wrap_readers(
        range(N), range(N), read_input=read, get_output=read, batch_size=1, n_readers=2,
        device="cpu",
    ),
}

def run(name):
    n = 0
    for i in range(2):
        for _ in LOOPS[name]():
            n += 1
            while n == 3 and not thread._shutdown:  # until the main thread has ended
                time.sleep(0.001)
    sys.stdout.write(f"{name} {n}\\n")  # in one piece: other threads write as well
    sys.stdout.flush()

for name in LOOPS:
    threading.Thread(target=run, args=(name,)).start()
ThreadPoolExecutor(1).submit(run, "a feeder")
"""


def test_loops_in_threads_outlive_the_main_thread(tmp_path: Path, programs: Programs) -> None:
    """Each loop gives all its batches, and so does a loop that begins then.

    Python lets non-daemon threads continue.
    """
    np.save(tmp_path / "x.npy", np.zeros((500, 2)))
    done = programs.run(OUTLIVED, tmp_path / "x.npy", warnings="error")
    assert (done.returncode, done.stderr) == (0, "")
    loops = [
        "a feeder",
        "a feeder",
        "a file",
        "a loader",
        "functions",
        "rows of a table",
        "write-backs",
    ]
    assert sorted(done.stdout.splitlines()) == [f"{name} 100" for name in loops]


def test_a_loop_in_a_thread_outlives_the_main_thread_of_a_child() -> None:
    counts = multiprocessing.get_context("fork").SimpleQueue()

    def run() -> None:
        threading.main_thread().join()
        counts.put(sum(1 for _ in Feeder(np.zeros((N, 2)), batch_size=SIZE, device="cpu")))

    process = multiprocessing.get_context("fork").Process(
        target=lambda: threading.Thread(target=run).start()
    )
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    assert counts.get() == N // SIZE


LATE = """
import sys, threading, time
from concurrent import futures
import pinfeed

def run():
    threading.main_thread().join()
    import numpy as np
    feeder = pinfeed.Feeder(np.zeros((100, 2)), batch_size=10, depth=0, device="cpu")
    print(sum(1 for _ in feeder), flush=True)
    for thread in threading.enumerate():
        if thread not in (threading.current_thread(), threading.main_thread()):
            thread.join()
    print("joined", flush=True)

if sys.argv[1] == "suspended":
    import numpy as np
    loop = iter(pinfeed.Feeder(np.zeros((100, 2)), batch_size=10, device="cpu"))
    next(loop)
threading.Thread(target=run).start()
"""


def test_the_first_feeder_is_made_when_the_main_thread_has_ended() -> None:
    """torch is imported late."""
    command = [sys.executable, "-W", "error", "-c", LATE, "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\njoined\n", "")


def test_a_thread_that_joins_all_others_waits_for_no_left_loop(programs: Programs) -> None:
    done = programs.run(LATE, "suspended", warnings="error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\njoined\n", "")
