"""Long batches for a device are gathered in pieces, by several threads."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.schedules import SLOTS

from pinfeed import ArrayStore, Feeder, NpyStore, PinnedStore
from pinfeed.devices.cpu import HostDevice
from pinfeed.errors import ReadError
from pinfeed.native import library as native
from pinfeed.pipeline import loop_threads
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import Cancelled
from pinfeed.stores import host_rows
from pinfeed.stores.host_rows import StoreRows, gather_pieces, never
from pinfeed.testing import SimDevice, favour

HELPERS = "pinfeed-read-helper"
BATCHES = [np.random.default_rng(i).integers(0, 100, 20 + i) for i in range(8)]

needs_native = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())


@pytest.fixture
def batches_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads gather the batches of these tests, on any machine."""
    monkeypatch.setattr(loop_threads, "N_GATHERING_THREADS", 5)
    monkeypatch.setattr(host_rows, "DIVIDED_NBYTES", 1)
    monkeypatch.setattr(host_rows, "_PIECE_NBYTES", 100)


def table() -> np.ndarray:
    return np.random.default_rng(0).random((100, 4))


class Noting(SimDevice):
    """Device that notes the names of its threads."""

    def __init__(self, choose: Any) -> None:
        super().__init__(choose)
        self.workers: set[str] = set()

    def worker(self, name: str, n_threads: int = 1) -> Any:
        self.workers.add(name)
        return super().worker(name, n_threads)


@pytest.mark.usefixtures("batches_are_long")
@pytest.mark.parametrize("corner", [(), SLOTS, (HELPERS,)], ids=str)
@pytest.mark.parametrize("depth", [0, 2])
def test_batches_and_written_rows_equal_those_of_the_plain_loop(
    corner: tuple[str, ...], depth: int
) -> None:
    rows = table()
    expected = table()
    batches = [np.unique(batch) for batch in BATCHES]
    device = Noting(favour("compute", *corner))
    seen: list[np.ndarray] = []
    with Feeder(ArrayStore(rows), rows=batches, depth=depth, device=device) as feeder:
        for batch in feeder.batches():
            device.launch(lambda x: seen.append(x.copy()), batch.data)
            device.launch(lambda x: np.copyto(x, x * 2 + 1), batch.data)
            batch.write_back(batch.data)
    device.drain()
    for batch, found in zip(batches, seen, strict=True):
        np.testing.assert_array_equal(found, expected[batch])
        expected[batch] = expected[batch] * 2 + 1
    np.testing.assert_array_equal(rows, expected)
    assert (HELPERS in device.workers) == (depth > 0 and not native.why_not())


@pytest.mark.usefixtures("batches_are_long", "without_native")
def test_without_the_compiled_part_one_thread_gathers_a_batch() -> None:
    device = Noting(favour("compute"))
    seen: list[np.ndarray] = []
    with Feeder(table(), rows=BATCHES, depth=2, device=device) as feeder:
        for batch in feeder:
            device.launch(lambda x: seen.append(x.copy()), batch)
    device.drain()
    for batch, found in zip(BATCHES, seen, strict=True):
        np.testing.assert_array_equal(found, table()[batch])
    assert HELPERS not in device.workers


@needs_native
@pytest.mark.usefixtures("batches_are_long")
def test_rows_of_a_file_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, table())
    device = Noting(favour("compute", HELPERS))
    with Feeder(path, rows=BATCHES, depth=2, device=device) as feeder:
        for _ in range(2):
            seen: list[np.ndarray] = []
            for batch in feeder:
                device.launch(lambda x, seen=seen: seen.append(x.copy()), batch)
            device.drain()
            for rows, found in zip(BATCHES, seen, strict=True):
                np.testing.assert_array_equal(found, table()[rows])
    assert HELPERS in device.workers


@needs_native
@pytest.mark.usefixtures("batches_are_long")
@pytest.mark.parametrize("row_nbytes", [24, 64, 8192])
@pytest.mark.parametrize("make", [ArrayStore, functools.partial(PinnedStore, pin=False)])
def test_pieces_fill_the_whole_part(make: Callable[..., ArrayStore], row_nbytes: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, row_nbytes), np.uint8)
    rows = np.random.default_rng(1).integers(0, 50, 33)
    out = np.zeros((33, row_nbytes), np.uint8)
    pieces = gather_pieces(StoreRows(make(array), rows), out, never)
    assert pieces is not None
    threads = LoopThreads(HostDevice(), PrefetchSchedule(2, n_readers=3))
    threads.gather_all(pieces)
    threads.join_readers()
    np.testing.assert_array_equal(out, array[rows])


@needs_native
@pytest.mark.usefixtures("batches_are_long")
def test_pieces_of_a_file_that_has_shrunk_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((10_000, 8)))
    rows = np.arange(0, 10_000, 7)
    out = np.zeros((len(rows), 8))
    threads = LoopThreads(HostDevice(), PrefetchSchedule(2, n_readers=3))
    with NpyStore(path) as store, contextlib.closing(store.map_rows()) as mapped:
        pieces = gather_pieces(StoreRows(mapped, rows), out, never)
        assert pieces is not None
        with open(path, "r+b") as file:
            file.truncate(5000)
        with pytest.raises(ReadError, match="has shrunk to 5000 bytes"):
            threads.gather_all(pieces)
    threads.join_readers()


@needs_native
@pytest.mark.usefixtures("batches_are_long")
def test_pieces_end_with_the_loop() -> None:
    def stop() -> None:
        raise Cancelled

    out = np.zeros((3, 4))
    pieces = gather_pieces(StoreRows(ArrayStore(table()), np.arange(3)), out, stop)
    assert pieces is not None
    with pytest.raises(Cancelled):
        LoopThreads(HostDevice(), PrefetchSchedule(2, n_readers=5)).gather_all(pieces)
    assert not out.any()


class Replaced(ArrayStore):
    """Rows that ``gather`` changes."""

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        out += 1


@pytest.mark.usefixtures("batches_are_long")
def test_rows_that_a_store_gathers_itself_have_no_pieces() -> None:
    out = np.zeros((3, 4))
    assert gather_pieces(StoreRows(Replaced(table()), np.arange(3)), out, never) is None


def test_a_short_batch_has_no_pieces() -> None:
    out = np.zeros((3, 4))
    assert gather_pieces(StoreRows(ArrayStore(table()), np.arange(3)), out, never) is None


@pytest.mark.parametrize(("n_threads", "expected"), [(-1, 0), (3, 0), (6, 3), (16, 13)])
def test_readers_count_among_the_gathering_threads(
    n_threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Counting(HostDevice):
        def worker(self, name: str, n_threads: int = 1) -> Any:
            started.append(n_threads)
            return super().worker(name, 1)

    monkeypatch.setattr(loop_threads, "N_GATHERING_THREADS", n_threads)
    threads = LoopThreads(Counting(), PrefetchSchedule(2, n_readers=3))
    threads.gather_all([int] * 4)
    threads.join_readers()
    assert started == [expected] * bool(expected)
