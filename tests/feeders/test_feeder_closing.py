"""The end of a Feeder's loop, and of the Feeder."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from support.feeders import DEPTHS
from support.internals import runner_of

from pinfeed import ArrayStore, Feeder, NpyStore, errors
from pinfeed.devices.cpu import HostDevice
from pinfeed.stores.window_store import WindowStore
from pinfeed.threads.call import Call
from pinfeed.threads.pool import ThreadPool


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


# ---- ending --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_break_ends_the_loop_at_once(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=10, depth=depth) as feeder:
        for _ in feeder:
            break
        assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]
        assert len(list(feeder)) == 10


def test_an_exception_of_the_loop_ends_it(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    with pytest.raises(ZeroDivisionError):
        for _ in feeder:
            raise ZeroDivisionError
    assert len(list(feeder)) == 10
    feeder.close()


def test_a_feeder_that_is_not_closed_leaves_nothing(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    loop = iter(feeder)
    next(loop)
    gone = weakref.ref(feeder)
    del feeder, loop
    assert gone() is None
    assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]


def test_close(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    loop = iter(feeder)
    next(loop)
    feeder.close()
    feeder.close()
    assert next(loop, None) is None
    for use in (
        lambda: iter(feeder),
        feeder.batches,
        lambda: feeder.set_epoch(0),
        lambda: feeder.load_state_dict({}),
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            use()


def test_close_while_another_thread_waits_for_a_batch(x: np.ndarray) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            if 20 in rows:
                asked.set()
                go_on.wait()
            super().gather(rows, out)

    feeder, caught = Feeder(Slow(x), batch_size=10), []

    def run() -> None:
        try:
            for _ in feeder:
                pass
        except errors.ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    asked.wait()
    while not runner_of(feeder)._active.generator().gi_running:
        pass
    feeder.close()
    go_on.set()
    thread.join()
    assert "closed while its loop was waiting" in str(caught[0])
    with pytest.raises(errors.ClosedError):
        iter(feeder)


@pytest.mark.parametrize("where", ["reader", "writer"])
def test_a_loop_that_is_collected_in_its_own_worker(where: str) -> None:
    table = np.zeros((100, 2))
    dropped = threading.Event()

    class Collecting(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            super().gather(rows, out)
            if where == "reader" and 50 in rows:
                self.collect()

        def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
            super().scatter(rows, values)
            if where == "writer":
                self.collect()

        def collect(self) -> None:
            dropped.wait()
            gc.collect()

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.loop = Feeder(Collecting(table), batch_size=10, depth=3, device="cpu").batches()

    cycle = Cycle()
    batch = next(cycle.loop)
    batch.write_back(batch.data + 1)
    if where == "reader":
        next(cycle.loop)
        next(cycle.loop)
    del cycle, batch
    dropped.set()
    while any(t.name.startswith("pinfeed") for t in threading.enumerate()):
        pass
    assert table[:10].all()


def test_a_feeder_closes_files_that_it_opened_but_no_given_store(
    x: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", x)
    store = NpyStore(tmp_path / "x.npy")
    with Feeder((store, tmp_path / "x.npy"), batch_size=10) as feeder:
        own = feeder._stores.stores[1]
        list(feeder)
    out = np.empty((1, 3), np.float32)
    store.gather(np.array([3]), out)
    with pytest.raises(errors.ClosedError):
        own.gather(np.array([3]), out)
    store.close()


def test_a_memory_map_is_streamed_from_its_file(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    for given, kind in [
        (np.load(tmp_path / "x.npy", mmap_mode="r"), NpyStore),
        (np.load(tmp_path / "x.npy", mmap_mode="r")[10:], ArrayStore),
        (np.load(tmp_path / "x.npy", mmap_mode="c"), ArrayStore),
        (np.memmap(tmp_path / "x.npy", np.float32, "r", 128, (100, 3)), NpyStore),
        (np.memmap(tmp_path / "x.npy", np.float32, "r", 128, (50, 6)), ArrayStore),
        (sliding_window_view(np.memmap(tmp_path / "x.npy", "f4", "r", 128), 7)[5::2], WindowStore),
        (sliding_window_view(np.memmap(tmp_path / "x.npy", "f4", "r+", 256), 7), WindowStore),
        (sliding_window_view(np.memmap(tmp_path / "x.npy", "f4", "c", 128), 7), ArrayStore),
        (sliding_window_view(np.memmap(tmp_path / "x.npy", "f4", "r", 128), 7)[::7], ArrayStore),
        (
            sliding_window_view(np.load(tmp_path / "x.npy", mmap_mode="r"), (8, 3))[:, 0],
            WindowStore,
        ),
        (sliding_window_view(np.load(tmp_path / "x.npy", mmap_mode="r"), 8, 0), ArrayStore),
        (sliding_window_view(x.ravel(), 7), ArrayStore),
    ]:
        with Feeder(given, batch_size=7, shuffle=True) as feeder:
            assert type(feeder._stores.stores[0]) is kind
            for batch in feeder.batches():
                np.testing.assert_array_equal(batch.data.numpy(force=True), given[batch.rows])


def test_a_memory_map_keeps_its_file_after_a_replacement(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.save(tmp_path / "other.npy", x + 1)
    (tmp_path / "other.npy").replace(tmp_path / "x.npy")
    with Feeder(mapped, batch_size=100) as feeder:
        np.testing.assert_array_equal(next(iter(feeder)).numpy(force=True), x)
    windows = sliding_window_view(mapped, (8, 3))[:, 0]
    with Feeder(windows, batch_size=100) as feeder:
        assert type(feeder._stores.stores[0]) is ArrayStore
        np.testing.assert_array_equal(next(iter(feeder)).numpy(force=True), windows)


# ---- closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_that_begins_after_its_feeder_was_closed(x: np.ndarray, depth: int) -> None:
    """It must not look like an epoch without batches."""
    with Feeder(x, batch_size=10, depth=depth) as feeder:
        loops = [iter(feeder)]
    for loop in loops:
        with pytest.raises(errors.ClosedError, match="the feeder is closed"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_feeder_that_another_thread_closes(x: np.ndarray, depth: int) -> None:
    """Its loop must not seem to have reached its end."""
    feeder = Feeder(x, batch_size=10, depth=depth)
    loop = feeder.batches()
    batch = next(loop)
    thread = threading.Thread(target=feeder.close)
    thread.start()
    thread.join()
    with pytest.raises(errors.ClosedError, match="another thread closed"):
        batch.write_back(batch.data)
    with pytest.raises(errors.ClosedError, match="another thread closed"):
        next(loop)


class AwaitedCall:
    """A call that seems to be running, and that runs a function when a thread waits for it."""

    def __init__(self, call: Call[Any], hook: Callable[[], None]) -> None:
        self.call, self.hook = call, hook

    def done(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        self.hook()
        return self.call.exception()


def test_another_thread_closes_a_feeder_that_awaits_a_write_back(
    x: np.ndarray,
) -> None:
    """Both wait for the same write-back, whose error is raised once."""

    class Full(ArrayStore):
        def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
            raise OSError("the disk is full")

    caught: list[BaseException] = []
    closers: list[threading.Thread] = []

    def close() -> None:
        try:
            feeder.close()
        except OSError as error:
            caught.append(error)

    def hook() -> None:
        if not closers:
            closers.append(threading.Thread(target=close))
            closers[0].start()
            closers[0].join()

    class Threads(ThreadPool):
        def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
            return AwaitedCall(super().submit(fn, *args), hook)

    class Device(HostDevice):
        def worker(self, name: str, n_threads: int = 1) -> ThreadPool:
            return (Threads if name == "pinfeed-write" else ThreadPool)(n_threads, name)

    feeder = Feeder(Full(x), batch_size=10, depth=1, device=Device())
    loop = feeder.batches()
    with pytest.raises(errors.ClosedError, match="another thread closed"):
        for batch in loop:
            batch.write_back(batch.data)
    assert [str(error) for error in caught] == ["the disk is full"]
