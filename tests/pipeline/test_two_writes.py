"""Two write-backs are in progress at a time, and may write the same rows."""

import contextlib
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import runner_of
from support.reader_functions import StagingDevice
from support.schedules import SLOTS, STREAMS, corners, next_stream

from pinfeed import ArrayStore, Feeder
from pinfeed.devices.cpu import HostDevice
from pinfeed.errors import ClosedError
from pinfeed.pipeline import loop_threads, writer
from pinfeed.pipeline.loop_threads import LoopThreads
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import BatchValues
from pinfeed.pipeline.transfer import Transfer
from pinfeed.pipeline.writer import StagedRows
from pinfeed.testing import SimDevice, favour, lazy

N = 12
CORNERS = corners({"write": (3, 5, 8, 13, 20)})
EVERY_ROW = [np.arange(N) for _ in range(9)]
THIRDS = [np.arange(4) + 4 * (i % 3) for i in range(9)]


def added_up(
    device: SimDevice,
    batches: list[np.ndarray],
    depth: int = 3,
    *,
    switch_once: int | None = None,
) -> np.ndarray:
    """Let every batch triple its rows and add its number; return the rows after the loop."""
    rows = np.zeros((N, 2))
    with Feeder(ArrayStore(rows), rows=batches, depth=depth, device=device) as feeder:
        for i, batch in enumerate(feeder.batches()):
            device.launch(lambda x, i=i: np.copyto(x, x * 3 + i), batch.data)
            batch.write_back(batch.data)
            if name := next_stream(i, None, switch_once):
                device.switch(name)
    return rows


def expected(batches: list[np.ndarray]) -> np.ndarray:
    rows = np.zeros((N, 2))
    for i, batch in enumerate(batches):
        rows[batch] = rows[batch] * 3 + i
    return rows


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("corner", CORNERS)
def test_the_last_of_several_writes_to_a_row_wins(corner: str, direct: bool) -> None:
    device = SimDevice(CORNERS[corner](), direct=direct)
    np.testing.assert_array_equal(added_up(device, EVERY_ROW), expected(EVERY_ROW))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("corner", CORNERS)
def test_writes_in_two_streams(corner: str, direct: bool) -> None:
    """The write before the change of the stream is in progress when the next one begins."""
    for batches, switch_once in itertools.product((EVERY_ROW, THIRDS), (1, 4)):
        device = SimDevice(CORNERS[corner](), direct=direct)
        found = added_up(device, batches, switch_once=switch_once)
        np.testing.assert_array_equal(found, expected(batches))


class Watched(SimDevice):
    """Device that records the order of queued copies of write-backs and of scattered rows."""

    def __init__(self, choose: Any) -> None:
        super().__init__(choose)
        self.order: list[str] = []

    def copy(self, src: Any, dst: Any, stream: Any) -> None:
        if isinstance(dst, np.ndarray):
            self.order.append("copy")
        super().copy(src, dst, stream)


class Noting(ArrayStore):
    """Rows that record when they are written."""

    order: list[str]

    def scatter(self, rows: Any, values: Any) -> None:
        self.order.append("scatter")
        super().scatter(rows, values)


def test_a_write_is_copied_while_another_is_scattered() -> None:
    device = Watched(favour(*STREAMS, "pinfeed-read"))
    store = Noting(np.zeros((N, 2)))
    store.order = device.order
    with Feeder(store, rows=EVERY_ROW, depth=3, device=device) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
    n_copied = [device.order[: i + 1].count("copy") for i in range(len(device.order))]
    n_scattered = [i + 1 - n for i, n in enumerate(n_copied)]
    ahead = [n - m for n, m in zip(n_copied, n_scattered, strict=True)]
    # There is staging memory for two.
    assert max(ahead) == 2
    assert min(ahead) == 0


def test_staging_memory_waits_until_its_rows_are_scattered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the wait for the write before the last one, values are overwritten."""

    class Deaf(Transfer):
        def begin_write(self, pending: Any, earlier: Any) -> None:
            super().begin_write(pending, ())

    def run() -> np.ndarray:
        # Only the scatters are late.
        return added_up(SimDevice(favour(*STREAMS, "pinfeed-read")), THIRDS)

    np.testing.assert_array_equal(run(), expected(THIRDS))
    monkeypatch.setattr("pinfeed.pipeline.epochs.Transfer", Deaf)
    assert not np.array_equal(run(), expected(THIRDS))


class Failing(ArrayStore):
    """Rows in memory that fail in one write."""

    n_left = 2

    def scatter(self, rows: Any, values: Any) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            raise OSError("the disk is full")
        super().scatter(rows, values)


class Mixed(SimDevice):
    """A device that reaches some of the stores."""

    def reaches(self, source: Any) -> bool:
        return type(getattr(source, "store", source)) is ArrayStore


@pytest.mark.parametrize("corner", CORNERS)
def test_direct_device_writes_do_not_overtake_a_failing_write(
    corner: str,
) -> None:
    direct = np.zeros(N)
    staged = np.zeros(N)
    device = Mixed(CORNERS[corner]())
    stores = (ArrayStore(direct), Failing(staged))
    feeder = Feeder(stores, rows=EVERY_ROW, depth=3, device=device)
    with pytest.raises(OSError, match="the disk is full"):
        for batch in feeder.batches():
            for data in batch.data:
                device.launch(lambda x: np.copyto(x, x + 1), data)
            batch.write_back(batch.data)
    feeder.close()
    device.drain()
    assert staged.tolist() == [2] * N
    # The write that failed was queued as a whole; none after it was.
    assert direct.tolist() == [3] * N


class Rerouted(SimDevice):
    """A device that reaches the stores from a moment on, as another feeder on it may decide."""

    n_staged = 8

    def reaches(self, source: Any) -> bool:
        return self.n_staged <= 0

    def copy(self, src: Any, dst: Any, stream: Any) -> None:
        # Copies to the host are those of staged write-backs.
        self.n_staged -= isinstance(dst, np.ndarray)
        super().copy(src, dst, stream)


@pytest.mark.parametrize(
    "choose", [favour(*STREAMS, "pinfeed-read"), *(make() for make in CORNERS.values())]
)
def test_direct_device_writes_do_not_overtake_a_scatter(choose: Any) -> None:
    found = added_up(Rerouted(choose), EVERY_ROW)
    np.testing.assert_array_equal(found, expected(EVERY_ROW))


@pytest.mark.parametrize("direct", [False, True])
def test_nothing_moves_after_an_interrupt_between_the_two_steps(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of the second write-back are queued, and then no call waits for their end."""
    n_left = 1
    submit = LoopThreads.submit_write

    def interrupted(self: Any, *args: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt
        return submit(self, *args)

    monkeypatch.setattr(LoopThreads, "submit_write", interrupted)
    device = SimDevice(lazy, direct=direct)
    with pytest.raises(KeyboardInterrupt):
        added_up(device, EVERY_ROW)
    gc.collect()
    # The memory that the loop has freed is used again.
    later = [device.array((N, 2), "f8") for _ in range(8)]
    for array in later:
        device.launch(lambda a: a.fill(7), array)
    device.drain()
    assert all((array._array == 7).all() for array in later)


def test_rows_that_the_user_changes_in_place() -> None:
    """The row indices of a batch belong to the user, and changes do not affect other batches."""
    found = []
    for depth in (0, 3):
        rows = np.arange(12.0)
        with Feeder(
            ArrayStore(rows), rows=[np.arange(4)] * 4, depth=depth, device=SimDevice(lazy)
        ) as feeder:
            for i, batch in enumerate(feeder.batches()):
                if i % 2:
                    batch.rows += 1
                else:
                    feeder._device.launch(lambda x: np.copyto(x, x * 2 + 1), batch.data)
                    batch.write_back(batch.data)
        found.append(rows)
    np.testing.assert_array_equal(*found)


# -- several threads -------------------------------------------------------------------------------


def pieces(store: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int = 64) -> list[Callable]:
    monkeypatch.setattr(writer, "_PIECE_NBYTES", nbytes)
    rows = np.random.default_rng(0).permutation(40)
    return list(StagedRows(store, rows, np.arange(80.0).reshape(40, 2)[rows]).scatters())


def test_rows_in_memory_are_scattered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArrayStore(np.zeros((40, 2)))
    found = pieces(store, monkeypatch)
    assert len(found) == 10
    random.Random(0).shuffle(found)
    for scatter in found:
        scatter()
    np.testing.assert_array_equal(store.array, np.arange(80.0).reshape(40, 2))
    assert len(pieces(store, monkeypatch, 1 << 20)) == 1
    assert len(pieces(store, monkeypatch, 1)) == 40


def test_rows_of_another_store_are_scattered_by_one_thread() -> None:
    store = Failing(np.zeros((40, 2)))
    staged = StagedRows(store, np.arange(2), np.zeros((2, 2)))
    assert not staged.is_in_memory
    assert staged._replace(store=ArrayStore(np.zeros((40, 2)))).is_in_memory


def test_an_empty_batch_needs_no_call() -> None:
    store = ArrayStore(np.zeros((4, 2)))
    staged = StagedRows(store, np.zeros(0, np.int64), np.zeros((0, 2)))
    assert list(staged.scatters()) == []


@pytest.mark.parametrize("n_helpers", [0, 2])
def test_all_calls_end_before_an_error_is_raised(
    n_helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_threads, "N_SCATTER_HELPERS", n_helpers)
    done: list[int] = []
    names = set()
    both = threading.Barrier(1 + bool(n_helpers), timeout=60)

    def call(i: int) -> None:
        names.add(threading.current_thread().name)
        if i < 2:
            both.wait()
        if i == 1:
            raise OSError("the disk is full")
        done.append(i)

    threads = LoopThreads(HostDevice(), PrefetchSchedule(2), is_named=False)
    with pytest.raises(OSError, match="the disk is full"):
        threads.scatter_all([lambda i=i: call(i) for i in range(6)])
    assert sorted(done) == [0, 2, 3, 4, 5]
    threads.join_writers()
    assert len(names) > 1 or not n_helpers


@pytest.mark.parametrize("n_helpers", [0, 1])
def test_the_error_of_a_scatter_does_not_keep_itself(
    n_helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_threads, "N_SCATTER_HELPERS", n_helpers)

    class Full(OSError):
        """An error with weak references."""

    made: list[weakref.ref[Full]] = []

    def fail() -> None:
        error = Full()
        made.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    threads = LoopThreads(HostDevice(), PrefetchSchedule(2))
    gc.disable()
    try:
        with contextlib.suppress(Full):
            threads.scatter_all([lambda: None, fail])
        threads.join_writers()
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_calls_are_made_in_the_same_thread_if_the_program_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pools accept no more calls then, but write-backs are completed."""
    monkeypatch.setattr(loop_threads, "N_SCATTER_HELPERS", 1)
    done: list[int] = []
    threads = LoopThreads(HostDevice(), PrefetchSchedule(2), is_named=False)
    threads.scatter_all([lambda i=i: done.append(i) for i in range(3)])
    threads.join_writers()
    threads.scatter_all([lambda i=i: done.append(i) for i in range(3, 6)])
    assert sorted(done) == list(range(6))


def test_a_loop_that_has_ended_takes_no_writes() -> None:
    """Another thread may close the feeder while the loop is about to write."""
    threads = LoopThreads(HostDevice(), PrefetchSchedule(2), is_named=False)
    threads.join_writers()
    with pytest.raises(ClosedError, match="another thread closed"):
        threads.submit_write(0, print)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_error_of_a_write_keeps_no_batch(depth: int) -> None:
    class Failing(ArrayStore):
        def scatter(self, rows: Any, values: Any) -> None:
            raise OSError("the disk is full")

    alive: list[weakref.ref[Any]] = []

    def run() -> None:
        with Feeder(Failing(np.zeros((N, 2))), batch_size=4, depth=depth, device="cpu") as feeder:
            for batch in feeder.batches():
                alive.append(weakref.ref(batch.data))
                batch.write_back(batch.data)

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            run()
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()
    assert alive


@pytest.mark.parametrize("corner", [(), SLOTS, ("pinfeed-scatter-helper",)], ids=str)
def test_helpers_of_the_writer(corner: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_threads, "N_SCATTER_HELPERS", 2)
    monkeypatch.setattr(writer, "_PIECE_NBYTES", 16)
    np.testing.assert_array_equal(
        added_up(SimDevice(favour("compute", *corner)), EVERY_ROW), expected(EVERY_ROW)
    )


class WritingAgain(ArrayStore):
    """Rows whose first scatter writes more, as if the garbage collector ended a loop there."""

    again: Any = None

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.may_go_on = threading.Event()

    def scatter(self, rows: Any, values: Any) -> None:
        super().scatter(rows, values)
        again, self.again = self.again, None
        if again is not None:
            self.may_go_on.wait()
            again()


def test_a_write_from_the_writer_thread_does_not_wait_for_itself() -> None:
    """The last step of a loop may write rows, in whatever thread Python frees the loop."""
    store = WritingAgain(np.zeros((N, 2)))
    with Feeder(store, rows=THIRDS[:3], depth=2, device=StagingDevice()) as feeder:
        batches = feeder.batches()
        first = next(batches)
        queue = runner_of(feeder)._last_loop.writes
        groups = first._lent.groups
        values = torch.full((4, 2), 7.0, dtype=torch.float64)
        store.again = lambda: queue.add(
            queue._writer.capture_values(BatchValues(0, groups, [[values]]), copied=True),
            check=False,
        )
        first.write_back(first.data + 1)
        second = next(batches)
        second.write_back(second.data + 1)
        store.may_go_on.set()
    assert store.array.tolist() == [[7, 7]] * 4 + [[1, 1]] * 4 + [[0, 0]] * 4
